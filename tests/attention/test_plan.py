"""Plans: one geometry, one architecture, one mask; what they run, refuse and say of themselves."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tessera_cupy import (
    ArraySpec,
    BlockMask,
    PlanNotEligibleError,
    PlanSpec,
    Table,
    block_sparse_attention,
    interop,
    make_plan,
)
from tessera_cupy.kernels import launch
from tessera_cupy.kernels.arch import ARCHS, Arch
from tessera_cupy.kernels.catalog import catalog
from tessera_cupy.organization import DeviceModel
from tessera_cupy.regimes import load_for

MASK = BlockMask.from_dense([[1, 0, 1], [0, 1, 1]], (64, 64), (100, 150))
SPEC = ArraySpec((1, 4, 100, 64), "float16")


def ranking(*plans: str) -> Table:
    """A table with these plans for every request."""
    specs = tuple(PlanSpec.parse(f"attend_mma/{plan}") for plan in plans)
    return Table(replace(load_for("sm89").document, base=specs, keys=(), reasoned=()))


def test_a_plan_runs_any_arrays_of_its_geometry(case: Any) -> None:
    plan = make_plan(
        MASK, ArraySpec((2, 4, 100, 64), "float32"), ArraySpec((2, 2, 150, 64), "float32")
    )
    for seed in range(2):
        case_ = case(MASK, batch=2, kv_heads=2, shared=2, rng=np.random.default_rng(seed))
        out, lse = plan.run(*case_.arrays, return_lse=True)
        case_.check(out, lse)
    out = np.full(case_.q.shape, np.nan, np.float32)
    assert plan.run(*case_.arrays, out=out) is out
    case_.check(out, lse)
    scaled = replace(case_, sm_scale=-0.5)
    scaled.check(*plan.run(*case_.arrays, sm_scale=-0.5, return_lse=True))


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"batch": 2}, ("batch 1", "batch 2")),
        ({"kv_heads": 4}, ("q_heads 2", "q_heads 4")),
        ({"kv_heads": 1}, ("q_heads 2", "q_heads 1")),
        ({"kv_heads": 1, "shared": 2}, ("kv_heads 2", "kv_heads 1")),
        ({"dim": 72}, ("head_dim 64", "head_dim 72")),
        ({"dtype": "bfloat16"}, ("dtype float32", "dtype bfloat16")),
    ],
)
def test_arrays_of_another_geometry_are_refused(case: Any, change: Any, parts: Any) -> None:
    plan = make_plan(MASK, *case(MASK, kv_heads=2).arrays)
    other = case(MASK, **({"kv_heads": 2} | change))
    with pytest.raises(ValueError, match="make a new plan") as caught:
        plan.run(*other.arrays)
    for part in parts:
        assert part in str(caught.value)


def test_another_number_of_heads_is_not_the_plans(case: Any) -> None:
    """Three query heads over two KV heads: no advice to repeat these, which would not help."""
    q, k, v = case(MASK, kv_heads=2).arrays
    plan = make_plan(MASK, q, k, v)
    expected = r"^`q`: expected the plan's 2 heads, got {} heads\. Fix: make a new plan\.$"
    for heads in (1, 3):
        wrong = np.resize(q, (q.shape[0], heads, *q.shape[2:]))
        with pytest.raises(ValueError, match=expected.format(heads)):
            plan.run(wrong, k, v)
    with pytest.raises(ValueError, match=r"^`k`: expected the plan's 2 heads, got 0 heads"):
        plan.run(q, k[:, :0], v[:, :0])
    # Other arrays are refused as ever.
    with pytest.raises(ValueError, match=r"^`v`: expected k's shape"):
        plan.run(q, k, v[:, :1])


def test_arrays_of_another_length_or_layout_are_refused(case: Any) -> None:
    plan = make_plan(MASK, *case(MASK, kv_heads=2).arrays)
    square = BlockMask.from_dense(np.ones((2, 2), bool), (64, 64), (100, 100))
    with pytest.raises(ValueError, match=r"`mask`.*2 query and 2 key"):
        make_plan(square, *case(square, kv_heads=2).arrays).run(
            *case(square, kv_heads=2, layout="BSHD").arrays
        )
    longer = BlockMask.from_dense(np.ones((2, 3), bool), (64, 64), (101, 150))
    with pytest.raises(ValueError, match=r"101 query.*100 query"):
        plan.run(*case(longer, kv_heads=2).arrays)


def test_the_plan_carries_its_geometry() -> None:
    for name in ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a"):
        plan = make_plan(MASK, SPEC, arch=name)
        assert plan.config.arch == plan.request.arch.name == name
        shape = plan.tiles().shape
        assert (shape.q, shape.kv) == (plan.config.tile_q, plan.config.tile_kv)
        assert (shape.q, shape.kv) == (plan.spec.tile_q, plan.spec.tile_kv)
        assert plan.config in catalog(name)
        assert plan.spec.name in repr(plan)
        assert name in repr(plan)


def test_host_arrays_run_a_plan_for_any_architecture(case: Any) -> None:
    case_ = case(MASK, kv_heads=2)
    for arch in ARCHS:
        plan = make_plan(MASK, *case_.arrays, arch=arch)
        case_.check(*plan.run(*case_.arrays, return_lse=True))


def test_unknown_architectures_are_named() -> None:
    with pytest.raises(ValueError, match=r"`arch`.*sm_90a.*'sm_61'"):
        make_plan(MASK, SPEC, arch="sm_61")
    assert make_plan(MASK, SPEC, arch="sm_90").request.arch.name == "sm_90a"


class Tensor:
    """Looks like a float16 tensor of torch on a GPU that nobody has."""

    def __init__(self, shape: tuple[int, ...], index: int = 0, pointer: int = 256) -> None:
        self.shape = shape
        self.dtype = "torch.float16"
        self.device = SimpleNamespace(type="cuda", index=index)
        self.requires_grad = False
        self.pointer = pointer
        self.strides = tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape)))

    def data_ptr(self) -> int:
        return self.pointer

    def stride(self) -> tuple[int, ...]:
        return self.strides


Tensor.__module__ = "torch"
Q, K = Tensor((1, 4, 100, 64)), Tensor((1, 2, 150, 64))
#: What is known of a plan in GPU memory before it is launched.
UPLOADED = SimpleNamespace(slot_log2=4)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Pretend that every GPU is of an architecture."""

    def pretend(name: str) -> None:
        monkeypatch.setattr("tessera_cupy.gpus.arch_of", lambda device: ARCHS[name])

    model = DeviceModel(sms=1, ctas_per_sm=1, l2_bytes=1)
    monkeypatch.setattr("tessera_cupy.gpus.model_of", lambda config, arch, device: model)
    return pretend


def test_a_plan_for_another_architecture_is_refused(gpus: Any) -> None:
    plan = make_plan(MASK, SPEC, ArraySpec(K.shape, "float16"), arch="sm_80")
    gpus("sm_90a")
    with pytest.raises(PlanNotEligibleError, match=r"GPU of sm_80.*GPU of sm_90a"):
        plan.run(Q, K, K)


def test_gpu_arrays_are_planned_for_their_gpu(gpus: Any) -> None:
    for name in ("sm_80", "sm_89"):
        gpus(name)
        assert make_plan(MASK, Q, K, K).request.arch.name == name
        assert make_plan(MASK, Q, K, K, arch="sm_120a").request.arch.name == "sm_120a"


def test_arrays_on_two_gpus_are_refused(gpus: Any) -> None:
    gpus("sm_80")
    elsewhere = Tensor(K.shape, index=1)
    for arrays, name in (((Q, elsewhere, K), "k"), ((Q, K, elsewhere), "v")):
        with pytest.raises(ValueError, match=rf"`{name}`.*q's device 0.*device 1"):
            block_sparse_attention(*arrays, MASK)
    with pytest.raises(ValueError, match=r"`out`.*q's device 0.*device 1"):
        block_sparse_attention(Q, K, K, MASK, out=Tensor(Q.shape, index=1))


def test_host_and_gpu_arrays_are_not_mixed(gpus: Any) -> None:
    gpus("sm_80")
    host = np.zeros(K.shape, np.float16)
    for arrays in ((Q, host, K), (Q, K, host)):
        with pytest.raises(ValueError, match="GPU memory"):
            block_sparse_attention(*arrays, MASK)


def test_a_mask_from_another_gpu_is_refused(gpus: Any) -> None:
    gpus("sm_80")
    with pytest.raises(ValueError, match=r"`mask`.*device 0.*device 1"):
        block_sparse_attention(Q, K, K, replace(MASK, device=1))


def test_out_that_16_byte_stores_cannot_reach_is_refused(gpus: Any) -> None:
    gpus("sm_80")
    turned = Tensor(Q.shape)
    turned.strides = (25600, 6400, 1, 100)
    backwards = Tensor(Q.shape)
    backwards.strides = (25600, 6400, -64, 1)
    for out in (Tensor(Q.shape, pointer=258), turned, backwards):
        with pytest.raises(ValueError, match=r"`out`.*16-byte aligned"):
            block_sparse_attention(Q, K, K, MASK, out=out)


@pytest.mark.parametrize(
    "strides",
    [(25600, 0, 64, 1), (0, 0, 64, 1), (25600, 6400, 0, 1), (25600, 3200, 64, 1), (320, 64, 64, 1)],
)
def test_out_whose_elements_share_memory_is_refused(gpus: Any, strides: tuple[int, ...]) -> None:
    gpus("sm_80")
    out = Tensor(Q.shape, pointer=1 << 20)
    out.strides = strides
    with pytest.raises(ValueError, match=r"`out`.*elements that share it.*allocate it like q"):
        block_sparse_attention(Q, K, K, MASK, out=out)


def test_out_in_the_memory_of_the_inputs_is_refused(
    gpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus("sm_80")
    monkeypatch.setattr(interop, "on_stream", lambda *args: nullcontext())
    monkeypatch.setattr(launch, "upload", lambda tiles, tasks, **kernels: UPLOADED)
    monkeypatch.setattr(launch, "attend", lambda *args: None)
    q, k, v = (
        Tensor(shape, pointer=1 << 20 + i) for i, shape in enumerate((Q.shape, K.shape, K.shape))
    )
    plan = make_plan(MASK, q, k, v)
    for moved, name in ((q, "q"), (k, "k"), (v, "v")):
        out = Tensor(Q.shape, pointer=moved.pointer + 128)
        with pytest.raises(ValueError, match=rf"`out`.*memory that {name} uses"):
            plan.run(q, k, v, out=out)
    assert plan.run(q, k, v, out=q) is q
    elsewhere = Tensor(Q.shape, pointer=1 << 19)
    assert plan.run(q, k, v, out=elsewhere) is elsewhere


def test_a_capture_before_the_first_run_is_refused_before_anything_is_allocated(
    gpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus("sm_80")
    capturing = SimpleNamespace(is_capturing=lambda: True)
    cupy = SimpleNamespace(cuda=SimpleNamespace(get_current_stream=lambda: capturing))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(interop, "on_stream", lambda *args: nullcontext())
    monkeypatch.setattr(interop, "empty", None)
    monkeypatch.setattr(interop, "aligned", None)
    with pytest.raises(ValueError, match=r"`stream`.*run the plan once before capturing"):
        make_plan(MASK, Q, K, K).run(Q, K, K)


def test_all_that_touches_memory_happens_on_the_stream(
    gpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus("sm_80")
    current: list[Any] = []
    called = []

    @contextmanager
    def on_stream(stream: Any, arrays: Any, device: int) -> Iterator[None]:
        assert (arrays, device) == ((Q, K, K), 0)
        current.append(stream)
        yield
        current.pop()

    def watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            assert current == ["a stream"], name
            called.append(name)
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(interop, "on_stream", on_stream)
    monkeypatch.setattr(interop, "empty", lambda like, shape, dtype: Tensor(shape))
    monkeypatch.setattr(launch, "upload", lambda tiles, tasks, **kernels: UPLOADED)
    monkeypatch.setattr(launch, "attend", lambda *args: None)
    names = {
        interop: ("empty", "device_operand", "aligned", "returned"),
        launch: ("upload", "attend"),
    }
    for module, functions in names.items():
        for name in functions:
            monkeypatch.setattr(module, name, watched(name, getattr(module, name)))
    out, lse = block_sparse_attention(Q, K, K, MASK, return_lse=True, stream="a stream")
    assert (out.shape, lse.shape) == (Q.shape, Q.shape[:3])
    assert {name for functions in names.values() for name in functions} == set(called)


def test_copies_are_handed_on_with_the_launch(gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # A captured launch needs them for as long as its plan.
    gpus("sm_80")
    turned, copy = Tensor(K.shape, pointer=258), Tensor(K.shape)
    copies = {id(turned): copy}
    launched: list[Any] = []

    def aligned(operand: interop.Operand) -> interop.Operand:
        owner = copies.get(id(operand.owner))
        return operand if owner is None else interop.device_operand(owner, "copy")

    monkeypatch.setattr(interop, "on_stream", lambda *args: nullcontext())
    monkeypatch.setattr(interop, "empty", lambda like, shape, dtype: Tensor(shape))
    monkeypatch.setattr(interop, "aligned", aligned)
    monkeypatch.setattr(launch, "upload", lambda tiles, tasks, **kernels: UPLOADED)
    monkeypatch.setattr(launch, "attend", lambda *args: launched.append(args[-1]))
    for arrays in ((Q, K, K), (Q, turned, K), (Q, K, turned)):
        block_sparse_attention(*arrays, MASK)
    assert launched == [[], [copy], [copy]]


def test_float32_is_refused_on_a_gpu(gpus: Any) -> None:
    gpus("sm_80")
    q = Tensor(Q.shape)
    q.dtype = "torch.float32"
    with pytest.raises(TypeError, match=r"float16 or bfloat16, got float32"):
        block_sparse_attention(q, q, q, MASK)
    with pytest.raises(TypeError, match=r"float16 or bfloat16, got float32"):
        make_plan(MASK, q)


@pytest.mark.parametrize("tokens", [(100, 0), (0, 150)])
def test_kernels_that_need_a_token_are_passed_over_without_one(tokens: tuple[int, int]) -> None:
    blocks = np.ones([-(-n // 64) for n in tokens], bool)
    mask = BlockMask.from_dense(blocks, (64, 64), tokens)
    spec = ArraySpec((1, 2, tokens[0], 64))
    plan = make_plan(mask, spec, arch="sm_90a")
    assert plan.spec.kernel == "attend_mma"
    with pytest.raises(PlanNotEligibleError, match="at least one query and one key"):
        make_plan(mask, spec, regime="attend_wgmma/q128k192/retain-pack/rows", arch="sm_90a")


def test_kernels_that_load_neighbouring_rows_are_not_given_others() -> None:
    mask = BlockMask.from_dense(np.ones((4, 3), bool), (32, 64))
    spec = ArraySpec((1, 4, 128, 64), "float16")
    with pytest.raises(PlanNotEligibleError, match="loads neighbouring query rows only"):
        make_plan(mask, spec, regime="attend_mma/q64k64/regroup-pack/rows")
    plan = make_plan(mask, spec, regime="attend_wgmma/q128k192/regroup-pack/rows", arch="sm_90a")
    assert plan.tiles().tile_units is not None


def test_a_gpu_with_too_little_shared_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    small: Arch = replace(ARCHS["sm_89"], smem_block=16 << 10)
    monkeypatch.setattr("tessera_cupy.attention.get_arch", lambda name: small)
    with pytest.raises(PlanNotEligibleError, match=r"bytes of shared memory.*allows 16384"):
        make_plan(MASK, SPEC)


def test_where_the_first_choice_does_not_fit_a_smaller_tile_is_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = ArraySpec((1, 1, 256, 128), "float16")
    mask = BlockMask.from_dense(np.ones((2, 2), bool), (128, 128))
    document = load_for("sm89").document
    reasoned = Table(replace(document, keys=document.reasoned, reasoned=()))
    usual = make_plan(mask, spec, arch="sm_89", regime=reasoned)
    limit = usual.config.smem_bytes - 1
    small: Arch = replace(ARCHS["sm_89"], smem_block=limit)
    monkeypatch.setattr("tessera_cupy.attention.get_arch", lambda name: small)
    plan = make_plan(mask, spec, arch="sm_89", regime=reasoned)
    assert plan.config.smem_bytes <= limit
    assert plan.choice.passed_over[0][0] == usual.spec.name
    assert "shared memory" in plan.choice.passed_over[0][1]


def test_update_takes_new_contents(case: Any) -> None:
    case_ = case(MASK, kv_heads=2, shared=2)
    plan = make_plan(MASK, *case_.arrays)
    before = plan.run(*case_.arrays)
    new = BlockMask.from_dense([[0, 1, 1], [1, 0, 0]], (64, 64), (100, 150))
    updated = plan.update(new)
    assert (updated.spec, updated.request, updated.choice) == (
        plan.spec, plan.request, plan.choice
    )  # fmt: skip
    assert updated.mask is new
    other = replace(case_, mask=new)
    other.check(*updated.run(*case_.arrays, return_lse=True))
    np.testing.assert_array_equal(plan.run(*case_.arrays), before)


def test_update_may_change_axes_and_token_bits(case: Any) -> None:
    case_ = case(MASK, kv_heads=2)
    plan = make_plan(MASK, *case_.arrays, arch="sm_80")
    per_head = BlockMask.from_dense(
        np.tri(3, dtype=bool)[None, 1:].repeat(2, 0), (64, 64), (100, 150)
    )
    rng = np.random.default_rng(0)
    tokens = BlockMask.from_tokens(rng.random((100, 150)) < 0.5, (64, 64))
    for mask in (per_head, tokens):
        updated = plan.update(mask)
        assert updated.config.bits == (mask is tokens)
        replace(case_, mask=mask).check(*updated.run(*case_.arrays, return_lse=True))


def test_update_refuses_what_the_plan_cannot_serve() -> None:
    plan = make_plan(MASK, SPEC)
    with pytest.raises(ValueError, match=r"100 query and 150 key.*128 query"):
        plan.update(BlockMask.from_dense(np.ones((2, 2), bool), (64, 64)))
    pinned = make_plan(MASK, SPEC, regime="attend_mma/q64k64/retain-retain/rows")
    coarse = BlockMask.from_dense(np.ones((1, 2), bool), (128, 128), (100, 150))
    with pytest.raises(PlanNotEligibleError, match="at most 64 rows"):
        pinned.update(coarse)
    with pytest.raises(TypeError, match="BlockMask"):
        plan.update(np.ones((2, 3), bool))  # type: ignore[arg-type]


def test_plans_passed_over_are_kept_with_the_reason() -> None:
    ranked = ranking(
        "q64k64/merge-pack/rows",
        "q192k64/retain-pack/rows",
        "q64k64/retain-pack/runs",
        "q64k64/split-pack/rows",
    )
    plan = make_plan(MASK, SPEC, regime=ranked, arch="sm_89")
    assert plan.spec.name == "attend_mma/q64k64/retain-pack/runs"
    names = [name for name, _ in plan.choice.passed_over]
    assert names == [
        "attend_mma/q64k64/merge-pack/rows",
        "attend_mma/q192k64/retain-pack/rows",
    ]
    assert "two query blocks" in plan.choice.passed_over[0][1]
    assert "no attend_mma kernel" in plan.choice.passed_over[1][1]
    text = plan.explain()
    for place, (name, reason) in enumerate(plan.choice.passed_over, 1):
        assert f" {place}. {name}: passed over, since {reason}" in text
    assert f" 3. {plan.spec.name}: this plan" in text


def test_a_table_without_a_plan_for_the_request_says_why() -> None:
    ranked = ranking("q192k192/retain-pack/rows", "q192k192/split-pack/rows")
    with pytest.raises(PlanNotEligibleError, match="no attend_mma kernel") as caught:
        make_plan(MASK, SPEC, regime=ranked, arch="sm_89")
    for spec in ranked.plans():
        assert spec.name in str(caught.value)


def test_the_regime_is_the_tables_choice() -> None:
    plan = make_plan(MASK, SPEC)
    assert plan.choice.regime.startswith("sm90 ")
    assert plan.spec in load_for("sm90").plans()
    pinned = make_plan(MASK, SPEC, regime=plan.spec)
    assert pinned.choice.regime == "given by the caller"
    assert pinned.choice.passed_over == ()
    assert pinned.spec == plan.spec


def test_summary_by_hand() -> None:
    # One tile a block; both have one block of 64 keys; four heads share the mask.
    mask = BlockMask.from_dense(np.eye(2, dtype=bool), (64, 64))
    name = "attend_mma/q64k64/retain-pack/rows"
    plan = make_plan(mask, ArraySpec((1, 4, 128, 64), "bfloat16"), regime=name, arch="sm_80")
    s = plan.summary()
    assert json.loads(json.dumps(s)) == s
    assert (s["name"], s["arch"], s["regime"]) == (name, "sm_80", "given by the caller")
    assert (s["tiles"], s["steps"], s["fragments"], s["fragment_columns"]) == (2, 2, 2, 64)
    assert (s["tasks"], s["split_tiles"], s["useful_fraction"]) == (8, 0, 1.0)
    assert s["mask"] == {
        "block_size": [64, 64], "heads": 1, "active_blocks": 2, "density": 0.5,
        "run_coverage": 0.0,
    }  # fmt: skip
    assert s["flops"] == s["issued_flops"] == 4 * 64 * (2 * 64 * 64) * 4
    assert s["bytes"]["kv_loaded"] == 4 * 2 * (2 * 64) * 128
    assert s["bytes"]["q_and_o"] == 2 * 4 * 128 * 128
    assert s["bytes"]["workspace"] == 0
    assert s["kernel"]["threads"] == 32 * plan.config.warps
    assert s["kernel"]["smem_bytes"] == plan.config.smem_bytes


def test_a_summary_holds_plain_values_only() -> None:
    mask = BlockMask.from_dense(np.array([[1, 1, 0], [0, 1, 1]]), (64, 64), (100, 150))
    assert mask.run_coverage() == 1.0

    def check(value: Any) -> None:
        if isinstance(value, dict):
            value = [*value, *value.values()]
        if isinstance(value, (list, tuple)):
            for item in value:
                check(item)
        else:
            assert type(value) in (str, int, float, bool, type(None)), value

    check(make_plan(mask, SPEC).summary())


def test_the_workspace_of_split_tiles_is_counted() -> None:
    mask = BlockMask.from_dense(np.ones((1, 64), bool), (64, 64))
    name = "attend_mma/q64k64/retain-pack/split"
    plan = make_plan(mask, ArraySpec((1, 1, 64, 64)), regime=name)
    slots = plan.tasks().slots
    assert slots > 1
    s = plan.summary()
    assert s["split_tiles"] == 1
    assert s["tasks"] == slots
    assert s["bytes"]["workspace"] == 4 * slots * 64 * (64 + 2)


@pytest.mark.parametrize(
    "name",
    [
        "attend_mma/q128k64/merge-merge/runs+longest+alternate+split",
        "attend_wgmma/q128k192/share-pack/rows",
        "attend_mma/q64k32/retain-split/longest",
    ],
)
def test_explain_names_every_part(name: str) -> None:
    block = (64, 32) if "merge-merge" in name else (64, 64)
    mask = BlockMask.from_dense(np.ones((2, 150 // block[1] + 1), bool), block, (100, 150))
    plan = make_plan(mask, SPEC, regime=name)
    text = plan.explain()
    for part in (
        name, "sm_90a", "given by the caller", "heads 4 over 4", "100 x 150", "head dim 64",
        "float16", "BHSD", f"Q {plan.spec.mapping.q}:", f"KV {plan.spec.mapping.kv}:",
        plan.spec.organization.name, plan.config.name, plan.config.why,
    ):  # fmt: skip
        assert part in text
    assert isinstance(plan.spec, PlanSpec)


def test_planning_leaves_the_mapping_for_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tessera_cupy.prepared.map_mask", None)
    plan = make_plan(MASK, SPEC)
    with pytest.raises(TypeError):
        plan.tiles()


def test_a_dtype_without_kernels_is_planned_as_if_it_were_float16() -> None:
    spec = ArraySpec((1, 4, 100, 64), "float32")
    text = make_plan(MASK, spec, ArraySpec((1, 2, 150, 64), "float32"), arch="sm_90a").explain()
    kernel, runs_on = (row for row in text.splitlines() if row.startswith(("kernel ", "runs on ")))
    assert " (as if float16): " in kernel
    assert "the CPU, since no kernel takes float32" in runs_on
    text = make_plan(MASK, SPEC, ArraySpec(K.shape, "float16"), arch="sm_90a").explain()
    assert "as if" not in text
