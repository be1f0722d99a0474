"""Put the CUDA sources and the profile tables into wheels, and only there.

The ``force-include`` table of pyproject.toml would copy them into ``site-packages`` on an
editable install too, where they would go stale beside the checkout that is being edited.
"""

from __future__ import annotations

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class DataFolders(BuildHookInterface[Any]):
    """Add the two data folders as ``tessera_cupy/_data``."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the folders to a standard wheel; an editable install reads the checkout's own."""
        if version != "editable":
            for folder in ("kernels_cu", "plans"):
                build_data["force_include"][folder] = f"tessera_cupy/_data/{folder}"
