"""Launching ``query_balls.cu``, ``key_bounds*.cu`` and ``keep_keys.cu``: keys by bounds of scores.

All launches go to CuPy's current stream of the arrays' GPU, and nothing waits. What they compute,
:mod:`tessera_cupy.sparsifiers.fg_attn` defines in NumPy.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from tessera_cupy import gpus
from tessera_cupy.errors import wrong
from tessera_cupy.kernels import launch, scoring
from tessera_cupy.kernels.catalog import MAX_HEAD_DIM, KernelConfig, builder, catalog
from tessera_cupy.kernels.lifetime import new
from tessera_cupy.kernels.tensor_maps import SLAB, TENSOR_MAP, rows_map
from tessera_cupy.kernels.token_rows import (
    CHUNK,
    ELEMENT_OF,
    PRODUCT_SMEM,
    PRODUCT_TILE,
    packed,
    padded,
)

#: ``QueryBallsParams`` in query_balls.cu.
BALLS_PARAMS = np.dtype(
    [
        *[(name, np.uint64) for name in ("q", "k", "centres", "radii", "lengths")],
        *[(name, np.uint64) for name in ("q_flag", "k_flag")],
        *[(name, np.int32) for name in ("planes", "tokens", "chunks", "size", "balls")],
    ],
    align=True,
)
#: ``KeyBoundsParams`` in key_bounds.cu.
BOUNDS_PARAMS = np.dtype(
    [
        *[(name, np.uint64) for name in ("a", "k", "radii", "lengths", "out")],
        *[(name, np.int32) for name in ("rows", "groups", "parts", "tokens", "pitch", "chunks")],
        *[(name, np.int32) for name in ("begin", "end", "row_tiles", "column_tiles")],
        ("scale", np.float32),
    ],
    align=True,
)
#: ``KeyBoundsWgmmaParams`` in key_bounds_wgmma.cu; tensor maps lie at multiples of 64 bytes.
BOUNDS_WGMMA_PARAMS = np.dtype(
    {
        "names": [
            *("centres", "keys", "radii", "lengths", "out"),
            *("rows", "groups", "parts", "tokens", "pitch", "begin", "end"),
            *("planes", "team", "column_tiles", "steps", "slabs", "scale"),
        ],
        "formats": [*[TENSOR_MAP] * 2, *[np.uint64] * 3, *[np.int32] * 12, np.float32],
        "offsets": [0, 128, *range(256, 280, 8), *range(280, 332, 4)],
        "itemsize": 384,
    }
)
#: ``KeepKeysParams`` in keep_keys.cu.
KEEP_PARAMS = np.dtype(
    [
        *[(name, np.uint64) for name in ("bounds", "bits")],
        *[(name, np.int32) for name in ("rows_of_head", "tokens", "pitch", "words_pitch")],
        *[(name, np.int32) for name in ("begin", "end", "text_begin", "text_end")],
        *[(name, np.int32) for name in ("full_begin", "full_end", "count", "level", "held")],
        *[("drawn", np.int32), ("seed", np.uint64), ("flag", np.uint64)],
        *[(name, np.int32) for name in ("sample_more", "sample_fewer")],
    ],
    align=True,
)

# Keys of a CTA of query_balls.
_BALL_KEYS = 64
# Parts of a step, and the longest row, of key_bounds_wgmma.cu, which has as many keys in a step.
_WGMMA_ROWS, _WGMMA_DIM = 192, 128
# Keys of a row, which keep_keys.cu counts in float32: exactly, and far beyond.
_MOST_KEYS = 255 << 12
# Keys of a row that keep_keys.cu looks at first, and how many standard deviations of their count
# it stays off the level that they suggest.
_SAMPLE, _DEVIATIONS = 1024, 2.5
# Bytes that rows of the map begin at.
_LINE = 16


def bounds(
    q: Any,
    k: Any,
    size: int,
    parts: int,
    competing: tuple[int, int],
    flags: tuple[int, int],
    memory: list[Any],
    *,
    norms: bool,
) -> Any:
    """``fg_attn.bounds``, on tensor cores.

    Args:
        q: (batch, heads, tokens, d) queries; wider types than 16 bits are rounded to float16.
        k: the same shape and dtype.
        size: queries of a group.
        parts: equal parts that a group is cut into: 1, 2 or 4.
        competing: first key that gets a bound, and the one behind the last; others get NaN.
        flags: addresses of int32 that are set where q and k hold no numbers, or 0.
        memory: takes what a captured launch uses.
        norms: by balls; else by extremes.

    Returns:
        (batch, heads, groups, pitch) float16, the pitch a multiple of 128 that holds all tokens;
        behind them are NaN.

    Raises:
        ValueError: a head dim above 256.
    """
    if q.shape[3] > MAX_HEAD_DIM:
        fix = "pass NumPy arrays, or fewer channels"
        raise ValueError(wrong("q", f"at most {MAX_HEAD_DIM} channels", q.shape[3], fix))
    scale = 1 / np.sqrt(q.shape[3])
    if k.dtype != q.dtype:
        fix = f"pass k.astype({q.dtype.name!r})"
        raise ValueError(wrong("k", f"q's dtype {q.dtype.name}", k.dtype.name, fix))
    import cupy

    device = int(q.device.id)
    with cupy.cuda.Device(device):
        q, k = packed(q, memory), packed(k, memory)
        batch, heads, tokens, d = q.shape
        rows_of_part = size // parts
        rows, groups = -(-tokens // rows_of_part), -(-tokens // size)
        planes, chunks, element = batch * heads, d // CHUNK, ELEMENT_OF[q.dtype.name]
        balls: dict[str, Any] = {
            **{"q": q.data.ptr, "k": k.data.ptr, "q_flag": flags[0], "k_flag": flags[1]},
            **{"planes": planes, "tokens": tokens, "chunks": chunks, "size": rows_of_part},
        }
        product: dict[str, Any] = {}
        held: list[Any] = []
        if norms:
            sides = new((batch, heads, rows, d), q.dtype, memory)
            radii = new((batch, heads, rows), np.float32, memory)
            lengths = new((batch, heads, tokens), np.float32, memory)
            of_balls = {"radii": radii.data.ptr, "lengths": lengths.data.ptr}
            balls |= {"centres": sides.data.ptr, "balls": rows, **of_balls}
            product |= of_balls
            held += [radii, lengths]
        else:
            sides = scoring.extremes(q, rows_of_part, flags[0], memory)
        ctas = planes * (balls.get("balls", 0) + -(-tokens // _BALL_KEYS))
        _launch(f"query_balls_{element}", BALLS_PARAMS, balls, ctas, device)
        column_tiles = -(-tokens // PRODUCT_TILE)
        out = new((batch, heads, groups, PRODUCT_TILE * column_tiles), np.float16, memory)
        bounding = _bounding(gpus.arch_of(device).name, element, d, norms=norms)
        by_wgmma = bounding.kernel == "key_bounds_wgmma"
        row_tiles = -(-rows // (_WGMMA_ROWS if by_wgmma else PRODUCT_TILE))
        product |= {
            **{"out": out.data.ptr, "rows": rows, "groups": groups, "parts": parts},
            **{"tokens": tokens, "pitch": out.shape[3], "scale": scale},
            **{"begin": competing[0], "end": competing[1]},
            **{"column_tiles": column_tiles},
        }
        if by_wgmma:

            def map_of(x: Any, length: int, box: int) -> Any:
                shape, strides = (1, planes, length, d), (planes * length * d, length * d, d)
                return rows_map(x.data.ptr, q.dtype.name, shape, strides, box)

            columns = planes * column_tiles
            shared = _teams(row_tiles, columns, gpus.multiprocessors(device))
            product |= {
                **{"centres": map_of(sides, rows, _WGMMA_ROWS)},
                **{"keys": map_of(k, tokens, PRODUCT_TILE)},
                **{"planes": planes, "team": shared.team},
                **{"steps": shared.bands * columns, "slabs": -(-d // SLAB)},
            }
            ctas = shared.team * shared.teams
            _launch(bounding.name, BOUNDS_WGMMA_PARAMS, product, ctas, device, bounding.smem_bytes)
        else:
            product |= {"a": sides.data.ptr, "k": k.data.ptr, "chunks": chunks}
            product |= {"row_tiles": row_tiles}
            ctas = planes * row_tiles * column_tiles
            _launch(bounding.name, BOUNDS_PARAMS, product, ctas, device, PRODUCT_SMEM)
        return out


def keep(
    made: Any,
    tokens: int,
    competing: tuple[int, int],
    full: tuple[int, int],
    *,
    count: int,
    level: np.float16,
    memory: list[Any],
    text: tuple[int, int] = (0, 0),
    drawn: int = 0,
    seed: int = 0,
    flag: int = 0,
) -> Any:
    """The keys of each group with the largest bounds, or those from a level on, and all others.

    Args:
        made: (batch, heads, groups, tokens or more) float16, such as :func:`bounds` gives, whose
            rows :func:`row_pitch` knows a distance of; keys of NaN are not kept for them.
        tokens: keys; the columns behind them are not looked at.
        competing: first key that competes with its bound, and the one behind the last; others are
            kept.
        full: first group that keeps all keys, and the one behind the last.
        count: keys that a group keeps for their bounds, ties to the lower key; 0 for ``level``.
        level: the least bound that is kept.
        memory: takes what a captured launch uses.
        text: of those that compete the first key that is kept anyhow, and the one behind the last.
        drawn: every key is kept besides with the probability ``drawn / 2^32``, 0 to 2^32 - 1, as
            :mod:`tessera_cupy.sparsifiers.draws` says.
        seed: of those, 0 to 2^64 - 1.
        flag: address of an int32 that is set where a bound is NaN or an infinity, or 0.

    Returns:
        (batch, heads, groups, ceil(tokens / 8)) uint8, little-endian bits, in rows of whole 16
        bytes.

    Raises:
        ValueError: 2^20 tokens or more.
    """
    import cupy

    batch, heads, groups, _ = made.shape
    if tokens >= _MOST_KEYS:
        fix = "pass NumPy arrays, or fewer tokens"
        raise ValueError(wrong("k", f"below {_MOST_KEYS:,} tokens", f"{tokens:,}", fix))
    device = int(made.device.id)
    with cupy.cuda.Device(device):
        bits = new((batch, heads, groups, -(-tokens // (8 * _LINE)) * _LINE), np.uint8, memory)
        config = builder(gpus.arch_of(device).name, "keep_keys")
        exchanged = 32 * config.warps  # KeyExchange
        row = 64 * -(-tokens // 32)
        held = exchanged + row <= config.smem_bytes
        params = {
            **{"bounds": made.data.ptr, "bits": bits.data.ptr, "rows_of_head": groups},
            **{"tokens": tokens, "pitch": row_pitch(made), "words_pitch": bits.shape[3] // 4},
            **{"begin": competing[0], "end": competing[1]},
            **{"text_begin": text[0], "text_end": text[1]},
            **{"full_begin": full[0], "full_end": full[1], "count": count},
            **{"level": int(np.float16(level).view(np.uint16)), "held": held},
            **{"drawn": int(np.uint32(drawn).view(np.int32)), "seed": seed, "flag": flag},
            **_sample_counts(count, competing[1] - competing[0], tokens),
        }
        smem = exchanged + (row if held else 0)
        _launch(config.name, KEEP_PARAMS, params, batch * heads * groups, device, smem)
        return bits[..., : -(-tokens // 8)]


def readable(made: Any, memory: list[Any]) -> Any:
    """(batch, heads, groups, columns) of any float dtype as :func:`keep` reads it.

    Args:
        made: a CuPy array.
        memory: takes what a captured launch uses.

    Returns:
        The array itself, or a float16 copy, in longer rows.
    """
    if row_pitch(made) is not None and made.data.ptr % _LINE == 0:
        return made
    return padded(made, np.dtype(np.float16), memory)


def row_pitch(made: Any) -> int | None:
    """Elements from one row to the next, if :func:`keep` can read the rows; else None.

    >>> row_pitch(np.zeros((1, 2, 3, 128), np.float16)[..., :100])
    128
    """
    _, heads, groups, columns = made.shape
    apart = {
        stride / (2 * rows)
        for length, stride, rows in zip(
            made.shape, made.strides, (heads * groups, groups, 1), strict=False
        )
        if length > 1
    } or {-(-columns // CHUNK) * CHUNK}
    pitch = apart.pop()
    whole = not apart and pitch >= columns and pitch % CHUNK == 0
    return int(pitch) if whole and (columns == 1 or made.strides[3] == 2) else None


class _Teams(NamedTuple):
    """How CTAs share the parts of key_bounds_wgmma.cu: ``team`` tiles of them side by side."""

    team: int
    teams: int
    bands: int


def _teams(row_tiles: int, columns: int, ctas: int) -> _Teams:
    """The fewest passes over the keys that leave CTAs idle for a tenth of the time at most.

    >>> _teams(5, 3600, 132)
    _Teams(team=5, teams=26, bands=1)
    >>> _teams(19, 3600, 132)  # 6 teams of 19 would leave 18 CTAs idle
    _Teams(team=10, teams=13, bands=2)
    """
    least = -(-row_tiles * columns // ctas)  # steps of a CTA
    for bands in range(-(-row_tiles // ctas), row_tiles):
        team = -(-row_tiles // bands)
        teams = min(ctas // team, bands * columns)
        if 10 * -(-bands * columns // teams) <= 11 * least:
            return _Teams(team, teams, bands)
    return _Teams(1, min(ctas, row_tiles * columns), row_tiles)


def _sample_counts(count: int, competing: int, tokens: int) -> dict[str, int]:
    """How many of a sample of a row reach levels that are rather too low and rather too high."""
    wanted = _SAMPLE * count / tokens
    beside = _DEVIATIONS * math.sqrt(wanted * max(0.0, 1 - count / max(1, competing))) + 2
    return {"sample_more": int(wanted + beside), "sample_fewer": max(0, int(wanted - beside))}


def _bounding(arch: str, element: str, d: int, *, norms: bool) -> KernelConfig:
    """The entry that bounds the scores of rows of ``d`` elements."""
    name = f"key_bounds_wgmma_{element}"
    if norms and d <= _WGMMA_DIM and any(config.name == name for config in catalog(arch)):
        return builder(arch, name)
    return builder(arch, f"key_bounds_{element}")


def _launch(
    name: str, dtype: np.dtype[Any], params: dict[str, Any], ctas: int, device: int, smem: int = 0
) -> None:
    config = builder(gpus.arch_of(device).name, name)
    kernel = launch.load(config, device)
    kernel((ctas,), (32 * config.warps,), (launch.packed_struct(dtype, params),), shared_mem=smem)
