"""The k-means kernels on the CPU, against loops over tokens and centroids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tessera_cupy.kernels import kmeans
from tessera_cupy.sparsifiers.clusters import kmeans as on_host
from tessera_cupy.video import VideoGrid
from tests.emulator.emulator import compiler
from tests.emulator.gpu import EmulatedGpu

needs_compiler = pytest.mark.skipif(compiler() is None, reason="no g++ to build the emulator with")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulated")


def lloyd(x: Any, centroids: Any, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """One iteration on (tokens, d): labels by distance to rounded centroids, then means."""
    rounded = centroids.astype(dtype).astype(np.float64)
    labels = np.array([((token - rounded) ** 2).sum(axis=1).argmin() for token in x])
    moved = centroids.astype(np.float64)
    for c in range(len(centroids)):
        if (labels == c).any():
            moved[c] = x[labels == c].mean(axis=0)
    return labels, moved


def line(centroids: np.ndarray) -> list[int]:
    """Places on the direction of eight turns of a power iteration, by loops."""
    wide = centroids.astype(np.float64) - centroids.astype(np.float64).mean(axis=0)
    direction = np.array(
        [((i + 1) * 2654435769 % 2**32 // 2**8) / 2**23 - 1 for i in range(wide.shape[1])]
    )
    for _ in range(8):
        direction = sum((row @ direction) * row for row in wide)
        if direction.any():
            direction = direction / np.linalg.norm(direction)
    places = [float(row @ direction) for row in wide]
    return sorted(range(len(places)), key=places.__getitem__)


def run(
    folder: Path,
    x: Any,
    centroids: Any,
    iterations: int,
    seed: int,
    arch: str = "sm_90a",
    **places: Any,
) -> Any:
    """(order, sizes, centroids) of the kernels, on the host."""
    gpu = EmulatedGpu(folder, seed)
    where = {"start": 0, "tokens": x.shape[2], **places}
    with gpu.here():
        given = gpu.array(centroids)
        made = kmeans.kmeans(
            gpu.array(x),
            centroids.shape[2],
            iterations,
            centroids=given,
            arch=arch,
            memory=[],
            **where,
        )
        order, sizes, moved = (array.get() for array in made)
        return order.reshape(x.shape[:3]), sizes, moved


@needs_compiler
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize(
    ("tokens", "clusters", "d", "dtype"),
    [
        (70, 20, 128, ml_dtypes.bfloat16),
        (300, 5, 16, np.float16),  # three tiles, the last one short
        (131, 140, 8, ml_dtypes.bfloat16),  # two tiles of centroids, most of them without tokens
        (97, 3, 40, np.float16),  # a head dim that fills no slice
        (1, 1, 8, np.float16),
    ],
)
def test_one_iteration(
    folder: Path, tokens: int, clusters: int, d: int, dtype: Any, arch: str
) -> None:
    rng = np.random.default_rng(tokens)
    x = rng.standard_normal((2, 2, tokens, d)).astype(dtype)
    centroids = rng.standard_normal((2, 2, clusters, d)).astype(np.float32)
    order, sizes, moved = run(folder, x, centroids, 1, tokens, arch)
    for b, h in np.ndindex(2, 2):
        wide = x[b, h].astype(np.float64)
        labels, means = lloyd(wide, centroids[b, h], dtype)
        assert sizes[b, h].tolist() == np.bincount(labels, minlength=clusters).tolist()
        assert order[b, h].tolist() == np.argsort(labels, kind="stable").tolist()
        assert moved[b, h] == pytest.approx(means, rel=1e-5, abs=1e-5)


@needs_compiler
def test_iterations_go_on_from_the_means(folder: Path) -> None:
    rng = np.random.default_rng(4)
    x = rng.standard_normal((1, 1, 200, 8)).astype(np.float16)
    centroids = x[:, :, :6].astype(np.float32)
    expected = centroids[0, 0]
    for _ in range(3):
        labels, means = lloyd(x[0, 0].astype(np.float64), expected, np.float16)
        expected = means.astype(np.float32)
    order, _, moved = run(folder, x, centroids, 3, 4)
    assert order[0, 0].tolist() == np.argsort(labels, kind="stable").tolist()
    assert moved[0, 0] == pytest.approx(expected, rel=1e-4, abs=1e-4)


@needs_compiler
@pytest.mark.parametrize("start", [0, 3])
def test_tokens_of_no_cluster_come_last(folder: Path, start: int) -> None:
    rng = np.random.default_rng(5)
    x = rng.standard_normal((1, 2, 150, 8)).astype(np.float16)
    centroids = rng.standard_normal((1, 2, 4, 8)).astype(np.float32)
    order, sizes, moved = run(folder, x, centroids, 1, 5, start=start, tokens=147)
    others = [t for t in range(150) if not start <= t < start + 147]
    for h in range(2):
        wide = x[0, h].astype(np.float64)
        labels, means = lloyd(wide[start : start + 147], centroids[0, h], np.float16)
        assert sizes[0, h].tolist() == [*np.bincount(labels, minlength=4), 3]
        expected = (np.argsort(labels, kind="stable") + start).tolist()
        assert order[0, h].tolist() == expected + others
        assert moved[0, h] == pytest.approx(means, rel=1e-5, abs=1e-5)


@needs_compiler
def test_heads_of_several_parts(folder: Path) -> None:
    """Text first, parts in the midst of clusters, one of them short, and one without a label."""
    rng = np.random.default_rng(11)
    x = rng.standard_normal((1, 2, 8300, 8)).astype(np.float16)
    x[0, 1, 4096:8192] = x[0, 1, 5000]
    centroids = rng.standard_normal((1, 2, 7, 8)).astype(np.float32)
    order, sizes, moved = run(folder, x, centroids, 1, 11, start=9, tokens=8291)
    for h in range(2):
        wide = x[0, h, 9:].astype(np.float64)
        labels, means = lloyd(wide, centroids[0, h], np.float16)
        assert sizes[0, h].tolist() == [*np.bincount(labels, minlength=7), 9]
        expected = (np.argsort(labels, kind="stable") + 9).tolist()
        assert order[0, h].tolist() == [*expected, *range(9)]
        assert moved[0, h] == pytest.approx(means, rel=1e-4, abs=1e-5)


@needs_compiler
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("first", [0, 1, 2, 3, 129])
def test_of_equal_centroids_the_first_takes_all(folder: Path, first: int, arch: str) -> None:
    """Others lie behind it: beside it, in another thread's columns, in another tile."""
    x = np.ones((1, 1, 40, 8), np.float16)
    centroids = np.ones((1, 1, 131, 8), np.float32)
    centroids[:, :, :first] = 5
    order, sizes, moved = run(folder, x, centroids, 2, 6, arch)
    assert sizes[0, 0].tolist() == [0] * first + [40] + [0] * (130 - first)
    assert order[0, 0].tolist() == list(range(40))
    assert (moved == centroids).all()


@needs_compiler
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_labels_of_many_tiles_in_whole_numbers(folder: Path, arch: str) -> None:
    """Sums are exact and often equal; heads differ, a CTA takes several tiles of tokens, and there
    are more tiles of centroids than stages."""
    rng = np.random.default_rng(12)
    x = rng.integers(-3, 4, (1, 3, 400, 72)).astype(ml_dtypes.bfloat16)
    centroids = rng.integers(-3, 4, (1, 3, 420, 72)).astype(np.float32)
    centroids[:, :, 1::2] = centroids[:, :, ::2]
    centroids[:, :, 320:] = centroids[:, :, :100]
    order, sizes, _ = run(folder, x, centroids, 1, 12, arch)
    for h in range(3):
        labels, _ = lloyd(x[0, h].astype(np.float64), centroids[0, h], ml_dtypes.bfloat16)
        assert sizes[0, h].tolist() == np.bincount(labels, minlength=420).tolist()
        assert order[0, h].tolist() == np.argsort(labels, kind="stable").tolist()


@needs_compiler
def test_the_same_bits_whatever_the_order_of_threads(folder: Path) -> None:
    rng = np.random.default_rng(7)
    x = rng.standard_normal((1, 1, 500, 16)).astype(ml_dtypes.bfloat16)
    centroids = rng.standard_normal((1, 1, 9, 16)).astype(np.float32)
    first, second = (run(folder, x, centroids, 2, seed) for seed in (1, 2))
    for a, b in zip(first, second, strict=True):
        assert a.tobytes() == b.tobytes()


@needs_compiler
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("place", [(0, 0, 199, 3), (0, 0, 70, 127)])
@pytest.mark.parametrize("value", [np.nan, -np.inf, 1.0])
def test_what_is_no_number_is_flagged(
    folder: Path, value: float, place: tuple[int, ...], arch: str
) -> None:
    x = np.ones((1, 1, 200, 128), np.float16)
    x[place] = value
    gpu = EmulatedGpu(folder, 8)
    with gpu.here():
        flag = gpu.array(np.zeros(1, np.int32), writable=True)
        kmeans.kmeans(
            gpu.array(x), 3, 1, start=0, tokens=200, arch=arch, memory=[], flag=flag.data.ptr
        )
        assert flag.get().tolist() == [int(not np.isfinite(value))]


@needs_compiler
def test_as_many_labels_as_there_is_room_for(folder: Path) -> None:
    rng = np.random.default_rng(9)
    clusters = kmeans.MOST_LABELS
    x = rng.standard_normal((1, 1, 1500, 8)).astype(np.float16)
    centroids = x[:, :, :clusters].astype(np.float32)
    order, sizes, _ = run(folder, x, centroids, 1, 9)
    labels, _ = lloyd(x[0, 0].astype(np.float64), centroids[0, 0], np.float16)
    assert sizes[0, 0].tolist() == np.bincount(labels, minlength=clusters).tolist()
    assert order[0, 0].tolist() == np.argsort(labels, kind="stable").tolist()


@needs_compiler
@pytest.mark.parametrize("start", [0, 7])
def test_it_begins_with_tokens_at_even_distances(folder: Path, start: int) -> None:
    """And one iteration is the last one, which begins in the order of the line."""
    rng = np.random.default_rng(10)
    x = rng.standard_normal((2, 1, 107, 8)).astype(np.float16)
    gpu = EmulatedGpu(folder, 10)
    with gpu.here():
        made = kmeans.kmeans(gpu.array(x), 6, 1, start=start, tokens=100, arch="sm_90a", memory=[])
        chosen = [start + at for at in (0, 16, 33, 50, 66, 83)]
        begun = x[:, :, chosen].astype(np.float32)
        begun = np.stack([[c[line(c)] for c in heads] for heads in begun])
        given = gpu.array(begun)
        same = kmeans.kmeans(
            gpu.array(x), 6, 1, centroids=given, start=start, tokens=100, arch="sm_90a", memory=[]
        )
        for a, b in zip(made, same, strict=True):
            assert a.get().tobytes() == b.get().tobytes()
        assert given.get().tobytes() == begun.tobytes()


@needs_compiler
@pytest.mark.parametrize("start", [0, 5])
def test_from_scratch_as_on_the_host(folder: Path, start: int) -> None:
    """Groups of tokens far apart, so that rounding moves none, in the same order."""
    rng = np.random.default_rng(11)
    groups = np.roll(np.arange(305) * 20 // 300, start) % 20
    centres = rng.standard_normal((1, 3, 20, 40)) * 4
    x = centres[:, :, groups] + 0.1 * rng.standard_normal((1, 3, 305, 40))
    x = x.astype(np.float16)
    grid = VideoGrid(3, 10, 10, text_tokens=5, text_first=start > 0)
    expected = on_host(x, 20, grid, iterations=3)
    gpu = EmulatedGpu(folder, 11)
    with gpu.here():
        made = kmeans.kmeans(gpu.array(x), 20, 3, start=start, tokens=300, arch="sm_90a", memory=[])
        order, sizes, moved = (array.get() for array in made)
    assert (order == expected.order).all()
    assert (sizes == expected.sizes).all()
    assert moved == pytest.approx(expected.centroids, rel=1e-4, abs=1e-4)


def in_order(folder: Path, centroids: np.ndarray, seed: int) -> np.ndarray:
    """``kmeans_line`` of (heads, clusters, channels)."""
    gpu = EmulatedGpu(folder, seed)
    with gpu.here():
        made: np.ndarray = kmeans.in_line(
            gpu.array(centroids[None]), arch="sm_90a", memory=[]
        ).get()
    return made[0]


@needs_compiler
@pytest.mark.parametrize(
    ("clusters", "channels"), [(1, 8), (2, 8), (33, 40), (140, 128), (kmeans.MOST_LABELS - 1, 256)]
)
def test_centroids_in_the_order_of_a_line(folder: Path, clusters: int, channels: int) -> None:
    rng = np.random.default_rng(clusters)
    centroids = rng.standard_normal((2, clusters, channels)).astype(np.float32)
    centroids[:, 5:9] = centroids[:, 4:5]  # equals keep their order
    made = in_order(folder, centroids, clusters)
    for head in range(2):
        assert (made[head] == centroids[head][line(centroids[head])]).all()


@needs_compiler
@pytest.mark.parametrize("value", [0.0, 1.0, np.nan, np.inf, 1e38])
def test_without_a_direction_the_order_stays(folder: Path, value: float) -> None:
    """Alike centroids, and what is no number: the same rows, none lost."""
    centroids = np.full((1, 40, 16), value, np.float32)
    assert in_order(folder, centroids, 3).tobytes() == centroids.tobytes()
    centroids[0, :7] = np.arange(7)[:, None]
    made = in_order(folder, centroids, 4)
    assert sorted(map(bytes, made[0])) == sorted(map(bytes, centroids[0]))
