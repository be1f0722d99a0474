"""Launching ``permute_tokens.cu``: rows of several tensors into an order, or back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tessera_cupy.kernels import launch
from tessera_cupy.kernels.catalog import builder

#: Tensors of one launch.
MOST_MOVES = 3
_TENSORS = range(MOST_MOVES)
_STRIDES = np.dtype([("batch", np.int64), ("head", np.int64), ("row", np.int64)])

#: ``PermuteParams`` in permute_tokens.cu.
PERMUTE_PARAMS = np.dtype(
    [
        *[(f"{name}{i}", np.uint64) for name in ("source", "target") for i in _TENSORS],
        *[(f"{name}_stride{i}", _STRIDES) for name in ("source", "target") for i in _TENSORS],
        *[(f"{name}{i}", np.int32) for name in ("width", "lanes_log2") for i in _TENSORS],
        *[(name, np.uint64) for name in ("orders", "choice")],
        *[(name, np.int32) for name in ("order_count", "planes", "heads", "tokens")],
        *[(name, np.int32) for name in ("row_bytes", "inverse", "only")],
    ],
    align=True,
)

# Rows that a thread has in flight, kRows in permute_tokens.cu.
_ROWS = 4


@dataclass(frozen=True)
class Rows:
    """Where the rows of a (batch, heads, tokens, d) tensor are; a row's bytes are neighbours.

    Attributes:
        pointer: device address.
        strides: (batch, head, row) in bytes; those of axes of one element are 0.
    """

    pointer: int
    strides: tuple[int, int, int]


@dataclass(frozen=True)
class Permutation:
    """What is done to the rows of every tensor of a launch.

    Attributes:
        batch, heads, tokens: of the tensors, at least 1 each.
        row_bytes: of a row, a multiple of 2.
        orders: device address of the (order_count, tokens) int32 orders.
        order_count: how many there are.
        choice: device address of the (batch, heads) int32 choice, or 0 for order 0.
        inverse: whether rows go back.
        only: the choice whose heads are moved, while the targets of others are left as they are;
            None moves all.
    """

    batch: int
    heads: int
    tokens: int
    row_bytes: int
    orders: int
    order_count: int
    choice: int
    inverse: bool
    only: int | None = None


def permute_rows(
    permutation: Permutation,
    moves: Sequence[tuple[Rows, Rows]],
    *,
    arch: str,
    sms: int,
    device: int,
) -> None:
    """Move the rows of tensors, on the current stream; one launch for three tensors.

    Args:
        permutation: what to do.
        moves: (source, target) of each tensor; a target shares no memory with any source.
        arch: architecture of the device.
        sms: its multiprocessors.
        device: its ordinal, which is current.
    """
    config = builder(arch, "permute_tokens")
    kernel = launch.load(config, device)
    threads = 32 * config.warps
    p = permutation
    for start in range(0, len(moves), MOST_MOVES):
        some = moves[start : start + MOST_MOVES]
        values: dict[str, Any] = {
            "orders": p.orders,
            "choice": p.choice,
            "order_count": p.order_count,
            "planes": p.batch * p.heads,
            "heads": p.heads,
            "tokens": p.tokens,
            "row_bytes": p.row_bytes,
            "inverse": p.inverse,
            "only": -1 if p.only is None else p.only,
        }
        chunks = 0
        for i, (source, target) in enumerate(some):
            width = _width(p.row_bytes, source, target)
            lanes_log2 = min(5, (p.row_bytes // width - 1).bit_length())
            values |= {
                f"source{i}": source.pointer,
                f"target{i}": target.pointer,
                f"source_stride{i}": source.strides,
                f"target_stride{i}": target.strides,
                f"width{i}": width,
                f"lanes_log2{i}": lanes_log2,
            }
            chunk_rows = (threads >> lanes_log2) * _ROWS
            chunks = max(chunks, p.batch * p.heads * -(-p.tokens // chunk_rows))
        grid = (min(chunks, sms * config.min_ctas), len(some))
        kernel(grid, (threads,), (launch.packed_struct(PERMUTE_PARAMS, values),))


def _width(row_bytes: int, source: Rows, target: Rows) -> int:
    """Bytes that one access can move: what divides the rows' length and all of their addresses."""
    numbers = (row_bytes, source.pointer, target.pointer, *source.strides, *target.strides)
    return next(width for width in (16, 4, 2) if all(n % width == 0 for n in numbers))
