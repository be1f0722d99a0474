"""Parts of a mask that pictures show."""

from __future__ import annotations

from dataclasses import dataclass

from tessera_cupy.errors import wrong
from tessera_cupy.masks import BlockMask

_WINDOW_BLOCKS = (8, 16)


@dataclass(frozen=True)
class Window:
    """A part of a mask: query tokens ``[q0, q1)`` and key tokens ``[kv0, kv1)``.

    Raises:
        ValueError: it holds no token, or begins before token 0.

    >>> Window(0, 128, 64, 192).q1
    128
    """

    q0: int
    q1: int
    kv0: int
    kv1: int

    def __post_init__(self) -> None:
        if not (0 <= self.q0 < self.q1 and 0 <= self.kv0 < self.kv1):
            got = f"queries {self.q0} to {self.q1}, keys {self.kv0} to {self.kv1}"
            fix = "pass Window(q0, q1, kv0, kv1) with q0 < q1 and kv0 < kv1"
            raise ValueError(wrong("window", "tokens from 0 on, at least one a side", got, fix))

    def check_inside(self, shape: tuple[int, int]) -> None:
        """Refuse a window that reaches past ``shape``, (query tokens, key tokens).

        Raises:
            ValueError: it does.
        """
        if self.q1 > shape[0] or self.kv1 > shape[1]:
            got = f"a window to query {self.q1} and key {self.kv1}"
            expected = f"a part of {shape[0]} queries by {shape[1]} keys"
            raise ValueError(wrong("window", expected, got, "end it inside, or leave it out"))


def diagonal_window(mask: BlockMask, blocks: tuple[int, int] = _WINDOW_BLOCKS) -> Window:
    """A window of (query, key) blocks of nominal size in the middle of the diagonal.

    It starts at an even block, so that merged pairs of blocks lie whole in it.

    Raises:
        ValueError: the mask has no token on one side.

    >>> mask = BlockMask.from_dense([[True] * 40] * 40, (64, 64))
    >>> diagonal_window(mask, (4, 8))
    Window(q0=1152, q1=1408, kv0=1024, kv1=1536)
    """
    edges = []
    for total, size, count in zip(mask.shape, mask.block_size, blocks, strict=True):
        last = max(0, -(-total // size) - count)
        first = min(max(0, total // size // 2 - count // 2) // 2 * 2, last)
        edges += [first * size, min(total, (first + count) * size)]
    return Window(*edges)
