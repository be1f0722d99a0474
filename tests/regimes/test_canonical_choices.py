"""What each architecture chooses for the masks of published rules and families, and why.

The choices are kept in ``canonical_choices.txt`` beside this file. When a table was measured anew,
or its keys were changed on purpose, write them again and read the difference before it is kept:

    python tests/regimes/test_canonical_choices.py
    git diff tests/regimes/canonical_choices.txt

``tessera-cupy plans diff OLD NEW`` says of two tables which requests differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tessera_cupy.bench.families import FAMILIES
from tessera_cupy.bench.rules import RULES
from tessera_cupy.choice import eligible
from tessera_cupy.kernels.arch import ARCHS, Arch
from tessera_cupy.kernels.catalog import DTYPES, KernelConfig, catalog, find, twin_of
from tessera_cupy.masks import BlockMask, KeySlices
from tessera_cupy.masks.key_slices import block_mask
from tessera_cupy.regimes import Features, PlanSpec, load_for
from tessera_cupy.regimes.schema import Match
from tessera_cupy.request import ArraySpec, Request, make_request
from tessera_cupy.video import MODELS

KEPT = Path(__file__).with_name("canonical_choices.txt")


@dataclass(frozen=True)
class Shape:
    """A published mask: its blocks, what kind they are, the model that it is for, and how full."""

    block: tuple[int, int]
    kind: str  # "uniform", "ragged", "bits" or "slices"
    model: str
    density: float
    run_coverage: float = 0.8

    @property
    def features(self) -> Features:
        model = MODELS[self.model]
        return Features(
            block_q=self.block[0],
            block_kv=self.block[1],
            ragged=self.kind == "ragged",
            token_bits=self.kind in ("bits", "slices"),
            dtype="bfloat16",
            head_dim=model.head_dim,
            layout="BHSD",
            heads=model.heads,
            tokens=model.grid.video_tokens,
            density=self.density,
            run_coverage=self.run_coverage,
            slices=self.kind == "slices",
        )


# The published density where there is one, else a guess (marked), on the grid of the rule's model;
# tiles that do not divide it are ragged at its edges.
SHAPES = {
    "spade": Shape((64, 64), "uniform", "wan-14b-61f-720p", 0.18),
    "vsa": Shape((64, 64), "ragged", "wan-14b-81f-720p", 0.10, 0.3),
    "sta": Shape((384, 384), "uniform", "hunyuan-117f-768p", 0.167, 1.0),
    "ssta": Shape((384, 384), "ragged", "hunyuan1.5-121f-720p", 0.16, 0.6),
    "longcat": Shape((128, 128), "ragged", "longcat-93f-480p", 0.125, 0.3),
    "radial": Shape((128, 128), "uniform", "hunyuan-117f-768p", 0.275, 1.0),
    "svg": Shape((128, 64), "bits", "hunyuan-129f-720p", 0.28, 1.0),
    "svg2": Shape((64, 112), "ragged", "wan-14b-81f-720p", 0.17, 0.5),
    "spargeattn": Shape((128, 64), "uniform", "wan-1.3b-81f-480p", 0.50),
    "xattention": Shape((128, 128), "uniform", "hunyuan-129f-720p", 0.48),
    "fg-attn": Shape((64, 16), "slices", "wan-1.3b-81f-480p", 0.3),  # a guess
    "chipmunk": Shape((192, 16), "slices", "wan-1.3b-81f-480p", 0.06),
    "nabla": Shape((64, 64), "ragged", "wan-14b-81f-720p", 0.3),  # a guess
    "window": Shape((64, 64), "bits", "wan-1.3b-81f-480p", 0.016, 1.0),  # 513 keys of 32,760
    "dilated": Shape((64, 64), "bits", "wan-1.3b-81f-480p", 0.016, 1.0),
    "global-local": Shape((64, 64), "bits", "wan-1.3b-81f-480p", 0.1, 1.0),  # a frame of 21, twice
}
SHAPES |= {
    family.name: Shape(family.block_size, "uniform", "wan-14b-61f-720p", family.density)
    for family in FAMILIES
}
# Head dim 64, and what the rules do in the first steps.
SHAPES |= {
    "Q64K64 of CogVideoX": Shape((64, 64), "uniform", "cogvideox1.5-5b-81f-768p", 0.1195),
    "Q128K128 of CogVideoX": Shape((128, 128), "uniform", "cogvideox1.5-5b-81f-768p", 0.0991),
    "dense of CogVideoX": Shape((64, 64), "uniform", "cogvideox1.5-5b-81f-768p", 1.0),
}


@cache
def mask_of(block: tuple[int, int], kind: str) -> BlockMask:
    """A small mask of a kind, for what plans can serve."""
    rows, columns = block
    if kind == "slices":
        return block_mask(KeySlices.from_groups(np.eye(4, 100, dtype=bool), rows))
    if kind == "bits":
        tokens = np.ones((4 * rows, 4 * columns), bool)
        tokens[1, 1] = False
        return BlockMask.from_tokens(tokens, block)
    if kind == "ragged":
        # The cubes at the edge of a grid are a quarter as large.
        sizes = [[size, size, size // 4, size] for size in block]
        return BlockMask.from_dense(
            np.ones((4, 4), bool), block, q_block_sizes=sizes[0], kv_block_sizes=sizes[1]
        )
    return BlockMask.from_dense(np.ones((4, 4), bool), block)


def request_of(shape: Shape, arch: Arch) -> tuple[BlockMask, Request]:
    mask, model = mask_of(shape.block, shape.kind), MODELS[shape.model]
    q, k = (ArraySpec((1, model.heads, n, model.head_dim), "bfloat16") for n in mask.shape)
    return mask, make_request(mask, q, k, None, layout="BHSD", arch=arch, on_gpu=False)


def chosen(shape: Shape, arch: Arch) -> tuple[PlanSpec, str]:
    """The best-ranked plan that can serve such a mask, and the reason."""
    mask, request = request_of(shape, arch)
    choice = load_for(arch.table).lookup(shape.features)
    for spec in choice.ranking:
        if eligible(spec, mask, request)[0] is not None:
            return spec, choice.why
    raise AssertionError(f"no plan for {shape} on {arch.name}")


def lines() -> list[str]:
    return [
        f"{arch.name:<9}{name:<23}{spec.name:<51}{why}"
        for arch in ARCHS.values()
        for name, shape in SHAPES.items()
        for spec, why in [chosen(shape, arch)]
    ]


@pytest.mark.parametrize("arch", ARCHS)
def test_the_choices_are_those_that_were_kept(arch: str) -> None:
    kept = KEPT.read_text().splitlines()
    found = [line for line in lines() if line.startswith(f"{arch} ")]
    assert found == [line for line in kept if line.startswith(f"{arch} ")]


def test_nothing_else_is_kept() -> None:
    assert len(KEPT.read_text().splitlines()) == len(ARCHS) * len(SHAPES)
    assert set(RULES) <= set(SHAPES)


@pytest.mark.parametrize("name", SHAPES)
def test_the_small_mask_is_of_the_kind(name: str) -> None:
    shape = SHAPES[name]
    mask, request = request_of(shape, ARCHS["sm_90a"])
    f = Features.of(
        mask,
        batch=1,
        q_heads=request.q_heads,
        dtype="bfloat16",
        head_dim=request.head_dim,
        layout="BHSD",
    )
    same = ("block_q", "block_kv", "ragged", "token_bits", "slices", "heads", "head_dim")
    assert [getattr(f, field) for field in same] == [
        getattr(shape.features, field) for field in same
    ]


@pytest.mark.parametrize("name", RULES)
def test_grids_densities_and_edges_are_the_rules_own(name: str) -> None:
    rule, shape = RULES[name], SHAPES[name]
    assert (rule.model, rule.head_dim) == (shape.model, shape.features.head_dim)
    if rule.density:
        least, most = rule.density
        assert least <= shape.density <= most


# Entries of the catalog, of either dtype, that a shipped table does not name, and why; a plan that
# is given by name, or by a rule, reaches them.
_WIDER = "128 columns take its place at head dim 64, where shared memory allows: half the barriers"
UNNAMED = {
    arch: {"d64_q128k64w4_bits": f"{_WIDER}; no mask with token bits was profiled"}
    for arch in ("sm_80", "sm_90a")  # the other two are ranked behind other plans
}


def reached(arch: Arch, match: Match, plan: PlanSpec) -> set[KernelConfig]:
    """Entries that run a plan for some request of a key, and their twins."""
    gather = plan.mapping.kv == "gather"
    kinds = (False, True) if match.token_bits is None else (match.token_bits,)
    found = [
        find(arch.name, plan.kernel, dtype, dim, plan.tile_q, plan.tile_kv, bits, gather)
        for dtype in ((match.dtype,) if match.dtype else DTYPES)
        for dim in range(8, 257, 8)
        if dim in match.head_dim
        for bits in ((False,) if gather else kinds)
    ]
    runs = {config for config in found if config is not None}
    return runs | {twin for config in runs if (twin := twin_of(config)) is not None}


@pytest.mark.parametrize("name", ARCHS)
def test_every_attention_kernel_is_named_by_a_table_or_has_a_reason(name: str) -> None:
    arch = ARCHS[name]
    document = load_for(arch.table).document
    rankings = [(key.match, regime.plans) for key in document.all_keys for regime in key.regimes]
    named = {
        config
        for match, plans in [(Match(), document.base), *rankings]
        for plan in plans
        for config in reached(arch, match, plan)
    }
    left = {config for config in catalog(name) if config.attends} - named
    expected = {
        config for config in catalog(name) if config.name.endswith(tuple(UNNAMED.get(name, ())))
    }
    assert {config.name for config in left} == {config.name for config in expected}


@pytest.mark.parametrize("name", ARCHS)
def test_every_attention_kernel_is_reached_by_a_plan_of_some_name(name: str) -> None:
    arch = ARCHS[name]
    attending = {config for config in catalog(name) if config.attends}
    found: set[KernelConfig] = set()
    for config in attending:
        for how in ("retain-pack", "retain-gather"):
            plan = f"{config.kernel}/q{config.tile_q}k{config.tile_kv}/{how}/longest+split"
            found |= reached(arch, Match(), PlanSpec.parse(plan))
    assert found == attending


if __name__ == "__main__":
    KEPT.write_text("\n".join(line.rstrip() for line in lines()) + "\n")
