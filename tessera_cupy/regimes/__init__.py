"""Regimes: which plan a request gets, from the profile table of its architecture.

>>> from tessera_cupy.regimes import PlanSpec
>>> PlanSpec.parse("attend_mma/q128k64/split-pack/longest").tile_q
128
"""

from tessera_cupy.regimes.features import Features
from tessera_cupy.regimes.index import Choice
from tessera_cupy.regimes.plan_spec import PlanSpec
from tessera_cupy.regimes.table import Table, load_for, load_table

__all__ = ["Choice", "Features", "PlanSpec", "Table", "load_for", "load_table"]
