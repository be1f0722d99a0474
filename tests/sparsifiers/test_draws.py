"""Keys at random: known answers of Philox, and the definition key by key."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from tessera_cupy.sparsifiers import draws


def philox(counter: tuple[int, ...], key: int) -> list[int]:
    """In Python's integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key & 0xFFFFFFFF, key >> 32
    for _ in range(10):
        first, second = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (
            (second >> 32) ^ c1 ^ k0, second & 0xFFFFFFFF,
            (first >> 32) ^ c3 ^ k1, first & 0xFFFFFFFF,
        )  # fmt: skip
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return [c0, c1, c2, c3]


def number(head: int, group: int, key: int, seed: int) -> int:
    """Of 32 digits."""
    digits = [
        word >> key % 32 & 1
        for call in range(8)
        for word in philox((key // 32, group, head, call), seed)
    ]
    return int("".join(map(str, digits)), 2)


@pytest.mark.parametrize(
    ("counter", "key", "answer"),  # of Random123's kat_vectors
    [
        ((0, 0, 0, 0), 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((0xFFFFFFFF,) * 4, 2**64 - 1, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0A4093822,
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_known_answers(counter: tuple[int, ...], key: int, answer: str) -> None:
    made = draws.philox(tuple(np.uint64(word) for word in counter), key)
    assert " ".join(f"{int(word):08x}" for word in made) == answer
    assert philox(counter, key) == [int(word) for word in made]


@pytest.mark.parametrize("probability", [1e-3, 0.01, 0.5, 0.7, 1 - 2.0**-32])
@pytest.mark.parametrize("seed", [0, 2**63 + 5])
def test_the_definition(probability: float, seed: int) -> None:
    made = draws.drawn(3, 4, 75, probability, seed)
    for group, key in np.ndindex(4, 75):
        assert made[group, key] == (number(3, group, key, seed) < probability * 2**32)


def test_shares() -> None:
    few, more = (draws.drawn(0, 300, 10_000, p, 1) for p in (0.01, 0.3))
    assert few.mean() == pytest.approx(0.01, abs=5 * (0.01 / 3e6) ** 0.5)
    assert more.mean() == pytest.approx(0.3, abs=5 * (0.3 / 3e6) ** 0.5)
    assert (more | ~few).all()  # the numbers are the same
    # Heads, groups and words have nothing to do with each other.
    for a, b in ((more[0], more[1]), (more[0], draws.drawn(1, 1, 10_000, 0.3, 1)[0])):
        assert (a & b).mean() == pytest.approx(0.09, abs=0.015)
    assert (more[:, :32] & more[:, 32:64]).mean() == pytest.approx(0.09, abs=0.015)


def test_ends() -> None:
    assert not draws.drawn(0, 3, 100, 0, 0).any()
    assert not draws.drawn(0, 3, 100, 2.0**-34, 0).any()
    assert draws.drawn(0, 3, 100, 1, 0).all()
    counts = [draws.threshold(p) for p in (0, 2.0**-32, 0.01, 1 - 2.0**-32, 1)]
    assert counts == [0, 1, 42949673, 2**32 - 1, 2**32]
    assert all(a < b for a, b in pairwise(counts))
