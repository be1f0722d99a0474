"""What tokens look like: pixels of a real clip, or waves where no clip is installed."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.bench import clips
from tessera_cupy.errors import MissingExtraError
from tessera_cupy.video import VideoGrid

CLIP = "bikes"

_CHANNELS, _WAVES, _SEED = 12, 24, 0


def read_features(grid: VideoGrid) -> tuple[NDArray[Any], str]:
    """Features of a grid's tokens, as :func:`tessera_cupy.bench.clips.read_features` has them.

    Returns:
        (tokens, 13) float32, and what they are in words: frames of a clip, or where the extra
        ``demo`` is not installed :func:`synthetic_features`.
    """
    try:
        return clips.read_features(CLIP, grid), f"frames of the clip {CLIP}"
    except MissingExtraError:
        return synthetic_features(grid), "synthetic waves that drift as pictures of a video do"


def synthetic_features(grid: VideoGrid) -> NDArray[Any]:
    """Smooth patterns that drift over the frames, so that neighbouring tokens are alike.

    Channel ``c`` is the sum over waves ``w`` of ``a_cw cos(2 pi (f_w . x + d_w t) + p_cw)``, where
    ``x`` is a token's place in its frame, from 0 to 1, ``f_w`` up to three periods along rows and
    columns, and ``d_w`` up to 0.05 periods a frame.

    Returns:
        (tokens, 13) float32: twelve channels, each of mean 0 and standard deviation 1, and a
        constant 1; the same for the same grid.

    >>> synthetic_features(VideoGrid(2, 4, 4)).shape
    (32, 13)
    """
    rng = np.random.default_rng(_SEED)
    rows, columns = rng.uniform(-3, 3, (2, _WAVES))
    drift = rng.uniform(-0.05, 0.05, _WAVES)
    height = rng.standard_normal((_CHANNELS, _WAVES))
    phase = rng.uniform(0, 1, (_CHANNELS, _WAVES))
    t, y, x = (axis.ravel()[:, None] for axis in np.indices((grid.t, grid.h, grid.w)))
    turns = t * drift + y / grid.h * rows + x / grid.w * columns
    waves = np.cos(2 * np.pi * (turns[:, None, :] + phase))
    values = (waves * height).sum(axis=2)
    values = (values - values.mean(axis=0)) / np.maximum(values.std(axis=0), 1e-6)
    return np.concatenate([values, np.ones((grid.tokens, 1))], axis=1).astype(np.float32)
