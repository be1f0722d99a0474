"""Keys drawn at random, alike in NumPy and in ``keep_keys.cu``: each by a number of its own.

The number of key ``32 w + j`` of group ``g`` of head ``h`` (batch-major) has 32 binary digits,
from the highest. Digit ``4 i + n`` is bit ``j`` of the word ``n`` of Philox-4x32-10 at the counter
``(w, g, h, i)``; the seed is its key, the lower half first. A key is drawn where its number is
below ``2^32`` times the probability, rounded.

Philox-4x32-10 is that of Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (SC11).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Keys of a word.
WORD = 32
_DIGITS = 32
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_FACTORS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def threshold(probability: float) -> int:
    """What numbers of drawn keys are below, 0 to 2^32.

    >>> threshold(0.25) == 2**30
    True
    """
    return round(probability * (1 << _DIGITS))


def philox(counter: tuple[Any, ...], seed: int) -> tuple[NDArray[np.uint64], ...]:
    """The four 32-bit words of Philox-4x32-10 at counters of four uint64, which broadcast.

    >>> zero = np.zeros((), np.uint64)
    >>> [f"{int(word):08x}" for word in philox((zero,) * 4, 0)]
    ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    c0, c1, c2, c3 = counter
    key = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(_ROUNDS):
        first, second = _FACTORS[0] * c0, _FACTORS[1] * c2
        c0, c1, c2, c3 = (
            (second >> _HALF) ^ c1 ^ np.uint64(key[0]),
            second & _LOW,
            (first >> _HALF) ^ c3 ^ np.uint64(key[1]),
            first & _LOW,
        )
        key = [(part + step) & 0xFFFFFFFF for part, step in zip(key, _STEPS, strict=True)]
    return c0, c1, c2, c3


def drawn(head: int, groups: int, keys: int, probability: float, seed: int) -> NDArray[np.bool_]:
    """The keys that each group of a head draws.

    Args:
        head: batch * heads + head.
        groups: of the head.
        keys: that may be drawn.
        probability: of each, 0 to 1.
        seed: 0 to 2^64 - 1.

    Returns:
        (groups, keys) bool.

    >>> drawn(0, 300, 1000, 0.25, 7).mean().round(2)
    np.float64(0.25)
    """
    limit = threshold(probability)
    if limit >= 1 << _DIGITS:
        return np.ones((groups, keys), np.bool_)
    words = -(-keys // WORD)
    word = np.arange(words, dtype=np.uint64)
    group = np.arange(groups, dtype=np.uint64)[:, None]
    below = np.zeros((groups, words), np.uint64)
    # Keys whose digits are those of the limit so far.
    undecided = np.full((groups, words), _LOW)
    for call in range(_DIGITS // 4 if limit else 0):
        numbers = philox((word, group, np.uint64(head), np.uint64(call)), seed)
        for n, number in enumerate(numbers):
            if limit >> (_DIGITS - 1 - 4 * call - n) & 1:
                below |= undecided & ~number
                undecided &= number
            else:
                undecided &= ~number
        if not undecided.any():
            break
    bits = np.unpackbits(below.astype("<u4").view(np.uint8), axis=1, bitorder="little")
    return bits[:, :keys].astype(np.bool_)
