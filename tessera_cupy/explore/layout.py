"""Masks and tiles as plain lists: which run of keys sits where in which tile and step."""

from __future__ import annotations

import base64
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.mapping import Tiles
from tessera_cupy.mapping.stats import computed_parts
from tessera_cupy.masks import BlockMask
from tessera_cupy.masks.key_slices import SliceBlocks
from tessera_cupy.video import VideoGrid
from tessera_cupy.viz.mask import block_kinds, head_edges, mask_head
from tessera_cupy.viz.pieces import pieces, runs_of


def mask_data(mask: BlockMask, head: int) -> dict[str, Any]:
    """One head's mask at the resolution of blocks.

    Returns:
        ``block_size``; ``q_edges`` and ``kv_edges``, the first token of each block and one past the
        last; ``kept`` and ``partial``, base64 of packed bits in little bit order, a row of query
        blocks in whole bytes, of blocks that are wholly and partly kept; ``ragged``; ``slices``,
        whether the blocks are those of slices of single keys.
    """
    slices = isinstance(mask, SliceBlocks)
    mask = mask.on_host()
    kind = block_kinds(mask, mask_head(mask, 0, head))
    return {
        "block_size": list(mask.block_size),
        "q_edges": head_edges(mask.q_starts(), 0, head).tolist(),
        "kv_edges": head_edges(mask.kv_starts(), 0, head).tolist(),
        "kept": _packed(kind == 1),
        "partial": _packed(kind == 2),
        "ragged": bool(mask.ragged),
        "slices": slices,
    }


def block_boxes(
    edges: list[int], order: NDArray[Any], grid: VideoGrid
) -> list[tuple[int, int, int, int, int, int, int] | None]:
    """Where the tokens of each block are in the video.

    Args:
        edges: first token of each block, and one past the last.
        order: (tokens,) the raster index of the token at each place.
        grid: the grid.

    Returns:
        First and last frame, row and column, and the number of tokens; a block whose tokens fill
        that box is a 3-D tile. None for a block without tokens.

    >>> block_boxes([0, 4, 8], np.arange(8), VideoGrid(1, 2, 4))
    [(0, 0, 0, 0, 0, 3, 4), (0, 0, 1, 1, 0, 3, 4)]
    """
    places = np.stack(np.unravel_index(np.asarray(order), (grid.t, grid.h, grid.w)))
    boxes: list[Any] = []
    for first, end in pairwise(edges):
        if first == end:
            boxes.append(None)
            continue
        block = places[:, first:end]
        ranges = zip(block.min(axis=1).tolist(), block.max(axis=1).tolist(), strict=True)
        boxes.append((*(n for pair in ranges for n in pair), end - first))
    return boxes


def tiles_data(tiles: Tiles, row: int, part: int) -> dict[str, Any]:
    """The tiles of one mask head.

    Args:
        tiles: mapping's output.
        row: the mask head, as ``tiles.tile_head`` counts them.
        part: rows that a kernel multiplies together, and that skip a step together.

    Returns:
        ``q``, ``kv`` and ``slot`` of the tile's shape and ``part``. For each tile ``steps``, and
        ``runs``: lists of (first row of the tile, first query, rows). ``step_parts``: for each step
        of all tiles the bits of the parts that compute it. ``bands``: distinct lists of (first row,
        one past the last, whether it attends), rows of a tile. And of pieces, which are runs of
        neighbouring keys that the same rows attend to, ``piece_offsets`` over tiles, and
        ``piece_step``, ``piece_column`` (in the step), ``piece_kv0`` (first key), ``piece_length``
        and ``piece_bands`` (index into ``bands``). Columns of a step without a piece are empty.
    """
    mine = np.flatnonzero(tiles.tile_head == row)
    all_computed, last_step = computed_parts(tiles, part), np.cumsum(tiles.steps)
    bands: dict[tuple[Any, ...], int] = {}
    band_lists: list[list[list[int]]] = []
    made: dict[str, list[Any]] = {
        name: [] for name in ("runs", "steps", "step_parts", "step", "column", "kv0", "length")
    }
    made |= {"bands": [], "offsets": [0]}
    for tile in mine.tolist():
        computed = all_computed[last_step[tile] - tiles.steps[tile] : last_step[tile]]
        weights = 1 << np.arange(computed.shape[1])
        made["runs"].append([[run.top, run.q0, run.rows] for run in runs_of(tiles, tile)])
        made["steps"].append(len(computed))
        made["step_parts"] += (computed * weights).sum(axis=1).tolist()
        for piece in pieces(tiles, tile, computed):
            if not piece.length or not piece.bands:
                continue
            key = tuple(piece.bands)
            if key not in bands:
                bands[key] = len(band_lists)
                band_lists.append([[top, end, int(member)] for top, end, member in key])
            made["step"].append(piece.step)
            made["column"].append(int(piece.column))
            made["kv0"].append(int(piece.kv0))
            made["length"].append(int(piece.length))
            made["bands"].append(bands[key])
        made["offsets"].append(len(made["step"]))
    return {
        "q": tiles.shape.q,
        "kv": tiles.shape.kv,
        "slot": tiles.shape.slot,
        "part": part,
        "steps": made["steps"],
        "runs": made["runs"],
        "step_parts": made["step_parts"],
        "bands": band_lists,
        **{
            f"piece_{name}": made[name]
            for name in ("offsets", "step", "column", "kv0", "length", "bands")
        },
    }


def _packed(bits: NDArray[np.bool_]) -> str:
    return base64.b64encode(np.packbits(bits, axis=1, bitorder="little").tobytes()).decode()
