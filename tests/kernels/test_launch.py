"""What launches hand to kernels, worked out by hand, on a GPU that is played."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tessera_cupy import ArraySpec, BlockMask, make_plan
from tessera_cupy.kernels import catalog, launch, tensor_maps
from tessera_cupy.plan import Plan

# Query blocks 0 and 2 have one list, 1 and 3 another.
ALIKE = BlockMask.from_dense([[1, 0, 1], [0, 1, 0], [1, 0, 1], [0, 1, 0], [1, 0, 0]], (64, 64))
LONG = BlockMask.from_dense(np.ones((1, 64), bool), (64, 64))
BITS = BlockMask.from_tokens(np.tri(128, dtype=bool), (64, 64))


class Array(np.ndarray[Any, Any]):
    """A NumPy array that stands for one in GPU memory."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data)


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    """As much of CuPy as uploads and launches touch."""
    stream = SimpleNamespace(ptr=1, synchronize=lambda: None, is_capturing=lambda: False)
    fake = SimpleNamespace(
        asarray=lambda x: np.array(x).view(Array),
        empty=lambda shape, dtype: np.empty(shape, dtype).view(Array),
        cuda=SimpleNamespace(get_current_stream=lambda: stream),
    )
    monkeypatch.setitem(sys.modules, "cupy", fake)
    return fake


def plan(mask: BlockMask, regime: str, *, heads: int = 1, arch: str = "sm_90a") -> Plan:
    q, k = (ArraySpec((1, heads, tokens, 128)) for tokens in mask.shape)
    return make_plan(mask, q, k, regime=regime, arch=arch)


# The packed arrays


def test_a_task_of_a_regrouped_plan_points_at_its_tiles_units() -> None:
    made = plan(ALIKE, "attend_wgmma/q128k192/regroup-pack/rows", heads=2)
    packed = launch.packed_tasks(made.tiles(), made.tasks())
    assert packed.dtype.itemsize == 48
    # Tiles of blocks 0 and 2, of 1 and 3, and of 4 alone; each has 8 units of 16 rows. Steps have
    # three fragments, and lists are padded to whole ones.
    assert packed["head"].tolist() == [0, 0, 0, 1, 1, 1]
    assert packed["first_row"].tolist() == [0, 64, 256] * 2
    assert packed["rows"].tolist() == [128, 128, 64] * 2
    assert packed["units"].tolist() == [0, 8, 16] * 2
    assert packed["frag_begin"].tolist() == [0, 3, 6] * 2
    assert packed["frag_count"].tolist() == [3, 3, 3] * 2
    assert packed["begin"].tolist() == [0] * 6
    assert packed["end"].tolist() == [1] * 6
    assert packed["slot"].tolist() == [-1] * 6
    assert packed["flags"].tolist() == [0] * 6


def test_a_task_of_a_tile_of_halves_has_both_numbers_of_rows() -> None:
    mask = BlockMask.from_dense(np.ones((5, 3), bool), (64, 64), q_block_sizes=[40, 64, 0, 17, 3])
    made = plan(mask, "attend_wgmma/q128k192/share-pack/rows")
    packed = launch.packed_tasks(made.tiles(), made.tasks())
    assert packed["first_row"].tolist() == [0, 104, 121]
    words = [104 + 41 * 65536, 17 + 1 * 65536, 3 + 4 * 65536]
    assert packed["rows"].tolist() == words
    assert launch.tile_words(made.tiles()).tolist() == [
        [0, words[0]],
        [104, words[1]],
        [121, words[2]],
    ]
    whole = plan(ALIKE, "attend_wgmma/q128k192/share-pack/rows").tiles()
    assert launch.tile_words(whole) is whole.tile_q


def test_a_task_of_a_split_plan_has_its_steps_and_its_slot() -> None:
    made = plan(LONG, "attend_mma/q64k64/retain-pack/alternate+split", arch="sm_80")
    tasks = made.tasks()
    packed = launch.packed_tasks(made.tiles(), tasks)
    parts = len(packed)
    assert parts > 1
    order = np.argsort(packed["begin"])
    assert packed["begin"][order][0] == 0
    assert packed["end"][order][-1] == 64
    assert packed["begin"][order][1:].tolist() == packed["end"][order][:-1].tolist()
    assert packed["slot"][order].tolist() == list(range(parts))
    assert packed["flags"].tolist() == tasks.task_reverse.astype(int).tolist()
    assert packed["flags"].any()
    assert packed["units"].tolist() == [-1] * parts
    for name, value in (("first_row", 0), ("rows", 64), ("frag_begin", 0), ("frag_count", 64)):
        assert packed[name].tolist() == [value] * parts


@pytest.mark.parametrize(
    ("mask", "regime", "arch"),
    [
        (ALIKE, "attend_wgmma/q128k192/regroup-pack/longest", "sm_90a"),
        (ALIKE, "attend_wgmma/q128k192/share-pack/longest", "sm_90a"),
        (LONG, "attend_mma/q64k64/retain-pack/split", "sm_80"),
        (BITS, "attend_mma/q64k64/retain-pack/longest", "sm_80"),
    ],
    ids=["units", "plain", "split", "bits"],
)
def test_a_summary_has_the_bytes_that_are_uploaded(
    mask: BlockMask, regime: str, arch: str, cupy: Any
) -> None:
    made = plan(mask, regime, arch=arch)
    uploaded = launch.upload(made.tiles(), made.tasks(), bits=made.config.bits)
    assert uploaded.tasks.nbytes == 48 * len(made.tasks())
    assert uploaded.fragments.nbytes == 8 * len(made.tiles().frag_start)
    assert made.summary()["bytes"]["plan"] == uploaded.nbytes


# Launches


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """(kernel, grid, block, params) of each launch; tensor maps are told apart by their bytes."""
    done: list[tuple[Any, ...]] = []

    def load(config: Any, device: int) -> Any:
        def kernel(grid: Any, block: Any, args: Any, shared_mem: int = 0) -> None:
            done.append((config.kernel, grid, block, args[0]))

        return kernel

    monkeypatch.setattr(launch, "load", load)
    monkeypatch.setattr(
        tensor_maps,
        "encode",
        lambda pointer, dtype, sizes, strides, box: np.frombuffer(
            np.array([pointer, len(sizes), *sizes, *box] + [0] * 16, np.uint64)[:16].tobytes(),
            tensor_maps.TENSOR_MAP,
        )[0],
    )
    return done


def attend(
    made: Plan,
    capacity: int,
    *,
    pointers: dict[str, int],
    v_batch_stride: int | None = None,
    times: int = 0,
) -> None:
    r = made.request
    operands = {}
    for name, heads, rows in (
        ("q", r.q_heads, r.sq),
        ("k", r.kv_heads, r.skv),
        ("v", r.kv_heads, r.skv),
        ("o", r.q_heads, r.sq),
    ):
        head = rows * r.head_dim
        batch = v_batch_stride if name == "v" and v_batch_stride else heads * head
        operands[name] = launch.Tensor(pointers[name], (batch, head, r.head_dim))
    uploaded = launch.upload(made.tiles(), made.tasks(), bits=made.config.bits)
    packed = launch.pack(
        made.config,
        *operands.values(),
        launch.Geometry(
            batch=r.batch,
            q_heads=r.q_heads,
            kv_heads=r.kv_heads,
            sq=r.sq,
            skv=r.skv,
            head_dim=r.head_dim,
            dtype=r.dtype,
            sm_scale=0.125,
            capacity=capacity,
            device=0,
        ),
        uploaded.slot_log2,
    )
    launch.attend(packed, uploaded, 0, times=times)


POINTERS = {"q": 1 << 20, "k": 2 << 20, "v": 3 << 20, "o": 4 << 20}


@pytest.mark.parametrize(("capacity", "grid"), [(132, 6), (6, 6), (4, 4)])
def test_ctas_that_take_several_tasks_are_no_more_than_tasks_or_places(
    capacity: int, grid: int, cupy: Any, launched: list[tuple[Any, ...]]
) -> None:
    made = plan(ALIKE, "attend_wgmma/q128k192/regroup-pack/rows", heads=2)
    attend(made, capacity, pointers=POINTERS)
    ((kernel, got, block, params),) = launched
    assert (kernel, got, block) == ("attend_wgmma", (grid,), (384,))
    assert params.view(launch.WGMMA_PARAMS)["task_count"].item() == len(made.tasks()) == 6


def test_a_cta_of_the_other_kernel_takes_one_task(
    cupy: Any, launched: list[tuple[Any, ...]]
) -> None:
    made = plan(LONG, "attend_mma/q64k64/retain-pack/split", arch="sm_80")
    attend(made, 3, pointers=POINTERS)
    assert len(made.tasks()) > 3
    assert launched[0][:2] == ("attend_mma", (len(made.tasks()),))
    assert launched[1][:2] == ("merge_splits", (1, 64 // launch.MERGE_WARPS))


@pytest.mark.parametrize(
    ("regime", "arch", "size"),
    [
        ("attend_wgmma/q128k192/regroup-pack/rows", "sm_90a", 960),
        ("attend_mma/q64k64/retain-pack/rows", "sm_80", launch.ATTEND_PARAMS.itemsize + 8),
    ],
)
def test_a_kernel_that_keeps_time_is_passed_where_to(
    regime: str, arch: str, size: int, cupy: Any, launched: list[tuple[Any, ...]]
) -> None:
    made = plan(ALIKE, regime, arch=arch)
    attend(made, 132, pointers=POINTERS)
    attend(made, 132, pointers=POINTERS, times=12345)
    (_, grid, block, params), timed = launched
    assert timed[1:3] == (grid, block)
    packed = timed[3].tobytes()
    assert len(packed) == size
    behind = len(params.tobytes())
    assert packed[behind : behind + 8] == (12345).to_bytes(8, "little")
    # Arrays of the two uploads aside, they are the same.
    dtype = launch.WGMMA_PARAMS if "wgmma" in regime else launch.ATTEND_PARAMS
    first, second = (np.frombuffer(x[:behind], dtype) for x in (params.tobytes(), packed))
    assert dtype.names is not None
    for name in set(dtype.names) - {"tasks", "frags", "units", "frag_bits", "bits"}:
        assert first[name].tobytes() == second[name].tobytes(), name


@pytest.mark.parametrize(
    ("skv", "v_batch_stride", "whole"),
    [(1004, None, 1000), (1000, None, 1000), (1004, 3 * 1004 * 128, 0), (60, None, 0)],
    ids=["tail", "whole groups", "batches apart", "shorter than a fragment"],
)
def test_rows_that_whole_fragments_reach(
    skv: int, v_batch_stride: int | None, whole: int, cupy: Any, launched: list[tuple[Any, ...]]
) -> None:
    mask = BlockMask.from_dense(np.ones((2, -(-skv // 64)), bool), (64, 64), (128, skv))
    q, k = (ArraySpec((2, 2, tokens, 128)) for tokens in mask.shape)
    made = make_plan(mask, q, k, regime="attend_wgmma/q128k192/share-pack/rows", arch="sm_90a")
    attend(made, 132, pointers=POINTERS, v_batch_stride=v_batch_stride)
    params = launched[0][3].view(launch.WGMMA_PARAMS)
    assert params["whole_rows"].item() == whole

    def words(name: str) -> list[int]:
        return [int(x) for x in np.frombuffer(params[name].tobytes(), np.uint64)]

    slab, batch_and_heads = 64, 2 * 2
    sizes = (slab, 16, 2, skv // 8, batch_and_heads)  # of groups of 8 rows with the next 8
    for name, pointer in (("k_fragment", POINTERS["k"]), ("v_fragment", POINTERS["v"])):
        # Box: a fragment of 64 rows in 8 groups of 8, in 2 slabs of 64 columns.
        expected = [pointer, 5, *sizes, slab, 8, 2, 8, 1, 0, 0, 0, 0] if whole else [0] * 16
        assert words(name) == expected
    for name in ("q", "k_rows", "v_rows"):
        pointer, rows, box = (
            POINTERS[name[0]],
            128 if name == "q" else skv,
            16 if name == "q" else 8,
        )
        assert words(name)[:10] == [pointer, 4, 128, rows, 2, 2, slab, box, 1, 1]


# Loading


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths of the modules that are loaded; functions are bare."""
    paths: list[str] = []

    class RawModule:
        def __init__(self, *, path: str) -> None:
            paths.append(path)

        def get_function(self, name: str) -> Any:
            return SimpleNamespace(name=name)

    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(RawModule=RawModule))
    monkeypatch.setattr(launch, "_loaded", {})
    found = SimpleNamespace(get=lambda config: f"{config.arch}/{config.name}")
    monkeypatch.setattr(launch, "default_cache", lambda: found)
    return paths


def test_a_kernel_is_loaded_once_for_each_device(modules: list[str]) -> None:
    config = catalog.find("sm_90a", "attend_wgmma", "bfloat16", 128, 128, 192, bits=False)
    assert config is not None
    first = launch.load(config, 0)
    assert launch.load(config, 0) is first
    assert launch.load(config, 1) is not first
    assert modules == [f"sm_90a/{config.name}"] * 2
    assert first.name == "attend"


def test_only_more_than_48_kib_of_shared_memory_is_asked_for(
    modules: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def limit(smem: int) -> int | None:
        config = replace(catalog.catalog("sm_80")[0], why=str(smem))
        monkeypatch.setattr(type(config), "smem_bytes", property(lambda self: int(self.why)))
        monkeypatch.setattr(launch, "_loaded", {})
        return getattr(launch.load(config, 0), "max_dynamic_shared_size_bytes", None)

    assert limit(48 * 1024) is None
    assert limit(48 * 1024 + 16) == 48 * 1024 + 16
    assert limit(227 * 1024) == 227 * 1024


def test_rows_of_keys_get_all_shared_memory(modules: list[str]) -> None:
    def carveout(name: str) -> int | None:
        kernel = launch.load(catalog.builder("sm_90a", name), 0)
        return getattr(kernel, "preferred_shared_memory_carveout", None)

    assert carveout("keep_keys") == carveout("column_sums_bf16") == 100
    assert carveout("keep_mass") is None


def test_structs_are_packed_as_numpy_lays_them_out() -> None:
    rng = np.random.default_rng(0)
    for dtype in (launch.ATTEND_PARAMS, launch.WGMMA_PARAMS, launch.MERGE_PARAMS):
        assert dtype.fields is not None
        values: dict[str, Any] = {}
        expected = np.zeros(1, dtype)
        for name in list(dtype.fields)[1:]:  # the first is left out, and zero
            field = dtype.fields[name][0]
            if field.names:
                values[name] = tuple(int(x) for x in rng.integers(-(2**62), 2**62, 3))
            elif field.kind == "V":
                values[name] = np.frombuffer(rng.bytes(field.itemsize), field)[0]
            else:
                values[name] = {"u": 2**63 + 5, "i": -7, "f": 0.1}[field.kind]
            expected[name] = values[name]
        packed = launch.packed_struct(dtype, values)
        assert (packed.shape, packed.dtype.itemsize) == ((1,), dtype.itemsize)
        assert packed.tobytes() == expected.tobytes()


def test_a_patch_sets_its_fields_and_leaves_the_others() -> None:
    rng = np.random.default_rng(1)
    names = ("k_stride", "sq", "lse", "tasks", "frags", "counts", "q_heads")
    patch = launch.Patch(launch.ATTEND_PARAMS, *names[1:])
    before = np.frombuffer(rng.bytes(launch.ATTEND_PARAMS.itemsize), launch.ATTEND_PARAMS).copy()
    values = [7, 2**63 + 1, 11, 12, 2**40, -3]
    expected = before.copy()
    for name, value in zip(names[1:], values, strict=True):
        expected[name] = value
    assert patch(before.tobytes(), *values).tobytes() == expected.tobytes()
    assert expected.tobytes() != before.tobytes()


def test_attention_that_shares_the_gpu_has_more_ctas_of_fewer_tasks() -> None:
    plain = [launch.persistent_ctas(n, 132, twins=False, shared=False) for n in (5, 132, 999)]
    assert plain == [5, 132, 132]
    shared = [launch.persistent_ctas(n, 132, twins=False, shared=True) for n in (5, 200, 999)]
    assert shared == [5, 132, 500]
    # Whole clusters, of which none is without a task but for the odd one.
    pairs = [launch.persistent_ctas(n, 131, twins=True, shared=False) for n in (5, 999)]
    assert pairs == [6, 130]
    assert launch.persistent_ctas(1001, 131, twins=True, shared=True) == 500
