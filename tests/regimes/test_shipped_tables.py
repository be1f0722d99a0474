from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest

from tessera_cupy import ArraySpec, make_plan
from tessera_cupy.kernels.arch import ARCHS
from tessera_cupy.kernels.catalog import find
from tessera_cupy.mapping import why_not
from tessera_cupy.masks import BlockMask, KeySlices
from tessera_cupy.regimes import Features, Table, load_for
from tessera_cupy.regimes.features import kept_keys
from tessera_cupy.regimes.schema import AXES, PROVENANCES

TABLES = ("sm80", "sm89", "sm90", "sm100", "sm120")
DTYPES = ("float16", "bfloat16")
BLOCKS = range(16, 385, 8)
REQUEST = {
    "block_q": 64,
    "block_kv": 64,
    "ragged": False,
    "token_bits": False,
    "dtype": "bfloat16",
    "head_dim": 128,
    "layout": "BHSD",
    "heads": 12,
    "tokens": 32760,
    "density": 0.1,
    "run_coverage": 0.8,
}


def archs_of(table):
    """Names of the architectures that a table serves."""
    return [arch.name for arch in ARCHS.values() if arch.table == table]


@cache
def defaults(name):
    """What a table reasons: all of it, or its reasoned keys alone where others were measured."""
    document = load_for(name).document
    if document.provenance == "default":
        return load_for(name)
    return Table(replace(document, keys=document.reasoned, reasoned=()))


@cache
def has_kernel(arch, plan, dtype, head_dim, bits):
    gather = plan.mapping.kv == "gather"
    sizes = (head_dim, plan.tile_q, plan.tile_kv)
    config = find(arch, plan.kernel, dtype, *sizes, bits=bits and not gather, gather=gather)
    return config is not None


@cache
def full_mask(block_q, block_kv):
    return BlockMask.from_dense(np.ones((2, 2), bool), (block_q, block_kv))


def runnable(table, **changes):
    """Plans of the ranking that serve the block size and have a kernel on every architecture."""
    f = Features(**{**REQUEST, **changes})
    return [
        plan
        for plan in load_for(table).lookup(f).ranking
        if plan.serves(f.block_q, f.block_kv, ragged=f.ragged)
        and all(
            has_kernel(arch, plan, f.dtype, f.head_dim, f.token_bits) for arch in archs_of(table)
        )
    ]


def test_every_architecture_has_its_table():
    assert {arch.table for arch in ARCHS.values()} == set(TABLES)


def test_an_unknown_table_is_named_with_those_that_exist():
    with pytest.raises(ValueError, match="sm100, sm120, sm80, sm89, sm90, got 'sm70'"):
        load_for("sm70")


@pytest.mark.parametrize("name", TABLES)
def test_every_table_loads_and_says_why(name):
    table = load_for(name)
    assert table is load_for(name)
    assert table.document.provenance in PROVENANCES
    assert len(table.document.reasons) > 100
    assert len({key.why for key in table.document.all_keys}) > 3


@pytest.mark.parametrize("name", TABLES)
def test_every_plan_has_a_kernel_on_every_architecture_of_the_table(name):
    for arch, dtype, plan in product(archs_of(name), DTYPES, load_for(name).plans()):
        dims = [d for d in (64, 96, 128, 256) if has_kernel(arch, plan, dtype, d, False)]
        assert dims, f"{plan.name} has no kernel for {dtype} on {arch}"
        for dim in dims if plan.kernel == "attend_mma" else ():
            assert has_kernel(arch, plan, dtype, dim, True), f"{plan.name} {dim} lacks token bits"


@pytest.mark.parametrize("name", TABLES)
def test_a_ranked_plan_never_lacks_its_kernel(name):
    """The plans of a regime are there for every head dim and dtype of their key."""
    table = load_for(name)
    for dtype, dim, q, ragged in product(DTYPES, (8, 64, 72, 96, 128, 256), BLOCKS, (False, True)):
        for density, tokens in product((0.1, 0.8), (4096, 200_000)):
            changes = {"density": density, "tokens": tokens, "ragged": ragged, "block_q": q}
            features = Features(**{**REQUEST, **changes, "dtype": dtype, "head_dim": dim})
            choice = table.lookup(features)
            assert choice.key != "base"
            assert "(no regime)" not in choice.regime
            for plan in (choice.ranking[0], *set(choice.ranking) - set(table.document.base)):
                for arch in archs_of(name):
                    assert has_kernel(arch, plan, dtype, dim, False), f"{choice.regime} {plan.name}"


@pytest.mark.parametrize("name", TABLES)
def test_every_uniform_block_size_has_an_eligible_plan(name):
    for q, kv, dim, dtype in product(BLOCKS, BLOCKS, (64, 96, 128, 256), DTYPES):
        plans = runnable(name, block_q=q, block_kv=kv, head_dim=dim, dtype=dtype)
        assert plans, (q, kv, dim, dtype)


@pytest.mark.parametrize("name", TABLES)
def test_every_head_dim_and_kind_of_mask_has_an_eligible_plan(name):
    dims = [*range(8, 129, 8), 256]
    sizes = (1, 7, 16, 64, 65, 129, 384, 5000)
    kinds = product(sizes, sizes, dims, (False, True), (False, True), (0.0, 1.0), (1, 10**6))
    for q, kv, dim, ragged, bits, density, tokens in kinds:
        changes = {"block_q": q, "block_kv": kv, "head_dim": dim, "ragged": ragged}
        changes |= {"token_bits": bits, "density": density, "tokens": tokens}
        assert runnable(name, **changes), changes


@pytest.mark.parametrize("name", TABLES)
def test_the_best_plan_of_a_uniform_mask_is_eligible_for_the_planner(name):
    """Ranked first means meant to run: no key names a mapping that its own blocks rule out."""
    for q, kv, dim, density in product(BLOCKS, (16, 64, 96, 128), (64, 128, 256), (0.1, 0.9)):
        changes = {"block_q": q, "block_kv": kv, "head_dim": dim, "density": density}
        choice = load_for(name).lookup(Features(**{**REQUEST, **changes}))
        plan = choice.ranking[0]
        assert plan in runnable(name, **changes), choice.regime
        reason = why_not(plan.mapping, full_mask(q, kv), plan.tile_q, plan.tile_kv)
        assert reason is None, choice.regime


def inside(when):
    """Numbers of a request in a box of buckets: the first of many that are tried."""
    ends = dict(zip(AXES, when, strict=True))
    sizes = sorted({int(2 ** (i / 8)) for i in range(8 * 20)})
    shares = [i / 256 for i in range(257)]

    def of(axis, values):
        found = sorted({max(ends[axis].low, 0), *values})
        return [value for value in found if value in ends[axis]]

    for heads, tokens in product(of("heads", sizes[:40]), of("tokens", sizes)):
        if heads * tokens in ends["rows"]:
            for density in of("density", [*shares, ends["kept_keys"].low / max(1, tokens)]):
                if 0 <= density <= 1 and kept_keys(density, tokens) in ends["kept_keys"]:
                    coverage = max(0.0, ends["run_coverage"].low)
                    return {"heads": heads, "tokens": tokens, "density": density,
                            "run_coverage": coverage}  # fmt: skip
    raise AssertionError(f"no request is in {when}")


@pytest.mark.parametrize("table_of", [load_for, defaults])
@pytest.mark.parametrize("name", TABLES)
def test_every_regime_can_be_reached(name, table_of):
    """Asking for a request in each regime's box gives that regime's ranking."""
    table = table_of(name)
    for key in table.document.keys:
        match = key.match
        corner = {
            "block_q": max(1, match.block_q.low),
            "block_kv": max(1, match.block_kv.low),
            "head_dim": max(8, match.head_dim.low),
            "ragged": bool(match.ragged),
            "token_bits": bool(match.token_bits),
            "dtype": match.dtype or "bfloat16",
            "layout": match.layout or "BHSD",
            "slices": match.mask == "slices",
        }
        for regime in key.regimes:
            choice = table.lookup(Features(**{**REQUEST, **corner, **inside(regime.when)}))
            assert choice.ranking[: len(regime.plans)] == regime.plans
            assert choice.why == key.why


def best(name, kernel="attend_mma", **changes):
    """Tile and mapping of the plan of a kernel that a table ranks first."""
    ranking = defaults(name).lookup(Features(**{**REQUEST, **changes})).ranking
    spec = next(spec for spec in ranking if spec.kernel == kernel)
    assert spec.organization.longest
    return f"q{spec.tile_q}k{spec.tile_kv} {spec.mapping.name}"


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("dim", [40, 64, 96, 128, 256])
@pytest.mark.parametrize(("group", "split"), [(64, False), (128, False), (192, True)])
def test_key_slices_are_gathered(name, dim, group, split):
    """Ranked first is a plan for which there are kernels, and that serves such groups."""
    slices = KeySlices.from_groups(np.eye(2, 100, dtype=bool), group)
    mask = slices.to_block_mask()
    changes = {"block_q": group, "block_kv": 16, "token_bits": True, "head_dim": dim}
    for dtype, density in product(DTYPES, (0.01, 0.9)):
        given = {**REQUEST, **changes, "dtype": dtype, "density": density, "slices": True}
        choice = defaults(name).lookup(Features(**given))
        first = choice.ranking[0]
        assert first.mapping.kv == "gather"
        assert (first.mapping.q == "split") == (split or (dim > 128 and group > 64))
        assert (first.kernel == "attend_wgmma") == (name == "sm90" and dim <= 128)
        for plan in choice.ranking:
            if plan.mapping.kv == "gather":
                assert why_not(plan.mapping, mask, plan.tile_q, plan.tile_kv) is None
                assert all(has_kernel(arch, plan, dtype, dim, True) for arch in archs_of(name))
        blocks = defaults(name).lookup(Features(**{**given, "slices": False}))
        assert {plan.mapping.kv for plan in blocks.ranking} == {"pack"}
    small = {**REQUEST, "block_q": 16, "block_kv": 16, "token_bits": True, "slices": True}
    ranking = defaults(name).lookup(Features(**small)).ranking
    assert {plan.mapping.kv for plan in ranking} == {"pack"}


# Masks of video models at head dim 96, where all generations have the same tiles.
@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize(
    ("block_q", "density", "expected"),
    [
        (16, 0.1, "q64k64 merge-pack"),
        (32, 0.1, "q64k64 merge-pack"),
        (32, 0.8, "q128k64 merge-pack"),
        (64, 0.1, "q64k64 retain-pack"),
        (64, 0.8, "q128k64 merge-pack"),
        (128, 0.1, "q128k64 retain-pack"),
        (192, 0.1, "q64k64 split-pack"),
        (384, 0.1, "q128k64 split-pack"),
    ],
)
def test_what_the_defaults_pick(name, block_q, density, expected):
    assert best(name, block_q=block_q, density=density, head_dim=96) == expected


@pytest.mark.parametrize("name", TABLES)
def test_large_heads_take_narrow_steps(name):
    assert best(name, head_dim=256, block_q=32) == "q64k32 merge-pack"
    assert best(name, head_dim=256) == "q64k32 retain-pack"
    assert best(name, head_dim=256, block_q=128) == "q64k32 split-pack"


@pytest.mark.parametrize("name", TABLES)
def test_ragged_blocks_are_not_merged_unless_two_are_sure_to_fit(name):
    assert best(name, head_dim=64, ragged=True, block_q=32) == "q64k64 merge-pack"
    assert best(name, head_dim=64, ragged=True, block_q=64) == "q64k64 retain-pack"
    assert best(name, head_dim=64, ragged=True, block_q=65) == "q64k64 split-pack"


@pytest.mark.parametrize(
    ("name", "head_dim", "expected"),
    [
        ("sm80", 64, "q128k128 retain-pack"),
        ("sm90", 64, "q128k128 retain-pack"),
        ("sm100", 64, "q128k64 retain-pack"),
        ("sm89", 64, "q128k64 retain-pack"),
        ("sm80", 128, "q128k64 retain-pack"),
        ("sm90", 128, "q128k64 retain-pack"),
        ("sm89", 128, "q128k32 retain-pack"),
        ("sm120", 128, "q128k32 retain-pack"),
    ],
)
def test_wide_blocks_take_the_widest_steps_that_fit(name, head_dim, expected):
    assert best(name, head_dim=head_dim, block_q=128) == expected


@pytest.mark.parametrize("name", TABLES)
def test_the_first_choice_of_small_blocks_leaves_room_for_a_second_cta(name):
    for arch, dim in product(archs_of(name), (64, 96, 128)):
        narrow = find(arch, "attend_mma", "bfloat16", dim, 64, 64, True)
        assert narrow.ctas_per_sm(ARCHS[arch]) >= 2, (arch, dim)
        assert best(name, head_dim=dim) == "q64k64 retain-pack"


@pytest.mark.parametrize(
    ("block_q", "expected"), [(16, "share"), (64, "share"), (128, "retain"), (192, "split")]
)
def test_hopper_has_its_own_kernel_first(block_q, expected):
    for dim, density in product((40, 64, 80, 96, 128), (0.1, 0.9)):
        changes = {"head_dim": dim, "block_q": block_q, "density": density}
        first = defaults("sm90").lookup(Features(**{**REQUEST, **changes})).ranking[0]
        if (block_q, dim <= 64) == (192, True):
            assert first.name == "attend_wgmma/q192k128/retain-pack/longest+split"
        else:
            assert first.name == f"attend_wgmma/q128k192/{expected}-pack/longest+split"


@pytest.mark.parametrize(
    ("block_q", "expected"),
    [
        (32, ["attend_mma/q64k64/merge-pack"]),
        (33, ["attend_wgmma/q128k192/share-pack", "attend_mma/q64k64/retain-pack"]),
        (64, ["attend_wgmma/q128k192/share-pack", "attend_mma/q64k64/retain-pack"]),
        (65, ["attend_wgmma/q128k192/retain-pack", "attend_mma/q64k64/split-pack"]),
        (128, ["attend_wgmma/q128k192/retain-pack", "attend_mma/q64k64/split-pack"]),
        (129, ["attend_wgmma/q128k192/split-pack", "attend_mma/q64k64/split-pack"]),
        (5000, ["attend_wgmma/q128k192/split-pack", "attend_mma/q64k64/split-pack"]),
    ],
)
def test_hopper_s_kernel_takes_ragged_blocks_too(block_q, expected):
    for dim, density in product((40, 64, 128), (0.1, 0.99)):
        changes = {"head_dim": dim, "block_q": block_q, "density": density, "ragged": True}
        ranking = defaults("sm90").lookup(Features(**{**REQUEST, **changes})).ranking
        assert [plan.name for plan in ranking[: len(expected)]] == [
            f"{name}/longest+split" for name in expected
        ]


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(
    ("times", "side"), [(1, "share"), (2, "retain"), (5, "split")], ids=["64", "128", "320"]
)
def test_the_best_plan_of_a_ragged_mask_is_eligible(dim, times, side):
    sizes = times * np.array([64, 0, 13, 51, 64])
    mask = BlockMask.from_dense(np.ones((5, 5), bool), (times * 64, 64), q_block_sizes=sizes)
    q, k = (ArraySpec((1, 1, tokens, dim), "bfloat16") for tokens in mask.shape)
    plan = make_plan(mask, q, k, regime=defaults("sm90"), arch="sm_90a")
    assert plan.spec.name == f"attend_wgmma/q128k192/{side}-pack/longest+split"
    assert plan.choice.passed_over == ()


@pytest.mark.parametrize("block_q", [16, 32, 64])
def test_three_warpgroups_take_dense_masks_of_short_head_dims(block_q):
    for dim, density in product((40, 64, 80, 128), (0.97, 0.98, 1.0)):
        changes = {"head_dim": dim, "block_q": block_q, "density": density}
        first = defaults("sm90").lookup(Features(**{**REQUEST, **changes})).ranking[0]
        assert (first.tile_q == 192) == (dim <= 64 and density >= 0.98)


@pytest.mark.parametrize("name", sorted(set(TABLES) - {"sm90"}))
def test_other_generations_do_not_name_hopper_s_kernel(name):
    assert {plan.kernel for plan in defaults(name).plans()} == {"attend_mma"}
