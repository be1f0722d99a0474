"""Numbers that rules are given: of the right kind and in range, or refused by name."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tessera_cupy.errors import wrong


def real(name: str, value: Any, expected: str, fix: str) -> float:
    """A number of Python's or NumPy's, which may be infinite or NaN; one too large is infinite.

    Raises:
        TypeError: it is no number, or a bool.

    >>> real("threshold", -(10**400), "a number", "pass a float")
    -inf
    """
    if isinstance(value, bool) or not isinstance(value, float | int | np.floating | np.integer):
        raise TypeError(wrong(name, expected, repr(value), fix))
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def share(name: str, value: Any, fix: str, expected: str = "a share from 0 to 1") -> float:
    """A number from 0 to 1.

    Raises:
        TypeError: it is no number, or a bool.
        ValueError: it is outside of the range.

    >>> share("top_p", 1, "pass 0.9")
    1.0
    """
    number = real(name, value, expected, fix)
    if not 0 <= number <= 1:
        raise ValueError(wrong(name, expected, value, fix))
    return number


def whole(name: str, value: Any, least: int, most: int | None, fix: str, expected: str = "") -> int:
    """An integer of Python's or NumPy's from ``least`` to ``most``.

    Args:
        name: of the argument.
        value: what came.
        least: smallest one.
        most: largest one; None for any.
        fix: what to do.
        expected: what is expected; by default the range.

    Raises:
        TypeError: it is no integer, or a bool.
        ValueError: it is outside of the range.

    >>> whole("seed", 7, 0, None, "pass 0")
    7
    """
    above = f"at least {least}" if most is None else f"from {least} to {most}"
    expected = expected or f"an int, {above}"
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(wrong(name, expected, repr(value), fix))
    number = int(value)
    if number < least or (most is not None and number > most):
        raise ValueError(wrong(name, expected, value, fix))
    return number


def switch(name: str, value: Any) -> bool:
    """True or False.

    Raises:
        TypeError: it is neither.
    """
    if not isinstance(value, bool | np.bool_):
        raise TypeError(wrong(name, "True or False", repr(value), "pass one of them"))
    return bool(value)


def one_of(name: str, value: Any, names: tuple[str, ...], fix: str) -> str:
    """One of some names.

    Raises:
        ValueError: it is none of them.
    """
    if not isinstance(value, str) or value not in names:
        expected = " or ".join([", ".join(map(repr, names[:-1])), repr(names[-1])])
        raise ValueError(wrong(name, expected, repr(value), fix))
    return value
