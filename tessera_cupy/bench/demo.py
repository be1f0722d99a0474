"""The main job on real input: video frames to mask, mask to plan, plan to checked attention.

On a GPU it runs the grid of the rule's model in bfloat16 and compares times with dense attention.
Without one, a smaller grid goes through the NumPy executor, which computes tile by tile what a
kernel would.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.text import Text

from tessera_cupy import interop, reference
from tessera_cupy.attention import make_plan
from tessera_cupy.bench import clips, gpu, memory
from tessera_cupy.bench.check import Check, check_rows
from tessera_cupy.bench.extras import need
from tessera_cupy.bench.rules import RULES, Rule, find
from tessera_cupy.bench.steps import Step, Steps
from tessera_cupy.bench.summary import summary_table
from tessera_cupy.errors import NoGpuError, wrong
from tessera_cupy.masks import BlockMask
from tessera_cupy.plan import Plan
from tessera_cupy.sparsifiers import Selection, spade
from tessera_cupy.video import MODELS, VideoGrid

if TYPE_CHECKING:
    from rich.console import Console

CLIP = "bikes"
HEAD_DIM = 128
RULE = "spade"

#: Without a GPU, of SPADE: 7,800 tokens, which are 121 blocks of 64 and one of 56.
HOST_GRID, HOST_HEADS = RULES[RULE].small, 4
#: With one, of SPADE: 32,760 tokens, which are 511 blocks of 64 and one of 56.
GPU_HEADS, _, GPU_GRID = MODELS["wan-1.3b-81f-480p"]
#: Heads of all other rules on a GPU, whose grids have up to 118,800 tokens.
GPU_FEW_HEADS = 4

# Peaks of memory beyond the program's own, measured on the CPU at 7,800 to 93,600 tokens and 1
# to 8 heads: copies of q, k, v and o; what the check and the rule hold for a token; what mask,
# tiles and their pictures hold for a block of a head, and the rule for a block of the one head
# that it looks at.
_COPIES, _BYTES_A_TOKEN, _BYTES_A_BLOCK, _BYTES_A_SCORE = 11, 5_000, 30, 32
_PROGRAM_BYTES = 256 << 20

_CHECKED_ROWS = 200
_WARM_UP, _TIMED = 3, 15
_DPI = 80


def run_demo(
    out: Path,
    *,
    grid: tuple[int, int, int] | None,
    heads: int | None,
    rule: str = RULE,
    device: str = "auto",
    console: Console,
) -> dict[str, Any]:
    """Run the demonstration and write its picture.

    Args:
        out: the picture to write, a PNG or what else matplotlib writes by the name's ending; its
            folder is made when missing.
        grid: (frames, rows, columns) of tokens, or None for the device's and the rule's own.
        heads: number of heads, or None for the device's own.
        rule: name in :data:`tessera_cupy.bench.rules.RULES`.
        device: ``"auto"`` (a GPU where there is one), ``"gpu"`` or ``"cpu"``.
        console: where progress and the summary go.

    Returns:
        What was run and seen, ready for JSON: sizes, the mask's figures, the plan, errors
        against float64, times, the mappings that were drawn, and ``passed``.

    Raises:
        MissingExtraError: a package of the ``demo`` extra, or one that the rule needs, is not
            installed.
        NoGpuError: ``device="gpu"`` and none can be used.
        ValueError: ``out``, ``grid``, ``heads``, ``rule`` or ``device`` is not one that can be run.
    """
    chooser = find(rule)
    on_gpu = _use_gpu(device)
    tokens, default_heads = _own_size(chooser, on_gpu)
    if grid is not None:
        tokens = VideoGrid(*grid)
    heads = default_heads if heads is None else heads
    if heads < 1:
        raise ValueError(wrong("heads", "at least 1", heads, "leave it out, or pass 1 or more"))
    need("matplotlib", "matplotlib", "draws the picture")
    need("threadpoolctl", "threadpoolctl", "keeps NumPy's threads apart")
    _check_picture(out)
    _check_memory(tokens, heads)
    out.parent.mkdir(parents=True, exist_ok=True)

    dtype = "bfloat16" if on_gpu else "float32"
    report: dict[str, Any] = {
        "device": gpu.name() if on_gpu else "no GPU, NumPy executor",
        "clip": CLIP,
        "grid": [tokens.t, tokens.h, tokens.w],
        "tokens": tokens.tokens,
        "heads": heads,
        "head_dim": HEAD_DIM,
        "dtype": dtype,
    }
    steps = Steps(console, count=8 if on_gpu else 7)

    with steps.step("Read video") as step:
        features = clips.read_features(CLIP, tokens)
        step.done(
            f"{tokens.t} frames of {CLIP}.mp4 on a grid of {tokens} = {tokens.tokens:,} tokens"
        )

    with steps.step("Make q, k, v", heads) as step:
        made = []
        for head in range(heads):
            made.append(
                clips.project(features, tokens, head, head_dim=HEAD_DIM, sharpen=chooser.sharpen)
            )
            step.advance()
        host = [
            np.stack(part)[None].astype(interop.numpy_dtype(dtype))
            for part in zip(*made, strict=True)
        ]
        step.done(f"{heads} heads of {HEAD_DIM} channels, {dtype}, with 3-D rotary embedding")

    with steps.step("Choose blocks") as step:
        q, k, v = map(interop.import_cupy().asarray, host) if on_gpu else host
        chosen = chooser.select(q, k, v, tokens)
        mask = chosen.blocks
        report["mask"] = _describe(chooser, chosen)
        step.done(
            f"{chooser.title}'s rule keeps {mask.density():.1%} of the (query, key) pairs in "
            f"{_blocks(mask)}"
        )

    with steps.step("Plan") as step:
        q, k, v = chosen.permute(q), chosen.permute_kv(k), chosen.permute_kv(v)
        plan = make_plan(mask, q, k, v)
        plan.tasks()
        report["plan"] = plan.summary()
        step.done(f"{plan.spec.name}: {len(plan.tiles()):,} tiles")
    console.print(Text(plan.explain(), style="dim"))

    with steps.step("Attend", None if on_gpu else len(plan.tasks())) as step:
        if on_gpu:
            result = plan.run(q, k, v)
            interop.import_cupy().cuda.get_current_stream().synchronize()
            step.done("one call, with the kernel from the cache or compiled for it")
        else:
            result = _execute(plan, (q, k, v), step)
            step.done(f"{len(plan.tasks()):,} tasks, tile by tile in NumPy")

    video = chosen.restore(result)
    report["output"] = {"shape": list(video.shape), "dtype": str(video.dtype)}

    with steps.step("Check", heads) as step:
        arrays = [x.get() if on_gpu else x for x in (q, k, v, result)]
        check = check_rows(mask, *arrays, rows=_CHECKED_ROWS, on_head=step.advance)
        report["check"] = {
            "rows": check.rows,
            "error": check.error,
            "allowed": check.allowed,
            "passed": check.passed,
        }
        step.done(_verdict(check))

    if on_gpu:
        with steps.step("Time", 2 * (_WARM_UP + _TIMED)) as step:
            report["speed"] = _speed(plan, mask, (q, k, v), step)
            step.done(f"median of {_TIMED} runs each, by CUDA events")

    with steps.step("Draw") as step:
        report["mappings"] = _draw(chooser, mask, plan, out)
        report["png"] = str(out)
        step.done(f"the mask and its tiles under {len(report['mappings'])} mappings: {out}")

    report["passed"] = check.passed
    report["seconds"] = steps.seconds
    console.print(summary_table(report))
    return report


def _own_size(rule: Rule, on_gpu: bool) -> tuple[VideoGrid, int]:
    """The grid and the heads that a rule is shown with."""
    if not on_gpu:
        return rule.small, HOST_HEADS
    if rule.name == RULE:
        return GPU_GRID, GPU_HEADS  # of Wan's grids, all of which are its own, the smallest
    return rule.grid, GPU_FEW_HEADS


def _use_gpu(device: str) -> bool:
    if device not in ("auto", "gpu", "cpu"):
        raise ValueError(wrong("device", "auto, gpu or cpu", repr(device), "pass one of them"))
    if device == "cpu":
        return False
    try:
        interop.import_cupy()
    except NoGpuError:
        if device == "gpu":
            raise
        return False
    return True


def _check_picture(out: Path) -> None:
    """Refuse what matplotlib would refuse after all the work."""
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = sorted(FigureCanvasBase.get_supported_filetypes())
    if out.suffix[1:].lower() not in kinds:
        expected = f"a file name that ends in .{', .'.join(kinds)}"
        raise ValueError(wrong("out", expected, repr(str(out)), "name it demo.png, for example"))


def _check_memory(grid: VideoGrid, heads: int) -> None:
    """Refuse a grid whose arrays do not fit in memory."""
    here = memory.available()
    blocks = (-(-grid.tokens // 64)) ** 2
    needed = _PROGRAM_BYTES + grid.tokens * (heads * HEAD_DIM * 4 * _COPIES + _BYTES_A_TOKEN)
    needed += blocks * (heads * _BYTES_A_BLOCK + _BYTES_A_SCORE)
    if here is not None and needed > here:
        raise ValueError(
            wrong(
                "grid",
                f"tokens and heads that fit in {here / 1e9:.1f} GB of free memory",
                f"{grid} = {grid.tokens:,} tokens with {heads} heads, which take about "
                f"{needed / 1e9:.1f} GB",
                "ask for fewer frames, rows or columns, or fewer heads",
            )
        )


def _execute(plan: Plan, arrays: tuple[Any, Any, Any], step: Step) -> Any:
    from threadpoolctl import threadpool_limits

    # A task's products are small: BLAS threads gain nothing, and where other programs keep the
    # cores busy they wait for each other, which was seen to cost twenty times the time.
    with threadpool_limits(1, user_api="blas"):
        return reference.execute(plan, *arrays, on_task=lambda done, total: step.advance())


def _describe(rule: Rule, chosen: Selection) -> dict[str, Any]:
    mask = chosen.blocks
    # SVG2 has blocks without tokens behind the last.
    filled = np.broadcast_to(np.diff(mask.q_starts(), axis=-1) > 0, mask.row_counts().shape)
    # Of slices not the blocks, which few plans run them as, but the keys of a group.
    counts = (mask if mask.slices is None else mask.slices).row_counts()[filled]
    keys = [int(counts.min()), int(counts.max())]
    own = (
        {"run_coverage": mask.run_coverage(), "blocks_in_a_row": keys}
        if mask.slices is None
        else {"group": mask.slices.group, "keys_of_a_group": keys}
    )
    tiles = {} if rule.module is not spade else {"tiles": [str(t) for t in spade.tiles_of(chosen)]}
    return {
        "rule": f"{rule.title}, regenerated from the clip",
        "name": rule.name,
        "block_size": list(mask.block_size),
        "ragged": mask.ragged,
        "density": mask.density(),
        "published_density": rule.density and list(rule.density),
        **own,
        **tiles,
    }


def _blocks(mask: BlockMask) -> str:
    """The blocks, or slices, in words."""
    if mask.slices is not None:
        return f"slices of {mask.slices.group} queries by single keys"
    bq, bkv = mask.block_size
    size = f"{'up to ' if mask.ragged else ''}{bq}x{bkv}"
    return f"blocks of {size}; run coverage {mask.run_coverage():.2f}"


def _verdict(check: Check) -> str:
    verdict = "right" if check.passed else "WRONG"
    return (
        f"{verdict} on {check.rows:,} sampled rows: error {check.error:.1e} against float64, "
        f"{check.allowed:.1e} allowed"
    )


def _speed(plan: Plan, mask: BlockMask, arrays: tuple[Any, Any, Any], step: Step) -> dict[str, Any]:
    """Times of the plan and of dense attention over the same q, k and v."""
    q, k, v = arrays
    r = plan.request
    dense_call = gpu.torch_sdpa(q, k, v)
    dense_name = "torch scaled_dot_product_attention"
    if dense_call is None:
        nq, nk = mask.num_blocks
        full = BlockMask.from_dense(np.ones((nq, nk), dtype=bool), mask.block_size, mask.shape)
        dense_plan = make_plan(full, q, k, v)
        dense_call, dense_name = (lambda: dense_plan.run(q, k, v)), "tessera_cupy, full mask"

    def timed(call: Any) -> float:
        return gpu.median_ms(call, step.advance, warm_up=_WARM_UP, runs=_TIMED)

    sparse_ms, dense_ms = timed(lambda: plan.run(q, k, v)), timed(dense_call)
    flop_a_pair = 4 * r.head_dim
    pairs = r.batch * r.q_heads * r.sq * r.skv
    return {
        "sparse_ms": sparse_ms,
        "sparse_tflops": flop_a_pair * mask.active_pairs() / sparse_ms / 1e9,
        "dense": dense_name,
        "dense_ms": dense_ms,
        "dense_tflops": flop_a_pair * pairs / dense_ms / 1e9,
        "speedup": dense_ms / sparse_ms,
    }


def _draw(rule: Rule, mask: BlockMask, plan: Plan, out: Path) -> list[dict[str, Any]]:
    from tessera_cupy import viz

    title = f"{rule.title}'s mask on {CLIP}.mp4, as physical tiles"
    figure = viz.mask_to_tiles(mask, plan=plan.spec, title=title)
    figure.savefig(out, dpi=_DPI)
    return [
        {
            "mapping": way.mapping.name,
            "tile": [way.tiles.shape.q, way.tiles.shape.kv],
            "steps": int(way.tiles.steps.sum()),
            "useful_fraction": way.useful,
            "chosen": way.chosen,
        }
        for way in viz.tile_each_way(mask, plan.spec)
    ]
