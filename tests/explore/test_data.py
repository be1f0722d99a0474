"""The explorer's data: by hand on tiny masks, and against the mask itself on those of rules."""

from __future__ import annotations

import base64
import doctest
import importlib
import json
import pkgutil
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tessera_cupy import explore
from tessera_cupy.attention import make_plan
from tessera_cupy.bench import clips
from tessera_cupy.cost import find_gpu, predict
from tessera_cupy.errors import MissingExtraError
from tessera_cupy.explore import choices, features, scene
from tessera_cupy.explore.data import explore_data, explore_mask, mappings_of
from tessera_cupy.masks import BlockMask, KeySlices
from tessera_cupy.masks.key_slices import block_mask
from tessera_cupy.request import ArraySpec
from tessera_cupy.video import MODELS, VideoGrid

GRID = VideoGrid(4, 8, 8)
MODULES = [module.name for module in pkgutil.iter_modules(explore.__path__)]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    failed, _ = doctest.testmod(importlib.import_module(f"tessera_cupy.explore.{name}"))
    assert not failed


def bits(text: str, columns: int) -> list[list[int]]:
    packed = np.frombuffer(base64.b64decode(text), np.uint8).reshape(-1, -(-columns // 8))
    unpacked = np.unpackbits(packed, axis=1, bitorder="little")[:, :columns]
    rows: list[list[int]] = unpacked.tolist()
    return rows


def pieces(tiles: dict[str, Any], tile: int) -> list[tuple[Any, ...]]:
    """(step, column, first key, length, bands) of each piece of a tile."""
    first, end = tiles["piece_offsets"][tile : tile + 2]
    names = ("step", "column", "kv0", "length")
    return [
        (*(tiles[f"piece_{name}"][at] for name in names), tiles["bands"][tiles["piece_bands"][at]])
        for at in range(first, end)
    ]


def wanted(tiles: dict[str, Any], shape: tuple[int, int]) -> NDArray[np.int64]:
    """How often each (query, key) pair is computed as wanted."""
    count = np.zeros(shape, np.int64)
    for tile, runs in enumerate(tiles["runs"]):
        row_of = {top + r: q0 + r for top, q0, rows in runs for r in range(rows)}
        for _, _, kv0, length, bands in pieces(tiles, tile):
            for top, end, member in bands:
                for row in range(top, end):
                    if member:
                        count[row_of[row], kv0 : kv0 + length] += 1
    return count


def test_share_lets_each_half_skip_what_it_does_not_want() -> None:
    mask = BlockMask.from_dense([[1, 0], [1, 1]], (64, 64))
    data = explore_mask(mask, mapping="share-pack", gpu="A100-SXM4-80GB")
    assert bits(data["scene"]["mask"]["kept"], 2) == [[1, 0], [1, 1]]
    assert bits(data["scene"]["mask"]["partial"], 2) == [[0, 0], [0, 0]]
    assert data["scene"]["mask"]["q_edges"] == [0, 64, 128]
    tiles = data["tiles"]
    # A tile of 128 rows, of which each of four warps has 32, and steps of 64 keys.
    assert [tiles[name] for name in ("q", "kv", "part")] == [128, 64, 32]
    assert tiles["runs"] == [[[0, 0, 128]]]
    assert tiles["steps"] == [2]
    assert tiles["step_parts"] == [0b1111, 0b1100]
    assert pieces(tiles, 0) == [
        (0, 0, 0, 64, [[0, 128, 1]]),
        (1, 0, 64, 64, [[64, 128, 1]]),
    ]
    figures = data["figures"]
    assert (figures["tiles"], figures["steps"], figures["tasks"]) == (1, 2, 1)
    assert figures["active_pairs"] == figures["issued_pairs"] == 3 * 64 * 64
    assert figures["all_pairs"] == 128 * 128
    assert figures["useful_fraction"] == 1
    assert figures["density"] == 0.75


def test_merge_computes_unwanted_neighbours_in_vain() -> None:
    mask = BlockMask.from_dense([[1, 0, 1]], (64, 64))
    data = explore_mask(mask, mapping="retain-merge", gpu="H200")
    tiles = data["tiles"]
    # Two warpgroups of 64 rows, of which the second has none; a step of three blocks.
    assert [tiles[name] for name in ("q", "kv", "part")] == [128, 192, 64]
    assert (tiles["steps"], tiles["step_parts"]) == ([1], [0b01])
    assert pieces(tiles, 0) == [
        (0, 0, 0, 64, [[0, 64, 1]]),
        (0, 64, 64, 64, [[0, 64, 0]]),
        (0, 128, 128, 64, [[0, 64, 1]]),
    ]
    assert data["figures"]["issued_pairs"] == 64 * 192
    assert data["figures"]["useful_fraction"] == pytest.approx(2 / 3)


def test_pack_takes_blocks_from_anywhere_and_split_cuts_them() -> None:
    mask = BlockMask.from_dense([[1, 0, 1]], (64, 64))
    packed = explore_mask(mask, mapping="attend_wgmma/q128k192/retain-pack/longest+split")
    assert [piece[:3] for piece in pieces(packed["tiles"], 0)] == [(0, 0, 0), (0, 64, 128)]
    assert packed["plan"]["name"] == "attend_wgmma/q128k192/retain-pack/longest+split"
    mask = BlockMask.from_dense([[1]], (128, 128))
    cut = explore_mask(mask, mapping="split-split", gpu="A100-SXM4-80GB")
    assert cut["tiles"]["runs"] == [[[0, 0, 64]], [[0, 64, 64]]]
    assert [piece[:4] for piece in pieces(cut["tiles"], 1)] == [(0, 0, 0, 64), (1, 0, 64, 64)]


def test_gathered_keys_are_pieces_of_their_own() -> None:
    keys = np.zeros((1, 64), bool)
    keys[0, [3, 4, 40]] = True
    slices = KeySlices.from_groups(keys, 64)
    data = explore_mask(slices, mapping="retain-gather", gpu="A100-SXM4-80GB")
    assert data["scene"]["mask"]["slices"] is True
    assert [piece[1:4] for piece in pieces(data["tiles"], 0)] == [(0, 3, 2), (2, 40, 1)]


def test_a_block_says_where_its_tokens_are() -> None:
    grid = VideoGrid(2, 4, 4)
    mask = BlockMask.from_dense([[1, 1], [0, 1]], (16, 16))
    order = grid.tile_order((2, 2, 4))  # the upper half of both frames, then the lower
    data = explore_mask(mask, grid=grid, order=order)
    assert data["scene"]["q_boxes"] == [(0, 1, 0, 1, 0, 3, 16), (0, 1, 2, 3, 0, 3, 16)]
    assert data["scene"]["kv_boxes"] == data["scene"]["q_boxes"]
    raster = explore_mask(mask, grid=grid)
    assert raster["scene"]["q_boxes"] == [(0, 0, 0, 3, 0, 3, 16), (1, 1, 0, 3, 0, 3, 16)]


def test_the_second_head_is_shown() -> None:
    mask = BlockMask.from_dense([[[1, 1]], [[0, 1]]], (64, 64))
    data = explore_mask(mask, head=1, mapping="retain-pack", gpu="A100-SXM4-80GB")
    assert bits(data["scene"]["mask"]["kept"], 2) == [[0, 1]]
    assert [piece[2] for piece in pieces(data["tiles"], 0)] == [64]


@pytest.mark.parametrize("rule", ["spade", "radial", "svg", "svg2", "fg-attn", "window"])
@pytest.mark.parametrize("gpu", ["H200", "RTX 4090"])
def test_wanted_entries_are_the_mask_and_figures_are_the_plans(rule: str, gpu: str) -> None:
    model = "wan-1.3b-81f-480p"
    shown = scene.make_scene(model, rule, 1, None, GRID)
    blocks = block_mask(shown.mask)
    tokens = blocks.to_tokens()[0, 0]
    spec = ArraySpec((1, MODELS[model].heads, GRID.tokens, 128), "bfloat16")
    for mapping, best in mappings_of(shown, gpu).items():
        data = explore_data(model, rule, head=1, mapping=mapping, gpu=gpu, grid=GRID)
        tiles, figures = data["tiles"], data["figures"]
        assert (wanted(tiles, blocks.shape) == tokens).all()
        assert figures["active_pairs"] == tokens.sum()
        parts = sum(bin(word).count("1") for word in tiles["step_parts"])
        assert figures["issued_pairs"] == parts * tiles["part"] * tiles["kv"]
        plan = make_plan(
            shown.mask,
            spec,
            regime="auto" if mapping == "auto" else best.spec,
            arch=best.config.arch,
        )
        summary = plan.summary()
        for name in ("tiles", "steps", "tasks", "useful_fraction"):
            assert figures[name] == summary[name]
        assert figures["predicted_ms"] == predict(plan, find_gpu(gpu)).ms
        assert data["plan"]["explain"] == plan.explain()
        assert data["plan"]["name"] == plan.spec.name
        assert json.loads(json.dumps(data))["figures"] == figures


def test_a_mapping_has_the_kernel_that_is_predicted_to_be_fastest() -> None:
    mask = BlockMask.from_dense(np.ones((8, 8), bool), (64, 64))
    gpu = find_gpu("H200")
    spec = ArraySpec((1, 1, 512, 128), "bfloat16")
    times = {
        name: predict(make_plan(mask, spec, regime=name, arch="sm_90a"), gpu).ms
        for name in (
            "attend_wgmma/q128k192/merge-pack/longest+split",
            "attend_mma/q128k64/merge-pack/longest+split",
        )
    }
    data = explore_mask(mask, mapping="merge-pack", gpu="H200")
    assert data["plan"]["name"] == min(times, key=times.__getitem__)
    assert data["figures"]["predicted_ms"] == min(times.values())


def test_regroup_is_offered_where_its_kernel_is() -> None:
    shown = scene.make_scene("wan-1.3b-81f-480p", "window", 0, (64, 64), GRID)
    assert "regroup-pack" in mappings_of(shown, "H100 SXM")
    assert "regroup-pack" not in mappings_of(shown, "B200")


def test_small_grids_are_cut_from_those_of_all_models() -> None:
    for name, model in MODELS.items():
        small = choices.small_grid(name)
        assert 1500 <= small.tokens <= 3500
        assert small.text_tokens == 0
        assert small.tokens < model.grid.tokens
        assert not any(n % 4 for n in (small.t, small.h, small.w))


def test_the_data_says_what_the_grid_was_cut_from() -> None:
    data = explore_data("wan-1.3b-81f-480p", "vsa")
    # (32,760 / 2,400) ** (1 / 3) is 2.39: 21, 30 and 52 by it are 8.8, 12.6 and 21.8.
    assert data["scene"]["grid"] == {
        "size": [8, 12, 20],
        "tokens": 1920,
        "model": "wan-1.3b-81f-480p",
        "model_grid": "21x30x52",
        "model_tokens": 32760,
        "model_text": 0,
    }
    assert data["scene"]["rule"] == {"name": "vsa", "title": "VSA"}
    assert data["scene"]["heads"] == 12
    assert data["gpu"] == {"name": "H200", "arch": "sm_90a"}


def test_without_clips_features_are_synthetic(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise MissingExtraError("no clip")

    monkeypatch.setattr(clips, "read_features", missing)
    made, source = features.read_features(GRID)
    assert "synthetic" in source
    assert made.shape == (256, 13)
    assert made.dtype == np.float32
    np.testing.assert_allclose(made[:, :12].mean(axis=0), 0, atol=1e-5)
    np.testing.assert_allclose(made[:, :12].std(axis=0), 1, atol=1e-5)
    assert (made[:, 12] == 1).all()
    # Neighbours in a row are alike, tokens of random places are not.
    grid = made[:, :12].reshape(4, 8, 8, 12)
    near = np.abs(grid[:, :, 1:] - grid[:, :, :-1]).mean()
    far = np.abs(made[:, None, :12] - made[None, :, :12]).mean()
    assert near < 0.8 * far


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "sora"}, r"`model`: expected one of wan-.*'sora'"),
        ({"rule": "svg3"}, r"`rule`: expected one of spade"),
        ({"head": 12}, r"`head`: expected from 0 to 11, got 12"),
        ({"block_size": (48, 48)}, r"`block_size`: expected one of 64x64, .*got 48x48"),
        ({"rule": "vsa", "block_size": (64, 64)}, r"None, as vsa has blocks of its own"),
        ({"mapping": "fold-pack"}, r"`q`: expected one of retain"),
        (
            {"mapping": "split-pack"},
            r"`mapping`: expected one that can serve .* H200: auto, .*'spl",
        ),
        ({"gpu": "H20"}, r"`gpu`: expected one of A100"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        explore_data(**{"model": "wan-1.3b-81f-480p", "grid": GRID, **arguments})


def test_a_grid_of_other_tokens_is_refused() -> None:
    mask = BlockMask.from_dense([[1]], (64, 64))
    with pytest.raises(
        ValueError, match=r"`grid`: expected a grid of 64 x 64 tokens, without text, got 4x8x8"
    ):
        explore_mask(mask, grid=GRID)
    with pytest.raises(ValueError, match=r"`head`: expected from 0 to 0, got 1"):
        explore_mask(mask, head=1)


def test_numbers_of_numpy_are_numbers_of_the_page() -> None:
    """A scene that was made for an equal number of another type must not come back either."""
    for head in (np.int64(1), 1):
        data = explore_data(rule="window", head=head, grid=GRID)  # type: ignore[arg-type]
        assert json.loads(json.dumps(data))["scene"]["head"] == 1
    mask = BlockMask.from_dense([[1]], (64, 64))
    one: Any = np.int64(1)
    assert json.loads(json.dumps(explore_mask(mask, head=one - 1, heads=one)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"head": True}, r"`head`: expected from 0 to 39, got True"),
        ({"head": 1.0}, r"`head`: expected from 0 to 39, got 1.0"),
        ({"head": "1"}, r"`head`: expected from 0 to 39, got '1'"),
        ({"mapping": None}, r"`mapping`: expected 'auto', or the name"),
    ],
)
def test_arguments_of_other_types(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        explore_data(**{"rule": "window", "grid": GRID, **arguments})


def test_a_grid_with_text_is_refused() -> None:
    grid = VideoGrid(4, 8, 8, text_tokens=7)
    with pytest.raises(ValueError, match=r"`grid`: expected a grid without text, got .*7 text"):
        explore_data(rule="window", grid=grid)
    mask = BlockMask.from_dense(np.ones((5, 5), bool), (64, 64), (263, 263))
    with pytest.raises(ValueError, match=r"`grid`: expected a grid of 263 x 263 tokens, without"):
        explore_mask(mask, grid=grid)


@pytest.mark.parametrize(
    "order", [np.arange(63), np.zeros(64, int), np.arange(64) + 1, np.arange(64.0), [[0]]]
)
def test_an_order_that_has_not_each_token_once_is_refused(order: Any) -> None:
    mask = BlockMask.from_dense([[1]], (64, 64))
    with pytest.raises(ValueError, match=r"`order`: expected each number from 0 to 63 once"):
        explore_mask(mask, grid=VideoGrid(1, 8, 8), order=order)
