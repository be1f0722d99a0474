"""Readable names of keys and buckets: ``q64k64 d<=128`` and ``tokens<32768 density<0.3``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import inf

from tessera_cupy.regimes.schema import AXES, Interval, Match


def key_name(match: Match) -> str:
    """Name the requests that a key matches; fields that match anything are left out."""
    q, kv = _sizes("q", match.block_q), _sizes("k", match.block_kv)
    words = [
        match.mask or "",
        q + kv if f"{q}{kv}".isalnum() else f"{q} {kv}".strip(),
        _flag(match.ragged, "ragged", "uniform"),
        _flag(match.token_bits, "bits", "no-bits"),
        match.dtype or "",
        _sizes("d", match.head_dim),
        match.layout or "",
    ]
    return " ".join(filter(None, words)) or "any"


def bucket_name(when: Sequence[Interval]) -> str:
    """Name a box of buckets, one interval for each of :data:`AXES`; empty for all of them."""
    return " ".join(filter(None, map(_bounds, AXES, when)))


def bucketed_axes(name: str) -> list[str]:
    """The axes that a regime's name gives bounds for, in the order of :data:`AXES`.

    >>> bucketed_axes("sm90 q64k64 d<=128 tokens<32768 0.1<=density<0.3")
    ['tokens', 'density']
    """
    words = re.split(r"[\s<>=]+", name)
    return [axis for axis in AXES if axis in words]


def _flag(value: bool | None, on: str, off: str) -> str:
    return "" if value is None else on if value else off


def _sizes(letter: str, sizes: Interval) -> str:
    """``q64``, ``q16-48``, ``q<=48`` or ``q>=64``: whole numbers, both ends included."""
    last = sizes.high - 1
    if sizes.low == -inf:
        return "" if last == inf else f"{letter}<={last}"
    if last == inf:
        return f"{letter}>={sizes.low}"
    return f"{letter}{last}" if sizes.low == last else f"{letter}{sizes.low}-{last}"


def _bounds(axis: str, values: Interval) -> str:
    """``density<0.3``, ``density>=0.3`` or ``0.1<=density<0.3``."""
    if values.low == -inf:
        return "" if values.high == inf else f"{axis}<{values.high}"
    if values.high == inf:
        return f"{axis}>={values.low}"
    return f"{values.low}<={axis}<{values.high}"
