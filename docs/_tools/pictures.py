"""Draw the README's first picture and the site's: ``python docs/_tools/pictures.py``.

One small mask, and what each mapping makes of it, from the planner's own tiles. The pictures are
kept in ``docs/pictures``, so that building the site needs no matplotlib; run this again when
``tessera_cupy.viz`` or a mapping changes.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tessera_cupy import BlockMask, KeySlices, viz
from tessera_cupy.mapping import Mapping, Tiles, map_mask, useful_fraction

FOLDER = Path(__file__).parents[1] / "pictures"

#: The key blocks that each row of query blocks keeps.
KEPT = (
    (0, 2, 3, 6, 11),
    (0, 3, 6, 7),
    (1, 4, 8, 10),
    (0, 2, 3, 6, 9, 11),
    (1, 4, 5, 8),
    (0, 3, 7, 8),
)
BLOCK, KEY_BLOCKS = 64, 12

#: The same of the README's picture, as in notebook 1.
FEW = ((0, 3, 4, 7, 10), (1, 3, 6, 7, 10, 11), (0, 2, 5, 9))

#: Keys of two groups of 64 query rows: every third key is kept by both, others by one.
KEYS = (
    (*range(0, 190, 3), *range(1, 180, 3)),
    (*range(0, 190, 3), *range(14, 190, 3)),
)
GROUP, KEYS_IN_ALL = 64, 192


class Drawn(NamedTuple):
    """A picture: its mapping, and the rows and columns of a physical tile."""

    name: str
    mapping: str
    tile: tuple[int, int]


#: Pictures of blocks, by the name of their file.
OF_BLOCKS = (
    Drawn("retain", "retain-retain", (64, 64)),
    Drawn("retain-wide", "retain-retain", (64, 128)),
    Drawn("merge-keys", "retain-merge", (64, 128)),
    Drawn("pack", "retain-pack", (64, 128)),
    Drawn("split", "split-split", (32, 32)),
    Drawn("merge-queries", "merge-pack", (128, 128)),
    Drawn("share", "share-pack", (128, 128)),
    Drawn("regroup", "regroup-pack", (128, 128)),
)
OF_SLICES = (Drawn("gather", "share-gather", (128, 64)),)


def block_mask(kept: Sequence[Sequence[int]] = KEPT) -> BlockMask:
    """A mask of the key blocks of each row; that of all pictures but the README's and slices'."""
    blocks = np.zeros((len(kept), KEY_BLOCKS), np.bool_)
    for row, columns in zip(blocks, kept, strict=True):
        row[list(columns)] = True
    return BlockMask.from_dense(blocks, (BLOCK, BLOCK))


def slices() -> KeySlices:
    """Two groups and their single keys."""
    kept = np.zeros((len(KEYS), KEYS_IN_ALL), np.bool_)
    for row, keys in zip(kept, KEYS, strict=True):
        row[list(keys)] = True
    return KeySlices.from_groups(kept, GROUP)


def draw(folder: Path) -> list[Path]:
    """Write all pictures into a folder; their paths."""
    blocks, groups = block_mask(), slices().to_block_mask()
    written = [_mask(folder / "mask.svg", blocks), _three_ways(folder / "three-ways.svg")]
    written += [_tiles(folder / f"{p.name}.svg", blocks, p, BLOCK) for p in OF_BLOCKS]
    written += [_tiles(folder / f"{p.name}.svg", groups, p, GROUP) for p in OF_SLICES]
    return written


def _mask(path: Path, mask: BlockMask) -> Path:
    figure = _figure(5.4)
    ax = figure.subplots()
    viz.draw_mask(ax, mask)
    _block_lines(ax, mask, BLOCK)
    return _write(figure, path)


def _tiles(path: Path, mask: BlockMask, picture: Drawn, lines: int) -> Path:
    mapping = Mapping.parse(picture.mapping)
    q, kv = picture.tile
    tiles = map_mask(mask, mapping, q, kv)
    skips = mapping.q in ("share", "regroup")
    useful = useful_fraction(tiles, mask, q // 2 if skips else None)
    figure = _figure(10.0)
    axes: Any = figure.subplots(1, 2, width_ratios=_widths(tiles, mask))
    in_mask, as_steps = axes
    viz.draw_tiles(in_mask, tiles, skips=skips)
    viz.draw_steps(as_steps, tiles, skips=skips)
    _block_lines(in_mask, mask, lines)
    in_mask.set_title("in the mask: which step computes an entry", fontsize=10)
    as_steps.set_title(
        f"as steps of {q}x{kv}: {int(tiles.steps.sum())}, useful {useful:.2f}", fontsize=10
    )
    as_steps.set_xticks([])
    as_steps.set_yticks([])
    as_steps.set_ylabel("a line for each tile", fontsize=9)
    return _write(figure, path)


def _three_ways(path: Path) -> Path:
    """A few rows as steps of two key blocks under retain, merge and pack, one below the other."""
    mask, longest = block_mask(FEW), max(map(len, FEW))
    figure = _figure(8.4, 4.6)
    axes: Any = figure.subplots(3, 1, sharex=True)
    for ax, name in zip(axes, ("retain", "merge", "pack"), strict=True):
        tiles = map_mask(mask, Mapping("retain", name), BLOCK, 2 * BLOCK)
        viz.draw_steps(ax, tiles, key_block=BLOCK)
        useful = useful_fraction(tiles, mask)
        ax.set_title("")
        ax.set_title(
            f"{name}: {int(tiles.steps.sum())} steps, {useful:.0%} of the work is useful",
            fontsize=11,
            loc="left",
        )
        # Room for the frames' outer halves, and one scale for all three.
        ax.set_xlim(-2, 2 * BLOCK * longest + 2)
        ax.set_ylim(len(FEW) * BLOCK + 2, -2)
        ax.set_xlabel("")
        ax.set_ylabel("")
        ax.set_xticks([])
        ax.set_yticks([(row + 0.5) * BLOCK for row in range(len(FEW))])
        ax.set_yticklabels([f"query block {row}" for row in range(len(FEW))], fontsize=9)
        ax.tick_params(length=0)
        ax.spines[:].set_visible(False)
    return _write(figure, path)


def _widths(tiles: Tiles, mask: BlockMask) -> tuple[int, int]:
    """Widths in proportion to keys and to the longest tile, within reason."""
    longest = int(tiles.steps.max()) * tiles.shape.kv
    return mask.shape[1], min(max(longest, mask.shape[1] * 2 // 3), mask.shape[1] * 3 // 2)


def _block_lines(ax: Any, mask: BlockMask, size: int) -> None:
    ax.set_xticks(range(0, mask.shape[1] + 1, size))
    ax.set_yticks(range(0, mask.shape[0] + 1, size))
    ax.tick_params(labelsize=7, length=2)
    ax.tick_params(axis="x", labelrotation=90)
    ax.grid(color="#D9D9D9", linewidth=0.5)
    ax.set_axisbelow(True)
    ax.set_xlabel("key tokens", fontsize=9)
    ax.set_ylabel("query tokens", fontsize=9)


def _figure(width: float, height: float = 3.3) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _write(figure: Any, path: Path) -> Path:
    import matplotlib

    text = io.StringIO()
    # Text as text, and nothing that differs from one run to the next.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": path.name}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    # A hundredth of a point is more than a screen shows.
    small = re.sub(r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", text.getvalue())
    small = re.sub(r"<!--.*?-->\n?|<metadata>.*?</metadata>\n?", "", small, flags=re.DOTALL)
    path.write_text(re.sub(r"^\s+|\s+$", "", small, flags=re.MULTILINE) + "\n")
    return path


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for written in draw(FOLDER):
        print(written)
