"""What a plan does and why, as plain data and as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from tessera_cupy.cost import predict
from tessera_cupy.interop import GPU_DTYPES
from tessera_cupy.kernels.launch import TASK
from tessera_cupy.mapping import issued_pairs, useful_fraction
from tessera_cupy.masks.key_slices import SliceBlocks
from tessera_cupy.ranking import ranking_lines, ranking_summary, table_line
from tessera_cupy.regimes.naming import bucketed_axes

if TYPE_CHECKING:
    from tessera_cupy.plan import Plan

_FRAGMENT_BYTES = 8  # as kernels.launch packs one
_Q_SIDE = {
    "retain": "a tile is a query block",
    "merge": "a tile joins neighbouring query blocks; membership masks what is off",
    "share": "a tile joins neighbouring query blocks; each half skips steps of the other",
    "regroup": "a tile joins query blocks with alike lists; each half skips steps of the other",
    "split": "a query block becomes several tiles",
}
_KV_SIDE = {
    "retain": "a step is a KV block",
    "merge": "a step covers an aligned group of KV blocks; membership masks what is off",
    "split": "a KV block becomes several steps",
    "pack": "a step is filled with active blocks from anywhere in the list",
    "gather": "a step is filled with runs of keys and single keys from anywhere in the list",
}
_ORGANIZATION = {
    "runs": "tiles that read the same KV rows run together",
    "longest": "longest tasks first within heads that fit L2",
    "alternate": "every second task walks backwards",
    "split": "long tiles are cut in parts that run at the same time",
}


def summary(plan: Plan) -> dict[str, Any]:
    """The facts of a plan, ready for JSON; maps and organizes if that was not done yet.

    Issued work and the useful fraction are those of the plan's kernel: a warp or a warpgroup
    skips the steps in which none of its rows takes part. Bytes are those of one run: K and V rows
    loaded from L2 or memory over all tasks, q read and o written once, and the plan's own arrays
    in GPU memory. Under ``"predicted"`` is what the cost model says of the attention on a GPU of
    the plan's architecture; it is not measured.
    """
    request, tiles, tasks = plan.request, plan.tiles(), plan.tasks()
    part = plan.config.rows_together
    per_mask_head = request.batch * request.q_heads / max(1, plan.mask.batch * plan.mask.heads)
    itemsize = 4 if request.dtype == "float32" else 2
    row_bytes = request.head_dim * itemsize
    loaded_rows = int(tiles.frag_len[tiles.frag_members != 0].sum(dtype="int64"))
    gathered_rows = 0
    if tiles.frag_gathered is not None:
        gathered_rows = int(tiles.frag_len[tiles.frag_gathered].sum(dtype="int64"))
    pairs = plan.mask.active_pairs() * per_mask_head
    issued = issued_pairs(tiles, part) * per_mask_head
    all_pairs = request.batch * request.q_heads * request.sq * request.skv
    predicted = predict(plan)
    return {
        "name": plan.spec.name,
        "regime": plan.choice.regime,
        "why": plan.choice.why,
        "passed_over": [
            {"plan": name, "reason": reason} for name, reason in plan.choice.passed_over
        ],
        **ranking_summary(plan.choice, request.arch),
        "arch": request.arch.name,
        "request": {
            "batch": request.batch,
            "q_heads": request.q_heads,
            "kv_heads": request.kv_heads,
            "sq": request.sq,
            "skv": request.skv,
            "head_dim": request.head_dim,
            "dtype": request.dtype,
            "layout": request.layout,
        },
        "mask": {
            "block_size": list(plan.mask.block_size),
            "heads": plan.mask.batch * plan.mask.heads,
            "active_blocks": plan.mask.nnz,
            "density": plan.mask.density(),
            "run_coverage": plan.mask.run_coverage(),
        },
        "kernel": {
            "name": plan.config.name,
            "why": plan.config.why,
            "smem_bytes": plan.config.smem_bytes,
            "threads": plan.config.warps * 32,
        },
        "tiles": len(tiles),
        "steps": int(tiles.steps.sum(dtype="int64")),
        "fragments": len(tiles.frag_start),
        "fragment_columns": tiles.shape.slot,
        "rows_in_runs": loaded_rows - gathered_rows,
        "gathered_rows": gathered_rows,
        "useful_fraction": useful_fraction(tiles, plan.mask, part),
        "tasks": len(tasks),
        "split_tiles": len(tasks.merge_tile),
        "flops": 4 * request.head_dim * pairs,
        "issued_flops": 4 * request.head_dim * issued,
        "issued_of_dense": issued / all_pairs if all_pairs else 0.0,
        "predicted": {
            "gpu": predicted.gpu.name,
            "ms": predicted.ms,
            "bound": predicted.bound,
        },
        "bytes": {
            "kv_loaded": int(2 * loaded_rows * row_bytes * per_mask_head),
            "q_and_o": 2 * request.batch * request.q_heads * request.sq * row_bytes,
            "plan": _plan_bytes(plan),
            "workspace": 4 * tasks.slots * plan.config.tile_q * (plan.config.head_dim + 2),
        },
    }


def _plan_bytes(plan: Plan) -> int:
    """Bytes of the arrays that ``kernels.launch.upload`` copies to the GPU."""
    tiles, tasks = plan.tiles(), plan.tasks()
    arrays: list[NDArray[Any]] = [tiles.tile_q]
    arrays += [tasks.merge_head, tasks.merge_tile, tasks.merge_offsets]
    if tiles.tile_units is not None:
        arrays.append(tiles.tile_units)
    if tiles.rows is not None:
        arrays.append(tiles.rows)
    if plan.config.bits:
        arrays += [tiles.frag_bits, tiles.bits]
    packed = len(tasks) * TASK.itemsize + len(tiles.frag_start) * _FRAGMENT_BYTES
    return packed + sum(array.nbytes for array in arrays)


def explain(plan: Plan) -> str:
    """A plan in a few lines: what was chosen, why, and what it costs."""
    s = summary(plan)
    lines = _facts(plan, s)
    ranked = ranking_lines(plan.choice)
    lines += zip(("ranking", *[""] * len(ranked)), ranked, strict=False)
    return _aligned(lines)


def brief(plan: Plan) -> str:
    """A plan in three lines: its name, its mapping, and the tiles with their useful fraction."""
    lines = dict(_facts(plan, summary(plan)))
    mapping = plan.spec.mapping
    return _aligned(
        [
            ("plan", lines["plan"]),
            ("mapping", f"Q {mapping.q}, KV {mapping.kv}"),
            ("tiles", lines["tiles"]),
        ]
    )


def _facts(plan: Plan, s: dict[str, Any]) -> list[tuple[str, str]]:
    """The lines of :func:`explain`, as titles and texts."""
    mapping, organization = plan.spec.mapping, plan.spec.organization
    table = table_line(plan.choice, plan.request.arch)
    order = [text for part, text in _ORGANIZATION.items() if getattr(organization, part)]
    r, mask, loaded = s["request"], s["mask"], s["bytes"]["kv_loaded"]
    keys = []
    if mapping.kv == "gather":
        found = f"{s['gathered_rows']:,} gathered, {s['rows_in_runs']:,} in runs, over all tiles"
        keys = [("keys", found)]
    return [
        ("plan", f"{s['name']} for {s['arch']}"),
        ("regime", s["regime"]),
        ("why", _why(plan)),
        *([("table", table)] if table else []),
        (
            "request",
            f"batch {r['batch']}, heads {r['q_heads']} over {r['kv_heads']} KV heads, "
            f"{r['sq']:,} x {r['skv']:,} tokens, head dim {r['head_dim']}, {r['dtype']}, "
            f"{r['layout']}",
        ),
        (
            "mask",
            f"{_blocks(plan)}, density {mask['density']:.3f}"
            + (f", run coverage {mask['run_coverage']:.2f}" * (mapping.kv != "gather")),
        ),
        (
            "mapping",
            f"Q {mapping.q}: {_Q_SIDE[mapping.q]}; KV {mapping.kv}: {_KV_SIDE[mapping.kv]}",
        ),
        (
            "tiles",
            f"{s['tiles']:,} of {plan.spec.tile_q} rows, {s['steps']:,} steps of "
            f"{plan.spec.tile_kv} columns from {s['fragments']:,} fragments; "
            f"useful fraction {s['useful_fraction']:.2f}",
        ),
        *keys,
        ("organization", f"{organization.name}: {'; '.join(order) or 'row order'}"),
        ("tasks", f"{s['tasks']:,}, {s['split_tiles']:,} tiles split"),
        ("kernel", f"{s['kernel']['name']}{_as_if(plan)}: {s['kernel']['why']}"),
        ("runs on", _runs_on(r["dtype"], s["arch"])),
        (
            "work",
            f"{_scaled(s['flops'], 'FLOP')} active, {_scaled(s['issued_flops'], 'FLOP')} issued; "
            f"{_scaled(loaded, 'B')} of K and V loaded",
        ),
        *_dense(s["issued_of_dense"]),
        ("predicted", _predicted(s["predicted"])),
    ]


def _dense(share: float) -> list[tuple[str, str]]:
    if share < 1:
        return []
    return [("dense", f"{share:.2f} times the pairs of dense attention issued: no work saved")]


def _predicted(p: dict[str, Any]) -> str:
    return f"{p['ms']:.3g} ms on {p['gpu']}, bound by {p['bound']}; by the cost model, not measured"


def _blocks(plan: Plan) -> str:
    rows, keys = plan.mask.block_size
    if plan.spec.mapping.kv == "gather":
        return f"slices of {rows} rows by single keys"
    if isinstance(plan.mask, SliceBlocks):
        return f"slices of {rows} rows, run as blocks of {keys} keys with token bits"
    return f"blocks {rows}x{keys}"


def _aligned(lines: list[tuple[str, str]]) -> str:
    return "\n".join(f"{title:<14}{text}" for title, text in lines)


def _why(plan: Plan) -> str:
    """A key has one reason for all of its buckets, so say which of them it speaks of."""
    answer, why = plan.choice.answer, plan.choice.why
    # A rule has a reason of its own.
    by_rule = answer is not None and answer.origin == "rule"
    axes = [] if by_rule else bucketed_axes(plan.choice.regime)
    return f"(one reason for every {' and '.join(axes)}) {why}" if axes else why


def _as_if(plan: Plan) -> str:
    """What a kernel's name has in place of a dtype that no kernel takes."""
    dtype, planned = plan.request.dtype, plan.request.kernel_dtype
    return "" if dtype == planned else f" (as if {planned})"


def _runs_on(dtype: str, arch: str) -> str:
    numpy = "the NumPy executor, tile by tile as the kernel would"
    if dtype not in GPU_DTYPES:
        return f"the CPU, since no kernel takes {dtype}: {numpy}"
    return f"a GPU of {arch} with that kernel; arrays in host memory: {numpy}"


def _scaled(amount: float, unit: str) -> str:
    """An amount with the largest prefix that leaves it above one.

    >>> _scaled(2_621_440, "FLOP")
    '2.6 MFLOP'
    """
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if amount >= size:
            return f"{amount / size:.1f} {prefix}{unit}"
    return f"{amount:.0f} {unit}"
