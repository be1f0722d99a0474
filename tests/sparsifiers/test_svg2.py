"""SVG2's rule, against loops over tokens, clusters and pieces."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tessera_cupy import BlockMask, reference
from tessera_cupy.mapping import choose_slot
from tessera_cupy.sparsifiers import clusters, svg2
from tessera_cupy.video import VideoGrid


def lloyd(x: Any, count: int, iterations: int, begin: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """Labels and centroids of (tokens, d)."""
    moved = x[[i * len(x) // count for i in range(count)]] if begin is None else begin
    moved = moved.astype(np.float64)
    for _ in range(iterations):
        labels = np.array([((token - moved) ** 2).sum(axis=1).argmin() for token in x])
        for c in range(count):
            if (labels == c).any():
                moved[c] = x[labels == c].mean(axis=0)
    return labels, moved


def pairs(q: Any, k: Any, top_p: float, ratio: float, counts: Any, iterations: int) -> np.ndarray:
    """Which tokens attend to which, (tokens, tokens) in raster order, for (tokens, d) arrays."""
    (of_q, q_mean), (of_k, k_mean) = (
        lloyd(x, count, iterations) for x, count in zip((q, k), counts, strict=True)
    )
    sizes = np.bincount(of_k, minlength=counts[1])
    kept = np.zeros(counts, bool)
    for i in range(counts[0]):
        p = sizes * np.exp(q_mean[i] @ k_mean.T / np.sqrt(q.shape[1]))
        p /= p.sum()
        total, taken = 0.0, 0
        for j in sorted(range(counts[1]), key=lambda j: -p[j]):
            if total >= top_p and taken >= int(ratio * counts[1]):
                break
            total, taken = total + p[j], taken + 1
            kept[i, j] = True
    made: np.ndarray = kept[np.ix_(of_q, of_k)]
    return made


def runs(tokens: int, rng: np.random.Generator) -> np.ndarray:
    """(1, 2, tokens, 16) with groups of alike tokens, as float32."""
    centres = 2 * rng.standard_normal((2, 12, 16))
    of = rng.integers(0, 12, tokens)
    return (centres[:, of] + 0.5 * rng.standard_normal((2, tokens, 16)))[None].astype(np.float32)


def in_raster_order(chosen: Any, b: int, h: int) -> np.ndarray:
    """The mask as pairs of tokens in raster order."""
    made = np.zeros(chosen.mask.shape, bool)
    token_mask = np.zeros_like(made)
    q_starts, k_starts = chosen.mask.q_starts()[b, h], chosen.mask.kv_starts()[b, h]
    blocks = chosen.mask.to_dense()[b, h]
    for i, j in zip(*np.nonzero(blocks), strict=True):
        token_mask[q_starts[i] : q_starts[i + 1], k_starts[j] : k_starts[j + 1]] = True
    made[np.ix_(chosen.orders.of(b, h), chosen.kv_orders.of(b, h))] = token_mask
    return made


@pytest.mark.parametrize("piece", [None, (64, 32), (400, 400)])
@pytest.mark.parametrize(("top_p", "ratio"), [(0.9, 0.1), (0.3, 0.4)])
def test_the_formula(piece: Any, top_p: float, ratio: float) -> None:
    """Whole clusters as blocks (pieces of 400 tokens) and pieces of them: the same pairs."""
    grid = VideoGrid(3, 10, 11)
    rng = np.random.default_rng(5)
    q, k = runs(330, rng), runs(330, rng)
    chosen = svg2.select(
        q, k, grid, q_clusters=6, k_clusters=14, top_p=top_p, min_kc_ratio=ratio, iterations=4,
        piece=piece,
    )  # fmt: skip
    for h in range(2):
        wide_q, wide_k = q[0, h].astype(np.float64), k[0, h].astype(np.float64)
        expected = pairs(wide_q, wide_k, top_p, ratio, (6, 14), 4)
        assert (in_raster_order(chosen, 0, h) == expected).all()


@pytest.mark.parametrize("text_first", [False, True])
def test_text_is_kept_whole_and_takes_no_mass(text_first: bool) -> None:
    grid = VideoGrid(3, 10, 10, text_tokens=21, text_first=text_first)
    rng = np.random.default_rng(6)
    q, k = runs(321, rng), runs(321, rng)
    chosen = svg2.select(q, k, grid, q_clusters=5, k_clusters=9, iterations=3)
    video = slice(grid.video_start, grid.video_start + 300)
    for h in range(2):
        expected = np.ones((321, 321), bool)
        wide_q, wide_k = q[0, h, video].astype(np.float64), k[0, h, video].astype(np.float64)
        expected[video, video] = pairs(wide_q, wide_k, 0.9, 0.1, (5, 9), 3)
        assert (in_raster_order(chosen, 0, h) == expected).all()


def test_attention_in_clusters_order_is_that_of_the_pairs() -> None:
    grid = VideoGrid(2, 10, 11)
    rng = np.random.default_rng(7)
    q, k, v = runs(220, rng), runs(220, rng), runs(220, rng)
    chosen = svg2.select(q, k, grid, q_clusters=5, k_clusters=9, iterations=3)
    out = reference.attention(
        chosen.permute(q), chosen.permute_kv(k), chosen.permute_kv(v), chosen.mask
    )
    out = chosen.restore(out)
    for h in range(2):
        score = q[0, h] @ k[0, h].T / 4
        p = np.exp(score - score.max(axis=1, keepdims=True)) * in_raster_order(chosen, 0, h)
        assert out[0, h] == pytest.approx(p @ v[0, h] / p.sum(axis=1, keepdims=True), abs=1e-4)


def test_iterations_go_on_from_the_centroids_of_another_step() -> None:
    grid = VideoGrid(3, 10, 11)
    rng = np.random.default_rng(8)
    q, k = runs(330, rng), runs(330, rng)
    counts: dict[str, Any] = {"q_clusters": 6, "k_clusters": 14}
    first = svg2.select(q, k, grid, **counts, iterations=3)
    begun = first.notes["centroids"]
    second = svg2.select(q, k, grid, **counts, centroids=begun)
    for x, centroids in zip(
        (q, k), zip(begun, second.notes["centroids"], strict=True), strict=True
    ):
        for found, iterations in zip(centroids, (3, 5), strict=True):
            expected = lloyd(x[0, 0], found.shape[2], iterations)[1]
            assert by_first(found[0, 0]) == pytest.approx(by_first(expected), abs=1e-4)
        # Clusters keep their numbers.
        before, after = (found[0, 0] for found in centroids)
        assert after == pytest.approx(lloyd(x[0, 0], len(before), 2, before)[1], abs=1e-4)


def by_first(centroids: np.ndarray) -> np.ndarray:
    """By their first number."""
    made: np.ndarray = centroids[np.argsort(centroids[:, 0])]
    return made


@pytest.mark.parametrize("d", [1, 2, 16, 128])
def test_centroids_come_along_the_line_of_their_spread(d: int) -> None:
    rng = np.random.default_rng(d)
    along = rng.standard_normal(d)
    centroids = 5 * rng.standard_normal((40, 1)) * along + 0.05 * rng.standard_normal((40, d)) + 3
    order = clusters.line_order(centroids.astype(np.float32))
    spread, directions = np.linalg.eigh(np.cov(centroids.T).reshape(d, d))
    places = centroids @ directions[:, spread.argmax()]
    assert order.tolist() in (np.argsort(places).tolist(), np.argsort(-places).tolist())


@pytest.mark.parametrize("value", [0, 1, 7.3, -1e30])
def test_alike_centroids_keep_their_order(value: float) -> None:
    assert clusters.line_order(np.full((5, 16), value, np.float32)).tolist() == [0, 1, 2, 3, 4]
    assert clusters.line_order(np.full((1, 3), value, np.float32)).tolist() == [0]


def test_the_last_iteration_begins_in_order() -> None:
    """Two iterations are one, and one from its centroids in order; one is from tokens in order."""
    grid = VideoGrid(3, 10, 11)
    x = runs(330, np.random.default_rng(10))
    first = x[:, :, [i * 330 // 7 for i in range(7)]]
    for iterations in (1, 2):
        begun = first
        if iterations == 2:
            begun = clusters.kmeans(x, 7, grid, iterations=1, centroids=first).centroids
        begun = np.stack([c[clusters.line_order(c)] for c in begun[0]])[None]
        expected = clusters.kmeans(x, 7, grid, iterations=1, centroids=begun)
        for a, b in zip(clusters.kmeans(x, 7, grid, iterations=iterations), expected, strict=True):
            assert a.tobytes() == b.tobytes()


def test_rows_keep_runs_of_clusters() -> None:
    """Of keys near a line: a third of the runs that clusters in a random order make."""
    rng = np.random.default_rng(11)
    q, k = (
        (shift + rng.random((1, 1, 1024, 1))) * np.arange(-8, 8)
        + 0.1 * rng.standard_normal((1, 1, 1024, 16))
        for shift in (1, 0)
    )
    chosen = svg2.select(
        q.astype(np.float32), k.astype(np.float32), VideoGrid(4, 16, 16), q_clusters=8,
        k_clusters=40, top_p=0, min_kc_ratio=0.4, iterations=8, piece=(1024, 1024),
    )  # fmt: skip
    kept = chosen.mask.to_dense()[0, 0]
    scattered = kept[:, rng.permutation(kept.shape[1])]
    begins, of_scattered = (
        np.count_nonzero(np.diff(np.pad(rows, ((0, 0), (1, 0))).astype(int), axis=1) == 1)
        for rows in (kept, scattered)
    )
    assert 3 * begins < of_scattered


def test_an_empty_cluster_keeps_its_centroid_and_has_no_block() -> None:
    grid = VideoGrid(1, 8, 16)
    x = runs(128, np.random.default_rng(9))
    begin = np.concatenate([x[:, :, :3], np.full((1, 2, 1, 16), 1e3, np.float32)], axis=2)
    chosen = svg2.select(x, x, grid, q_clusters=4, k_clusters=4, centroids=(begin, begin))
    assert (chosen.notes["centroids"][0][:, :, 3] == 1e3).all()
    assert (chosen.notes["sizes"][0][:, :, 3] == 0).all()
    assert chosen.notes["sizes"][0].sum() == 2 * 128


def test_16_bit_tokens_meet_rounded_centroids() -> None:
    """A centroid of 2049 is 2048 in float16: the token 2048 is as near to it as to 2048 itself."""
    x = np.array([2048, 2050, 0, 2048], np.float16).reshape(1, 1, 4, 1)
    begin = np.array([2049, 2048], np.float32).reshape(1, 1, 2, 1)
    grid = VideoGrid(1, 1, 4)
    found = clusters.kmeans(x, 2, grid, iterations=1, centroids=begin)
    assert found.sizes.tolist() == [[[4, 0]]], "equals fall to the lower cluster"
    wide = clusters.kmeans(x.astype(np.float32), 2, grid, iterations=1, centroids=begin)
    assert wide.order.tolist() == [[1, 0, 2, 3]]


@pytest.mark.parametrize("piece", [1, 4, 100])
def test_pieces(piece: int) -> None:
    sizes = np.random.default_rng(piece).integers(0, 11, (2, 3, 7)).astype(np.int32)
    capacity = clusters.room(int(sizes.sum(axis=2).max()), 7, piece)
    made = clusters.pieces(sizes, 6, piece, capacity)
    assert (made.weights == sizes[:, :, :6]).all()
    for head in np.ndindex(2, 3):
        expected = []
        for label, size in enumerate(sizes[head]):
            parts = [min(piece, size - first) for first in range(0, size, piece)]
            expected += [(label, part) for part in parts]
        expected += [(-1, 0)] * (capacity - len(expected))
        got = zip(made.labels[head].tolist(), made.sizes[head].tolist(), strict=True)
        assert list(got) == expected


def test_room_suffices_for_the_worst_sizes() -> None:
    """Every cluster but one has one token more than whole pieces."""
    for piece, labels in ((64, 5), (16, 9), (3, 1)):
        sizes = np.full((1, 1, labels), 2 * piece + 1)
        assert clusters.room(int(sizes.sum()), labels, piece) >= 3 * labels


def test_pieces_of_keys_take_fragments_of_16_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the sizes are in GPU memory; larger multiples of 16 take others."""
    monkeypatch.setattr(BlockMask, "unread_sides", (True, True))
    for piece, slot in ((svg2.KEY_PIECE, 16), (svg2.KEY_PIECE + 16, 32)):
        mask = BlockMask.from_dense([[1]], (64, piece))
        assert [choose_slot(mask, kv) for kv in (64, 128, 192)] == [slot] * 3


class TestBadInput:
    GRID = VideoGrid(1, 8, 16, text_tokens=4)
    X = np.ones((1, 2, 132, 8), np.float32)

    def select(self, **options: Any) -> Any:
        rule = {"q_clusters": 4, "k_clusters": 4, **options}
        return svg2.select(self.X, self.X, self.GRID, **rule)

    @pytest.mark.parametrize(
        ("rule", "match"),
        [
            ({"q_clusters": 129}, "128 clusters of 128 video tokens"),
            ({"k_clusters": 0}, "clusters"),
            ({"top_p": 1.1}, "from 0 to 1"),
            ({"top_p": 1.5}, "`top_p`"),
            ({"min_kc_ratio": -0.1}, "min_kc_ratio"),
            ({"iterations": 0}, "iterations"),
            ({"centroids": (np.ones((1, 2, 4, 8)), np.ones((1, 2, 5, 8)))}, r"\(1, 2, 4, 8\)"),
        ],
    )
    def test_parameters(self, rule: dict[str, Any], match: str) -> None:
        with pytest.raises(ValueError, match=match):
            self.select(**rule)

    @pytest.mark.parametrize("rule", [{"q_clusters": 2.5}, {"k_clusters": True}])
    def test_clusters_that_are_no_integers(self, rule: dict[str, Any]) -> None:
        (name,) = rule
        with pytest.raises(TypeError, match=f"`{name}`: expected an int"):
            self.select(**rule)

    @pytest.mark.parametrize("piece", [64, (64,), (64.0, 112), ()])
    def test_pieces_that_are_no_pair(self, piece: Any) -> None:
        with pytest.raises(TypeError, match="`piece`: expected two integers"):
            self.select(piece=piece)

    def test_pieces_without_tokens(self) -> None:
        with pytest.raises(ValueError, match=r"`piece`: expected at least 1 token"):
            self.select(piece=(0, 16))

    def test_centroids_that_are_none(self) -> None:
        good = np.ones((1, 2, 4, 8), np.float32)
        for centroids, match in (
            (good, "`centroids`: expected a pair"),
            ((good, good.tolist()), "`centroids`: expected a NumPy or CuPy array, got list"),
            ((good, good.astype(int)), "`centroids`: expected one of float16.*got int64"),
        ):
            with pytest.raises(TypeError, match=match):
                self.select(centroids=centroids)
        with pytest.raises(ValueError, match="`centroids`: expected finite numbers"):
            self.select(centroids=(good, good * np.nan))

    def test_more_clusters_than_a_gpu_sorts(self) -> None:
        x = np.ones((1, 1, 1400, 8), np.float32)
        with pytest.raises(ValueError, match="1362"):
            svg2.select(x, x, VideoGrid(1, 35, 40), k_clusters=1363)

    def test_nan(self) -> None:
        x = self.X.copy()
        x[0, 1, 3, 3] = np.nan
        with pytest.raises(ValueError, match="finite"):
            svg2.select(self.X, x, self.GRID, q_clusters=4, k_clusters=4)
