"""Organization: physical tiles to tasks in launch order.

>>> from tessera_cupy.organization import Organization
>>> Organization.parse("runs+longest").longest
True
"""

from __future__ import annotations

from tessera_cupy.organization.organize import DeviceModel, Organization, organize
from tessera_cupy.organization.tasks import Tasks
from tessera_cupy.organization.twins import find_twins

__all__ = ["DeviceModel", "Organization", "Tasks", "find_twins", "organize"]
