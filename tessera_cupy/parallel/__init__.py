"""Sparse attention over several GPUs, inside a program of torch.distributed.

Each rank holds a shard of the sequence and the whole mask; :func:`attention` gives it the attention
of its shard over all keys, by Ulysses, a ring, or both. :func:`predict` says beforehand, on one
machine without GPUs or torch, how even that is, what it moves, and which way is fastest.

>>> import numpy as np
>>> from tessera_cupy import ArraySpec, BlockMask
>>> mask = BlockMask.from_dense(np.ones((6, 32, 32), bool), (128, 128))
>>> found = predict(mask, ArraySpec((1, 6, 4096, 128)), ranks=4, scheme="ulysses")
>>> found.best.schedule.deal.q, round(found.best.balance, 2)
(((0, 4), (1, 5), (2,), (3,)), 1.33)
"""

from tessera_cupy.parallel.call import attention
from tessera_cupy.parallel.degrees import Degrees
from tessera_cupy.parallel.heads import Deal
from tessera_cupy.parallel.plan import ParallelPlan, make_plan
from tessera_cupy.parallel.predict import Forecast, Scheme, predict
from tessera_cupy.parallel.schedule import Schedule, make_schedule
from tessera_cupy.parallel.shards import Shards, Span, even_lengths
from tessera_cupy.parallel.simulate import simulate

__all__ = [
    "Deal",
    "Degrees",
    "Forecast",
    "ParallelPlan",
    "Schedule",
    "Scheme",
    "Shards",
    "Span",
    "attention",
    "even_lengths",
    "make_plan",
    "make_schedule",
    "predict",
    "simulate",
]
