"""How the ranks of a group divide the work: heads by Ulysses, keys by a ring, or both."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

from tessera_cupy.errors import wrong

#: Schemes that have a name; a hybrid is named by its degrees.
SCHEMES = ("ulysses", "ring", "auto")


class Degrees(NamedTuple):
    """Ranks that share heads, and rings of these: ``ulysses_degree * ring_degree`` is the group.

    Rank ``r`` is place ``r % ulysses_degree`` of the Ulysses group ``r // ulysses_degree``, so that
    neighbours, which are mostly on one host, exchange heads, as in diffusers' mesh
    ``("ring", "ulysses")``.
    """

    ulysses_degree: int
    ring_degree: int

    @property
    def ranks(self) -> int:
        """Size of the group."""
        return self.ulysses_degree * self.ring_degree

    @property
    def name(self) -> str:
        """The scheme's name.

        >>> Degrees(4, 1).name, Degrees(1, 4).name, Degrees(2, 2).name
        ('ulysses', 'ring', 'ulysses 2 x ring 2')
        """
        if self.ring_degree == 1:
            return "ulysses"
        if self.ulysses_degree == 1:
            return "ring"
        return f"ulysses {self.ulysses_degree} x ring {self.ring_degree}"


def every(ranks: int) -> list[Degrees]:
    """All degrees for so many ranks, Ulysses first.

    >>> [(u, r) for u, r in every(4)]
    [(4, 1), (2, 2), (1, 4)]
    """
    return [Degrees(u, ranks // u) for u in range(ranks, 0, -1) if ranks % u == 0]


def checked_scheme(scheme: Any, ranks: int) -> Degrees | None:
    """The degrees of a scheme; None for ``"auto"``.

    Args:
        scheme: one of :data:`SCHEMES`, or (ulysses_degree, ring_degree), also as a mapping or an
            object with these two names, such as diffusers' ``ContextParallelConfig``.
        ranks: size of the group.

    Raises:
        TypeError: anything else.
        ValueError: another name, or degrees whose product is not ``ranks``.

    >>> checked_scheme("ring", 4), checked_scheme({"ulysses_degree": 2, "ring_degree": 2}, 4)
    (Degrees(ulysses_degree=1, ring_degree=4), Degrees(ulysses_degree=2, ring_degree=2))
    """
    names = ", ".join(map(repr, SCHEMES))
    expected = f"{names}, or degrees (ulysses_degree, ring_degree)"
    if isinstance(scheme, str):
        if scheme not in SCHEMES:
            raise ValueError(wrong("scheme", expected, repr(scheme), "name one of them"))
        known = {"ulysses": Degrees(ranks, 1), "ring": Degrees(1, ranks)}
        return known.get(scheme)
    given = scheme
    if isinstance(scheme, dict):
        given = tuple(scheme.get(name) for name in Degrees._fields)
    elif hasattr(scheme, "ulysses_degree") and hasattr(scheme, "ring_degree"):
        given = (scheme.ulysses_degree, scheme.ring_degree)
    try:
        degrees = Degrees(*(operator.index(degree) for degree in given))
    except TypeError:
        raise TypeError(wrong("scheme", expected, repr(scheme), "pass (2, 2)")) from None
    if min(degrees) < 1 or degrees.ranks != ranks:
        got = f"{degrees.ulysses_degree} x {degrees.ring_degree}"
        fix = f"choose two whole numbers whose product is {ranks}"
        raise ValueError(wrong("scheme", f"degrees for a group of {ranks} ranks", got, fix))
    return degrees
