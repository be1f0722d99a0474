"""The plan of a mapping on a GPU: of the catalog's kernels the one predicted to be fastest."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from tessera_cupy.attention import make_plan
from tessera_cupy.choice import eligible
from tessera_cupy.cost import Gpu, Prediction, predict
from tessera_cupy.errors import wrong
from tessera_cupy.mapping import Mapping
from tessera_cupy.masks import BlockMask, KeySlices
from tessera_cupy.plan import Plan
from tessera_cupy.regimes.candidates import candidates
from tessera_cupy.request import ArraySpec

#: The mapping of the plan that the profile table chooses.
AUTO = "auto"

_DTYPE = "bfloat16"
_DENSE_BLOCK = (128, 128)


def auto_plan(mask: BlockMask | KeySlices, heads: int, head_dim: int, gpu: Gpu) -> Plan:
    """What ``make_plan`` chooses for bfloat16 arrays of one batch entry on a GPU."""
    return make_plan(mask, _q(mask, heads, head_dim), arch=gpu.arch)


def best_plans(auto: Plan, gpu: Gpu) -> dict[str, Plan]:
    """The fastest plan of each mapping that can serve a request, by predicted time.

    Args:
        auto: any plan for the mask on the GPU's architecture.
        gpu: the GPU.

    Returns:
        Plans by the names of their mappings, in the order of the architecture's candidates; of
        plans that are predicted alike the first.
    """
    request, mask = auto.request, auto.mask
    best: dict[str, tuple[float, Plan]] = {}
    for spec in candidates(gpu.arch):
        if eligible(spec, mask, request)[0] is None:
            continue
        plan = make_plan(mask, ArraySpec(request.q_shape, _DTYPE), regime=spec, arch=gpu.arch)
        ms = predict(plan, gpu).ms
        name = spec.mapping.name
        if name not in best or ms < best[name][0]:
            best[name] = ms, plan
    return {name: plan for name, (_, plan) in best.items()}


def find_plan(
    mask: BlockMask | KeySlices, mapping: str, heads: int, head_dim: int, gpu: Gpu
) -> Plan:
    """A plan by what a control says.

    Args:
        mask: the mask.
        mapping: ``"auto"``, a mapping's name such as ``"share-pack"``, or a plan's name.
        heads: query heads, and KV heads.
        head_dim: elements of a row of q.
        gpu: the GPU.

    Raises:
        TypeError: no name.
        ValueError: no such mapping, or none that can serve the mask on that GPU; the message lists
            those that can.
    """
    if not isinstance(mapping, str):
        expected = f"{AUTO!r}, or the name of a mapping or a plan"
        raise TypeError(wrong("mapping", expected, repr(mapping), "name one"))
    if "/" in mapping:
        return make_plan(mask, _q(mask, heads, head_dim), regime=mapping, arch=gpu.arch)
    auto = auto_plan(mask, heads, head_dim, gpu)
    if mapping == AUTO:
        return auto
    name = Mapping.parse(mapping).name
    plans = best_plans(auto, gpu)
    if name not in plans:
        expected = f"one that can serve the mask on {gpu.name}: {', '.join((AUTO, *plans))}"
        raise ValueError(wrong("mapping", expected, repr(name), "pick one of these"))
    return plans[name]


@lru_cache(maxsize=64)
def predict_dense(tokens: int, heads: int, head_dim: int, gpu: Gpu) -> Prediction:
    """What dense attention over as many tokens is predicted to take, by this package's kernels."""
    blocks = -(-tokens // _DENSE_BLOCK[0])
    mask = BlockMask.from_dense(np.ones((blocks, blocks), bool), _DENSE_BLOCK, (tokens, tokens))
    return predict(auto_plan(mask, heads, head_dim, gpu), gpu)


def _q(mask: BlockMask | KeySlices, heads: int, head_dim: int) -> ArraySpec:
    return ArraySpec((1, heads, mask.shape[0], head_dim), _DTYPE)
