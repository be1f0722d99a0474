"""What there is to see of one mask under one mapping on one GPU, as plain data."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.cost import find_gpu, predict
from tessera_cupy.errors import wrong
from tessera_cupy.explore.choices import BlockSize, model_of, rule_title
from tessera_cupy.explore.layout import block_boxes, mask_data, tiles_data
from tessera_cupy.explore.plans import AUTO, best_plans, find_plan, predict_dense
from tessera_cupy.explore.scene import Scene, make_scene
from tessera_cupy.mapping import issued_pairs
from tessera_cupy.masks import BlockMask, KeySlices
from tessera_cupy.masks.key_slices import block_mask
from tessera_cupy.plan import Plan
from tessera_cupy.sparsifiers.parameters import whole
from tessera_cupy.video import VideoGrid

MODEL, RULE, GPU = "wan-14b-81f-720p", "spade", "H200"


def explore_data(
    model: str = MODEL,
    rule: str = RULE,
    *,
    head: int = 0,
    block_size: BlockSize | None = None,
    mapping: str = AUTO,
    gpu: str = GPU,
    grid: VideoGrid | None = None,
) -> dict[str, Any]:
    """A rule's mask on the small grid of a model, its tiles, and its predicted time.

    q and k are made from video frames where the extra ``demo`` is installed. Nothing is computed
    on a GPU, and times are predicted by :mod:`tessera_cupy.cost`, for all of the model's heads with
    this one mask.

    Args:
        model: name in :data:`tessera_cupy.video.MODELS`.
        rule: name in :data:`tessera_cupy.bench.rules.RULES`.
        head: one of the model's heads.
        block_size: (query, key) tokens of a block, of
            :func:`tessera_cupy.explore.choices.block_sizes`; None for the rule's own.
        mapping: ``"auto"`` for the plan that the profile table chooses, a mapping such as
            ``"share-pack"``, with the kernel that is predicted to be fastest, or a plan's name.
        gpu: name in :data:`tessera_cupy.cost.GPUS`.
        grid: another grid without text than the model's small one.

    Returns:
        Plain lists, numbers and texts, ready for JSON: ``scene`` (the grid, the rule, the mask and
        the tokens of its blocks), ``tiles`` as :func:`tessera_cupy.explore.layout.tiles_data` has
        them, ``plan`` (its name, mapping and ``explain()``), ``gpu``, and ``figures``.

    Raises:
        ValueError: something that there is not to choose from; the message says what there is.
        MissingExtraError: a package that the rule needs is not installed.

    Example:
        >>> data = explore_data(rule="window", block_size=(128, 128), mapping="retain-pack")
        >>> data["scene"]["grid"]["size"], data["plan"]["mapping"]
        ([8, 16, 24], 'retain-pack')
    """
    scene = make_scene(model, rule, head, block_size, grid)
    known = model_of(model)
    plan = find_plan(scene.mask, mapping, known.heads, known.head_dim, find_gpu(gpu))
    return view_of(scene_data(scene), tiles_of(plan), plan, gpu, mapping)


def explore_mask(
    mask: BlockMask | KeySlices,
    *,
    head: int = 0,
    heads: int | None = None,
    head_dim: int = 128,
    mapping: str = AUTO,
    gpu: str = GPU,
    grid: VideoGrid | None = None,
    order: NDArray[Any] | None = None,
) -> dict[str, Any]:
    """As :func:`explore_data`, of a mask that is there.

    Args:
        mask: the mask.
        head: the mask head to show, of its first batch entry.
        heads: query heads; None for as many as the mask has.
        head_dim: elements of a row of q.
        mapping: as in :func:`explore_data`.
        gpu: likewise.
        grid: the video grid of its tokens; None where it has none.
        order: (tokens,) the raster index of the token at each place of the sequence; None for the
            grid's own order.

    Raises:
        TypeError: a head, a number of heads or a mapping of another type.
        ValueError: a head, mapping or GPU that there is not, a grid of other tokens or with text,
            or an order that has not each token once.

    Example:
        >>> mask = BlockMask.from_dense([[1, 0], [1, 1]], (64, 64))
        >>> data = explore_mask(mask, mapping="share-pack", gpu="A100-SXM4-80GB")
        >>> data["tiles"]["steps"], data["figures"]["active_pairs"]
        ([2], 12288)
    """
    fix = "pass as many heads as q has"
    heads = mask.heads if heads is None else whole("heads", heads, 1, None, fix)
    last = mask.heads - 1
    head = whole("head", head, 0, last, "pick one of the mask's", f"from 0 to {last}")
    if grid is not None and (grid.text_tokens or (grid.tokens, grid.tokens) != mask.shape):
        expected = "a grid of {} x {} tokens, without text".format(*mask.shape)
        raise ValueError(
            wrong("grid", expected, f"{grid} = {grid.tokens:,}", "pass the mask's own")
        )
    if grid is not None and order is not None:
        order = _order(order, grid.tokens)
    plan = find_plan(mask, mapping, heads, head_dim, find_gpu(gpu))
    blocks = block_mask(mask)
    places = None if grid is None else np.arange(grid.tokens) if order is None else order
    scene = {
        "grid": None if grid is None else _grid(grid),
        "rule": None,
        "head": head,
        "heads": heads,
        "head_dim": head_dim,
        "source": "a mask that was given",
        **_mask_part(blocks, head, grid, places, places),
    }
    return view_of(scene, tiles_of(plan, head), plan, gpu, mapping)


def scene_data(scene: Scene) -> dict[str, Any]:
    """What of :func:`explore_data` no mapping and no GPU changes."""
    known = model_of(scene.model)
    return {
        "grid": {
            **_grid(scene.grid),
            "model": scene.model,
            "model_grid": str(known.grid),
            "model_tokens": known.grid.tokens,
            "model_text": known.grid.text_tokens,
        },
        "rule": {"name": scene.rule, "title": rule_title(scene.rule)},
        "head": scene.head,
        "heads": known.heads,
        "head_dim": known.head_dim,
        "source": scene.source,
        **_mask_part(block_mask(scene.mask), 0, scene.grid, scene.order, scene.kv_order),
    }


def tiles_of(plan: Plan, head: int = 0) -> dict[str, Any]:
    """The tiles of a plan's mask head, as its kernel computes them."""
    return tiles_data(plan.tiles(), head, plan.config.rows_together)


def view_of(
    scene: dict[str, Any], tiles: dict[str, Any], plan: Plan, gpu: str, mapping: str
) -> dict[str, Any]:
    """A scene's data with those of a plan on a GPU.

    Args:
        scene: of :func:`scene_data`.
        tiles: of :func:`tiles_of`.
        plan: a plan for its mask.
        gpu: name of a GPU of the plan's architecture.
        mapping: what was asked for.
    """
    device = find_gpu(gpu)
    request = plan.request
    summary, prediction = plan.summary(), predict(plan, device)
    dense = predict_dense(request.sq, request.q_heads, request.head_dim, device)
    return {
        "scene": scene,
        "tiles": tiles,
        "plan": {
            "name": plan.spec.name,
            "mapping": plan.spec.mapping.name,
            "asked": mapping,
            "explain": plan.explain(),
        },
        "gpu": {"name": device.name, "arch": device.arch},
        "figures": {
            "tiles": summary["tiles"],
            "steps": summary["steps"],
            "tasks": summary["tasks"],
            "split_tiles": summary["split_tiles"],
            "active_pairs": plan.mask.active_pairs(),
            "issued_pairs": issued_pairs(plan.tiles(), plan.config.rows_together),
            "all_pairs": plan.mask.batch * plan.mask.heads * request.sq * request.skv,
            "useful_fraction": summary["useful_fraction"],
            "density": summary["mask"]["density"],
            "run_coverage": summary["mask"]["run_coverage"],
            "predicted_ms": prediction.ms,
            "predicted_bound": prediction.bound,
            "predicted_dense_ms": dense.ms,
        },
    }


def mappings_of(scene: Scene, gpu: str) -> dict[str, Plan]:
    """What a control of mappings offers for a scene: ``"auto"``, and each mapping's best plan."""
    known, device = model_of(scene.model), find_gpu(gpu)
    auto = find_plan(scene.mask, AUTO, known.heads, known.head_dim, device)
    return {AUTO: auto, **best_plans(auto, device)}


def _order(order: NDArray[Any], tokens: int) -> NDArray[Any]:
    order = np.asarray(order)
    if order.dtype.kind not in "iu" or not np.array_equal(np.sort(order), np.arange(tokens)):
        expected = f"each number from 0 to {tokens - 1} once"
        got = f"{order.dtype} of shape {order.shape}"
        raise ValueError(wrong("order", expected, got, "pass the one that q was permuted by"))
    return order


def _grid(grid: VideoGrid) -> dict[str, Any]:
    return {"size": [grid.t, grid.h, grid.w], "tokens": grid.tokens}


def _mask_part(
    mask: BlockMask,
    head: int,
    grid: VideoGrid | None,
    order: NDArray[Any] | None,
    kv_order: NDArray[Any] | None,
) -> dict[str, Any]:
    data = mask_data(mask, head)
    if grid is None or order is None or kv_order is None:
        return {"mask": data, "q_boxes": None, "kv_boxes": None, "order": None, "kv_order": None}
    return {
        "mask": data,
        "q_boxes": block_boxes(data["q_edges"], order, grid),
        "kv_boxes": block_boxes(data["kv_edges"], kv_order, grid),
        "order": np.asarray(order).tolist(),
        "kv_order": None if kv_order is order else np.asarray(kv_order).tolist(),
    }
