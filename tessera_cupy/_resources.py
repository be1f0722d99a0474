"""Where the CUDA sources and the profile tables are, in a wheel and in a checkout.

A wheel carries both inside the package, under ``_data``. In a source checkout,
which is also what an editable install imports, they are the folders beside the
package. The packaged copy is looked for first, because an installed package may
well have an unrelated ``plans`` folder beside it in ``site-packages``.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from tessera_cupy.errors import TesseraError

_PACKAGE = Path(__file__).resolve().parent


def kernels_dir() -> Path:
    """Return the folder with the CUDA sources.

    Returns:
        An absolute path; ``kernels_dir() / "common"`` holds the shared headers.

    Raises:
        TesseraError: The folder is in neither place, so the install is incomplete.

    Example:
        >>> (kernels_dir() / "attend_mma.cu").is_file()
        True
    """
    return _find(_PACKAGE, "kernels_cu", "attend_mma.cu")


def plans_dir() -> Path:
    """Return the folder with the profile tables, one YAML file for each architecture.

    Returns:
        An absolute path.

    Raises:
        TesseraError: The folder is in neither place, so the install is incomplete.

    Example:
        >>> sorted(path.suffix for path in plans_dir().iterdir())[-1]
        '.yaml'
    """
    return _find(_PACKAGE, "plans", "*.yaml")


@cache
def _find(package: Path, name: str, marker: str) -> Path:
    """Return the first of the two places that holds a file matching ``marker``."""
    places = (package / "_data" / name, package.parent / name)
    for place in places:
        if any(place.glob(marker)):
            return place
    raise TesseraError(
        f"`{name}` of tessera_cupy is not installed: looked for {marker} in "
        f"{places[0]} and in {places[1]}. Fix: reinstall tessera-cupy, or install a source "
        "checkout with `pip install -e .` so that the package is read from there."
    )
