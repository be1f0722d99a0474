"""The float64 oracle and the tile-by-tile executor: what every kernel is tested against.

:func:`attention` computes softmax attention over the mask's tokens in float64 and knows
nothing of tiles. :func:`execute` and :func:`execute_tiles` run a plan's tiles and tasks in
NumPy, step by step, as a kernel does; they need no GPU.

>>> import numpy as np
>>> from tessera_cupy import reference
>>> q = k = v = np.ones((1, 1, 3, 64))
>>> reference.attention(q, k, v, None).shape
(1, 1, 3, 64)
"""

from __future__ import annotations

from tessera_cupy.reference.executor import Executable, execute, execute_tiles
from tessera_cupy.reference.oracle import attention

__all__ = ["Executable", "attention", "execute", "execute_tiles"]
