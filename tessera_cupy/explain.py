"""What a plan does and why, as plain data and as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tessera_cupy.mapping import issued_pairs, useful_fraction

if TYPE_CHECKING:
    from tessera_cupy.plan import Plan

_Q_SIDE = {
    "retain": "a tile is a query block",
    "merge": "a tile joins neighbouring query blocks; membership masks what is off",
    "share": "a tile joins neighbouring query blocks; each half skips steps of the other",
    "split": "a query block becomes several tiles",
}
_KV_SIDE = {
    "retain": "a step is a KV block",
    "merge": "a step covers an aligned group of KV blocks; membership masks what is off",
    "split": "a KV block becomes several steps",
    "pack": "a step is filled with active blocks from anywhere in the list",
}
_ORGANIZATION = {
    "runs": "tiles that read the same KV rows run together",
    "longest": "longest tasks first within heads that fit L2",
    "alternate": "every second task walks backwards",
    "split": "long tiles are cut in parts that run at the same time",
}


def summary(plan: Plan) -> dict[str, Any]:
    """The facts of a plan, ready for JSON; maps and organizes if that was not done yet.

    Bytes are those of one run: K and V rows loaded from L2 or memory over all tasks, q read and
    o written once, and the plan's own arrays. Times are not predicted.
    """
    request, tiles, tasks = plan.request, plan.tiles(), plan.tasks()
    per_mask_head = request.batch * request.q_heads / max(1, plan.mask.batch * plan.mask.heads)
    itemsize = 4 if request.dtype == "float32" else 2
    row_bytes = request.head_dim * itemsize
    loaded_rows = int(tiles.frag_len[tiles.frag_members != 0].sum(dtype="int64"))
    pairs = plan.mask.active_pairs() * per_mask_head
    return {
        "name": plan.spec.name,
        "regime": plan.choice.regime,
        "why": plan.choice.why,
        "passed_over": [
            {"plan": name, "reason": reason} for name, reason in plan.choice.passed_over
        ],
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
        "useful_fraction": useful_fraction(tiles, plan.mask),
        "tasks": len(tasks),
        "split_tiles": len(tasks.merge_tile),
        "flops": 4 * request.head_dim * pairs,
        "issued_flops": 4 * request.head_dim * issued_pairs(tiles) * per_mask_head,
        "bytes": {
            "kv_loaded": int(2 * loaded_rows * row_bytes * per_mask_head),
            "q_and_o": 2 * request.batch * request.q_heads * request.sq * row_bytes,
            "plan": sum(a.nbytes for a in (tiles.frag_start, tiles.frag_members, tiles.bits)),
            "workspace": 4 * tasks.slots * plan.config.tile_q * (plan.config.head_dim + 2),
        },
    }


def explain(plan: Plan) -> str:
    """A plan in a few lines: what was chosen, why, and what it costs."""
    s = summary(plan)
    mapping, organization = plan.spec.mapping, plan.spec.organization
    order = [text for part, text in _ORGANIZATION.items() if getattr(organization, part)]
    r, mask = s["request"], s["mask"]
    lines = [
        f"plan          {s['name']} on {s['arch']}",
        f"regime        {s['regime']}: {s['why']}",
        f"request       batch {r['batch']}, heads {r['q_heads']} over {r['kv_heads']} KV heads, "
        f"{r['sq']:,} x {r['skv']:,} tokens, head dim {r['head_dim']}, {r['dtype']}, {r['layout']}",
        f"mask          blocks {mask['block_size'][0]}x{mask['block_size'][1]}, "
        f"density {mask['density']:.3f}, run coverage {mask['run_coverage']:.2f}",
        f"mapping       Q {mapping.q}: {_Q_SIDE[mapping.q]}; KV {mapping.kv}: "
        f"{_KV_SIDE[mapping.kv]}",
        f"tiles         {s['tiles']:,} of {plan.spec.tile_q} rows, {s['steps']:,} steps of "
        f"{plan.spec.tile_kv} columns from {s['fragments']:,} fragments; "
        f"useful fraction {s['useful_fraction']:.2f}",
        f"organization  {organization.name}: {'; '.join(order) or 'row order'}",
        f"tasks         {s['tasks']:,}, {s['split_tiles']:,} tiles split",
        f"kernel        {s['kernel']['name']}: {s['kernel']['why']}",
        f"work          {s['flops'] / 1e12:.3f} TFLOP active, {s['issued_flops'] / 1e12:.3f} "
        f"issued; {s['bytes']['kv_loaded'] / 1e9:.3f} GB of K and V loaded",
    ]
    lines += [f"passed over   {p['plan']}: {p['reason']}" for p in s["passed_over"]]
    return "\n".join(lines)
