"""Packages that only the demo needs, and a clear word when one is missing."""

from __future__ import annotations

from importlib.machinery import ModuleSpec
from importlib.util import find_spec

from tessera_cupy.errors import MissingExtraError as MissingExtraError


def need(module: str, package: str, purpose: str) -> ModuleSpec:
    """Find a module of the ``demo`` extra without importing it.

    Args:
        module: import name.
        package: name on the package index.
        purpose: what it is for, as in "decodes the clips".

    Raises:
        MissingExtraError: it is not installed.
    """
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise MissingExtraError(
            f"The demo needs {package}, which {purpose}, and it is not installed. "
            f"Fix: pip install {package} (the extra `demo` has all that it needs)."
        )
    return spec
