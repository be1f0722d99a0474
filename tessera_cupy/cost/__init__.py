"""What a plan is predicted to cost on a GPU that need not be here.

>>> from tessera_cupy.cost import typical_gpu
>>> typical_gpu("sm_89").name
'RTX 4090'
"""

from tessera_cupy.cost.devices import GPUS, Gpu, find_gpu, typical_gpu
from tessera_cupy.cost.model import Prediction, predict, predict_tasks
from tessera_cupy.cost.work import Work, count_work

__all__ = [
    "GPUS",
    "Gpu",
    "Prediction",
    "Work",
    "count_work",
    "find_gpu",
    "predict",
    "predict_tasks",
    "typical_gpu",
]
