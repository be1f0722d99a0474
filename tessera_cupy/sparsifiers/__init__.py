"""Published rules that make block-sparse masks from the queries and keys of a video model.

Each rule is a module with a ``select`` function that returns a
:class:`~tessera_cupy.sparsifiers.selection.Selection`: the mask, and the token order of
each head that the mask is meant for.
"""

from __future__ import annotations

from tessera_cupy.sparsifiers import (
    chipmunk,
    fg_attn,
    longcat,
    nabla,
    radial,
    spade,
    spargeattn,
    ssta,
    sta,
    static,
    svg,
    svg2,
    vsa,
    xattention,
)
from tessera_cupy.sparsifiers.selection import Selection

__all__ = [
    "Selection",
    "chipmunk",
    "fg_attn",
    "longcat",
    "nabla",
    "radial",
    "spade",
    "spargeattn",
    "ssta",
    "sta",
    "static",
    "svg",
    "svg2",
    "vsa",
    "xattention",
]
