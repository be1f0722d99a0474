"""Tiny pictures that are kept as files, and the command that writes them anew.

``python -m tests.viz.golden``, from the root of the repository, draws all of them into
``tests/viz/golden``. Texts are left out, since fonts are drawn otherwise by other versions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tessera_cupy import ArraySpec, make_plan, viz
from tessera_cupy.kernels.launch import packed_tasks
from tessera_cupy.kernels.task_times import TASK_TIME
from tessera_cupy.mapping import Mapping, map_mask
from tessera_cupy.masks import BlockMask, KeySlices
from tessera_cupy.profile import Profile
from tessera_cupy.regimes import Table, load_for
from tessera_cupy.timeline import from_records
from tessera_cupy.video import VideoGrid
from tessera_cupy.viz import overview

FOLDER = Path(__file__).parent / "golden"
_SIZE, _WIDE, _DPI = (2.4, 1.8), (6.0, 1.8), 60
# How far a picture may be from its file, of 255 levels; test_golden.py says how it is measured.
TOLERANCE = 14.0

MASK = BlockMask.from_dense(
    [[1, 0, 1, 1, 0], [0, 1, 1, 0, 1], [1, 0, 1, 1, 0], [0, 1, 0, 1, 1]], (16, 16)
)
RAGGED = BlockMask.from_dense(
    [[1, 0, 1], [0, 1, 1]], (16, 16), q_block_sizes=[10, 22], kv_block_sizes=[8, 30, 10]
)
_AT = np.arange(40)
BAND = BlockMask.from_tokens(np.abs(_AT[:, None] - _AT) <= 9, (16, 16))
SLICES = KeySlices.from_groups(np.random.default_rng(3).random((4, 60)) < 0.3, 64)
FEW_KEYS = KeySlices.from_groups(np.random.default_rng(4).random((4, 14)) < 0.4, 64)
GATHERED = map_mask(SLICES.to_block_mask(), Mapping("share", "gather"), 128, 64)
GRID = VideoGrid(2, 3, 5, text_tokens=4)

#: Ways to tile: query rows and key columns of a tile of MASK.
_WAYS = {
    "retain-retain": (16, 32),
    "retain-merge": (16, 32),
    "retain-pack": (16, 32),
    "merge-pack": (32, 32),
    "share-pack": (32, 32),
    "regroup-pack": (32, 32),
    "split-split": (8, 8),
}


def _one(draw: Callable[..., None], *args: Any, **options: Any) -> Callable[[Any], None]:
    """A picture on one set of axes that fill the figure."""

    def on(figure: Any) -> None:
        draw(figure.add_axes((0.02, 0.02, 0.96, 0.96)), *args, **options)

    return on


def _way(name: str) -> Callable[[Any], None]:
    """Tiles of a mapping in the mask, and below as steps."""

    def on(figure: Any) -> None:
        tiles = map_mask(MASK, Mapping.parse(name), *_WAYS[name])
        skips = name.startswith(("share", "regroup"))
        viz.draw_tiles(figure.add_axes((0.02, 0.52, 0.96, 0.46)), tiles, skips=skips)
        viz.draw_steps(figure.add_axes((0.02, 0.02, 0.96, 0.46)), tiles, skips=skips)

    return on


def _overview(figure: Any) -> None:
    tiles = map_mask(MASK, Mapping("merge", "pack"), 32, 32)
    ax = figure.add_axes((0.02, 0.02, 0.96, 0.96))
    overview.draw_all_steps(ax, tiles, 0, False)


def _timeline(figure: Any) -> None:
    """Six tasks as a GPU of two multiprocessors wrote them down; two at a time on the first."""
    mask = BlockMask.from_dense(np.tri(3, dtype=bool), (64, 64))
    spec = ArraySpec((1, 2, 192, 64), "bfloat16")
    plan = make_plan(mask, spec, arch="sm_80", regime="attend_mma/q64k64/retain-pack/longest")
    records = np.zeros((1, 6, 1), TASK_TIME)
    records["sm"].flat = [0, 1, 0, 0, 1, 0]
    records["begin"].flat = [1000, 1064, 1032, 2056, 4064, 4128]
    records["end"].flat = [4064, 4032, 2024, 4096, 6080, 5088]
    packed = packed_tasks(plan.tiles(), plan.tasks())
    measured = from_records(records, packed, [0.0], persistent=False, gpu="a GPU", sms=2)
    _one(viz.draw_timeline, plan, measured)(figure)


def _grid(figure: Any) -> None:
    blocks = GRID.tile_blocks((2, 2, 2))
    viz.draw_grid(figure, GRID, blocks.order, block=blocks.sizes)


def _reasoned(name: str) -> Table:
    """What a shipped table reasons, which no measuring moves, as a table of its own."""
    document = load_for(name).document
    if document.provenance == "default":
        return Table(document)
    return Table(replace(document, provenance="default", keys=document.reasoned, reasoned=()))


CASES: dict[str, Callable[[Any], None]] = {
    "mask": _one(viz.draw_mask, MASK, window=viz.Window(0, 32, 32, 64)),
    "mask_ragged": _one(viz.draw_mask, RAGGED),
    "mask_token_bits": _one(viz.draw_mask, BAND),
    "tiles_token_bits": _one(
        viz.draw_tiles, map_mask(BAND, Mapping("retain", "pack"), 16, 32), window=None
    ),
    **{f"way_{name}": _way(name) for name in _WAYS},
    "overview": _overview,
    "tasks": _one(
        viz.draw_tasks, [0, 1, 0, 2, 1], [0, 0, 3, 0, 2], [3, 2, 4, 1, 3.5], head=[0, 0, 1, 2, 1]
    ),
    "timeline": _timeline,
    "profile": _one(viz.draw_profile, Profile(False, 0.0, 2.0, 1.0, 0.3, 4.0, 0.5)),
    "heads": lambda figure: viz.draw_heads(
        figure, BlockMask.from_dense([[[1, 1, 0]], [[1, 0, 1]], [[0, 0, 1]]], (16, 16))
    ),
    "grid": _grid,
    "table": _one(viz.draw_table, _reasoned("sm90"), key=6),
    "slices": _one(viz.draw_slices, FEW_KEYS),
    "gather": _one(viz.draw_gather, GATHERED, 0, steps=1),
    "columns": _one(viz.draw_columns, GATHERED, 0),
}


def draw(name: str, path: Path) -> None:
    """Draw a case into a PNG file, with matplotlib's own defaults and no text."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams["font.family"] = "DejaVu Sans"
        figure = Figure(figsize=_WIDE if name == "grid" else _SIZE, dpi=_DPI)
        CASES[name](figure)
        # Without texts the same layout in all versions.
        figure.set_layout_engine("none")
        for ax in figure.axes:
            for text in list(ax.texts):
                text.remove()
            for axis in [ax, *ax.child_axes]:
                axis.set_axis_off()
            ax.set_title("")
            if ax.get_legend():
                ax.get_legend().remove()
        for legend in list(figure.legends):
            legend.remove()
        figure.suptitle("")
        figure.savefig(path, dpi=_DPI, metadata={"Software": None})


def main() -> None:
    """Write all pictures anew."""
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob("*.png"):
        old.unlink()
    for name in CASES:
        draw(name, FOLDER / f"{name}.png")
        print(FOLDER / f"{name}.png")


if __name__ == "__main__":
    main()
