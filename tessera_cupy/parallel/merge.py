"""Attention over some keys and attention over others, merged to that over all of them.

With ``LSE_a`` and ``LSE_b``, natural logarithms of sums of exponentials over disjoint keys,

    LSE = ln(exp LSE_a + exp LSE_b),   O = exp(LSE_a - LSE) O_a + exp(LSE_b - LSE) O_b,

computed from the larger of the two, so that nothing overflows. A row that has seen no key has
O = 0 and LSE = -inf, and stays so.
"""

from __future__ import annotations

from typing import Any

from tessera_cupy.parallel.arrays import namespace, weighted


def merge(out: Any, lse: Any, more: Any, more_lse: Any) -> tuple[Any, Any]:
    """Merge two parts.

    Args:
        out: (..., rows, dim), of any float type.
        lse: (..., rows) float32.
        more: as ``out``.
        more_lse: as ``lse``.

    Returns:
        O and LSE of both, float32.

    >>> import numpy as np
    >>> one, two = np.ones((1, 1), np.float32), np.full((1, 1), 3, np.float32)
    >>> zero = np.zeros(1, np.float32)
    >>> o, lse = merge(one, zero, two, zero)
    >>> o.item(), bool(np.isclose(lse.item(), np.log(2)))
    (2.0, True)
    """
    xp = namespace(out)
    highest = xp.maximum(lse, more_lse)
    base = xp.where(highest == -float("inf"), xp.zeros_like(highest), highest)
    mine, other = xp.exp(lse - base), xp.exp(more_lse - base)
    total = mine + other
    none = total == 0
    whole = xp.where(none, xp.ones_like(total), total)
    merged = weighted(out, (mine / whole)[..., None], more, (other / whole)[..., None])
    return merged, xp.where(none, highest, base + xp.log(whole))
