"""What the driver is asked for: sizes, strides and boxes, with a driver that writes them down."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tessera_cupy.kernels import tensor_maps
from tessera_cupy.kernels.tensor_maps import fragment_map, rows_map


class Driver:
    """As much of cuda-bindings as an encoding takes; the map is the number of the call."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.error = 0

    def __getattr__(self, name: str) -> Any:
        if name in ("cuuint32_t", "cuuint64_t"):
            return int
        return type(name, (), {"__getattr__": lambda self, value: value})()

    def cuTensorMapEncodeTiled(self, *arguments: Any) -> tuple[int, Any]:
        self.calls.append(arguments)
        return self.error, SimpleNamespace(opaque=[len(self.calls)] * 16)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=made))
    monkeypatch.setattr(tensor_maps, "encode", tensor_maps.encode.__wrapped__)
    return made


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Arguments of each encoding."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(tensor_maps, "encode", lambda *arguments: calls.append(arguments) or "map")
    return calls


def test_the_driver_gets_bytes_between_neighbours(driver: Driver) -> None:
    made = tensor_maps.encode(4096, "bfloat16", (128, 50, 3), (256, 12800), (64, 8, 1))
    assert np.frombuffer(made.tobytes(), np.uint64).tolist() == [1] * 16
    (call,) = driver.calls
    assert call[:7] == (
        "CU_TENSOR_MAP_DATA_TYPE_BFLOAT16",
        3,
        4096,
        [128, 50, 3],
        [512, 25600],
        [64, 8, 1],
        [1, 1, 1],
    )
    assert "CU_TENSOR_MAP_SWIZZLE_128B" in call
    tensor_maps.encode(4096, "float16", (128, 50, 3), (256, 12800), (64, 8, 1))
    assert driver.calls[1][0] == "CU_TENSOR_MAP_DATA_TYPE_FLOAT16"


def test_a_driver_that_refuses_is_told_with_what_it_was_asked(driver: Driver) -> None:
    driver.error = 1
    with pytest.raises(RuntimeError, match=r"cuTensorMapEncodeTiled: 1 for address 0x1000.*\(64, "):
        tensor_maps.encode(4096, "float16", (64, 50), (64,), (64, 8))


def test_batches_and_heads_are_one_axis_of_fragments(asked: list[Any]) -> None:
    # 3 batch entries of 5 heads; 203 rows have 25 groups of 8, and the last 3 are out of reach.
    shape, strides = (3, 5, 203, 128), (5 * 26000, 26000, 128)
    assert fragment_map(4096, "float16", shape, strides, 32) == "map"
    assert asked == [
        (4096, "float16", (64, 16, 2, 25, 15), (128, 64, 1024, 26000), (64, 8, 2, 4, 1)),
    ]


@pytest.mark.parametrize(
    ("shape", "strides", "slot"),
    [
        ((2, 5, 203, 128), (6 * 26000, 26000, 128), 32),
        ((1, 5, 31, 128), (5 * 26000, 26000, 128), 32),
        ((1, 5, 203, 96), (5 * 26000, 26000, 128), 32),
    ],
    ids=["batches apart", "shorter than a fragment", "half a slab"],
)
def test_fragments_that_no_map_can_hold(
    shape: Any, strides: Any, slot: int, asked: list[Any]
) -> None:
    assert fragment_map(4096, "float16", shape, strides, slot) is None
    assert asked == []


def test_the_stride_of_an_axis_of_one_does_not_count(asked: list[Any]) -> None:
    # One batch entry may have any stride, and with one head there is no neighbour either.
    assert fragment_map(4096, "float16", (1, 5, 203, 64), (7, 26000, 64), 8) == "map"
    assert fragment_map(4096, "float16", (1, 1, 203, 64), (7, 9, 64), 8) == "map"
    assert fragment_map(4096, "float16", (3, 1, 203, 64), (26000, 26000, 64), 8) == "map"
    assert [call[3][-1] for call in asked] == [26000, 64, 26000]
    rows_map(4096, "float16", (1, 1, 1, 64), (1, 2, 3), 16)
    assert asked[3][3] == (64, 64, 64)


def test_rows_have_an_axis_each_for_heads_and_batches(asked: list[Any]) -> None:
    rows_map(4096, "bfloat16", (3, 5, 203, 80), (7 * 26000, 26000, 128), 16)
    assert asked == [
        (4096, "bfloat16", (80, 203, 5, 3), (128, 26000, 7 * 26000), (64, 16, 1, 1)),
    ]
