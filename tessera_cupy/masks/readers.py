"""Packed bits, CSR, padded lists and BSR matrices, checked and read into entries."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.errors import wrong
from tessera_cupy.masks import bits as token_bit
from tessera_cupy.masks.entries import Entries, full_entries, place
from tessera_cupy.masks.formats import as_integers, is_sparse, to_host, with_heads
from tessera_cupy.masks.geometry import check_blocks

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def positive_axes(batch: int, heads: int) -> tuple[int, int]:
    """Check the batch and head axes that a caller names as numbers.

    Raises:
        TypeError: one is no integer.
        ValueError: one is below 1.
    """
    for name, axis in (("batch", batch), ("heads", heads)):
        if isinstance(axis, bool) or not isinstance(axis, int | np.integer):
            raise TypeError(wrong(name, "an int", repr(axis), "count the entries of that axis"))
    if min(batch, heads) < 1:
        raise ValueError(
            wrong(
                "batch, heads",
                "at least one batch and one head",
                (batch, heads),
                "use an axis of 1, which broadcasts",
            )
        )
    return int(batch), int(heads)


def packed_blocks(bits: NDArray[Any], num_blocks: tuple[int, int]) -> NDArray[np.bool_]:
    """Unpack a (..., nq, ceil(nk / 8)) uint8 block map into (B, H, nq, nk) bool."""
    nq, nk = num_blocks
    if bits.dtype != np.uint8:
        raise TypeError(
            wrong(
                "bits",
                "uint8",
                f"dtype {bits.dtype}",
                'pack with numpy.packbits(mask, axis=-1, bitorder="little")',
            )
        )
    octets = with_heads(bits, 2, "bits", "nq, ceil(nk / 8)")
    if octets.shape[2:] != (nq, -(-nk // 8)):
        raise ValueError(
            wrong(
                "bits",
                f"{nq} rows of {-(-nk // 8)} bytes for {nq} x {nk} blocks",
                f"shape {bits.shape}",
                "pack along the last axis, and give num_blocks as (nq, nk)",
            )
        )
    if nk % 8 and (octets[..., -1] >> (nk % 8)).any():
        raise ValueError(
            wrong(
                "bits",
                f"zeros past column {nk - 1}",
                "a set bit there",
                'pack with bitorder="little", and give the true number of columns',
            )
        )
    return np.unpackbits(octets, axis=-1, count=nk, bitorder="little").view(np.bool_)


def refuse_matrix(
    method: Callable[_Arguments, _Result],
) -> Callable[_Arguments, _Result]:
    """Make a constructor from CSR arrays say what to do with a whole matrix.

    Around the method, since a caller with a matrix leaves the other arguments out.
    """

    @wraps(method)
    def checked(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        for argument in (*args, *kwargs.values()):
            if is_sparse(argument):
                raise TypeError(
                    wrong(
                        "indptr",
                        "the offsets of a CSR, and its columns as indices",
                        f"a whole {type(argument).__name__}",
                        "for a matrix with an element a block pass matrix.indptr, matrix.indices, "
                        "matrix.shape and the block size; for one with an element a token call "
                        "BlockMask.from_bsr(matrix.tobsr(blocksize=(64, 64)))",
                    )
                )
        return method(*args, **kwargs)

    return checked


def csr_entries(
    indptr: Any,
    indices: Any,
    num_blocks: tuple[int, int],
    axes: tuple[int, int],
    partial: Any,
    token_bits: Any,
    block: tuple[int, int],
) -> tuple[Entries, int | None]:
    """Check a flat CSR with optional token bits; the columns may be unsorted."""
    offsets, _ = to_host(indptr, "indptr")
    columns, device = to_host(indices, "indices")
    starts = _read_indptr(as_integers(offsets, "indptr"), num_blocks[0], axes, columns.shape)
    columns = as_integers(columns, "indices")
    fix = "list block columns, not tokens, and give num_blocks as (query, key) blocks"
    _check_columns(columns, starts, num_blocks, axes[1], fix)
    entries = full_entries(starts, columns.astype(np.int32))
    if partial is None and token_bits is None:
        return entries, device
    return _with_bits(entries, partial, token_bits, block), device


def list_entries(
    indices: Any, counts: Any, num_kv_blocks: int
) -> tuple[Entries, tuple[int, int, int], int | None]:
    """Check padded lists of columns; returns also the (batch, heads, nq) axes."""
    if num_kv_blocks < 0:
        raise ValueError(
            wrong("num_kv_blocks", "no negative number", num_kv_blocks, "count the block columns")
        )
    listed, device = to_host(indices, "indices")
    listed = with_heads(as_integers(listed, "indices"), 2, "indices", "nq, K")
    lengths, _ = to_host(counts, "counts")
    lengths = with_heads(as_integers(lengths, "counts"), 1, "counts", "nq")
    batch, heads, nq, width = listed.shape
    if lengths.shape != (batch, heads, nq):
        raise ValueError(
            wrong(
                "counts",
                f"shape {listed.shape[:3]}, the leading axes of indices",
                f"shape {lengths.shape}",
                "give one count for each row of indices",
            )
        )
    if lengths.size and (lengths.min() < 0 or lengths.max() > width):
        raise ValueError(
            wrong(
                "counts",
                f"0 to {width}, the width of indices",
                f"values {lengths.min()} to {lengths.max()}",
                "count the valid entries of each row",
            )
        )
    flat_counts = lengths.reshape(-1).astype(np.int64)
    starts = np.zeros(len(flat_counts) + 1, np.int64)
    np.cumsum(flat_counts, out=starts[1:])
    if len(flat_counts) and flat_counts.min() == width:
        columns: NDArray[Any] = listed.reshape(-1)
    else:
        columns = listed[np.arange(width) < lengths[..., None]]
    fix = "list block columns, not tokens; entries past counts are not looked at"
    _check_columns(columns, starts, (nq, num_kv_blocks), heads, fix)
    return full_entries(starts, columns.astype(np.int32)), (batch, heads, nq), device


def bsr_entries(bsr: Any) -> tuple[Entries, int, tuple[int, int], tuple[int, int]]:
    """Read BSR matrices, one a head: entries with bits, heads, block size, number of blocks."""
    matrices = list(bsr) if isinstance(bsr, (list, tuple)) else [bsr]
    for matrix in matrices:
        if getattr(matrix, "format", None) != "bsr":
            raise TypeError(
                wrong(
                    "bsr",
                    "a scipy.sparse bsr_array or bsr_matrix, or a list of them",
                    type(matrix).__name__,
                    "convert with .tobsr(blocksize=(bq, bkv))",
                )
            )
    kinds = {(tuple(m.shape), tuple(m.blocksize)) for m in matrices}
    if len(kinds) != 1:
        raise ValueError(
            wrong(
                "bsr",
                "one matrix a head, all of one shape and blocksize",
                f"(shape, blocksize) of {sorted(kinds)}",
                "convert all with the same blocksize",
            )
        )
    (sq, skv), (bq, bkv) = kinds.pop()
    check_blocks((int(bq), int(bkv)), "convert with .tobsr(blocksize=(64, 64)), for example")
    starts = [np.zeros(1, np.int64)]
    for matrix in matrices:
        starts.append(starts[-1][-1] + matrix.indptr[1:].astype(np.int64))
    nnz = int(starts[-1][-1])
    entries = Entries(
        np.concatenate(starts),
        np.concatenate([m.indices for m in matrices]).astype(np.int32),
        np.arange(nnz, dtype=np.int32),
        np.concatenate([token_bit.pack(m.data != 0) for m in matrices]),
    )
    return entries, len(matrices), (int(bq), int(bkv)), (int(sq // bq), int(skv // bkv))


def _read_indptr(
    indptr: NDArray[Any], nq: int, axes: tuple[int, int], columns: tuple[int, ...]
) -> NDArray[np.int64]:
    rows = axes[0] * axes[1] * nq
    if len(columns) != 1:
        raise ValueError(wrong("indices", "one axis", f"shape {columns}", "flatten it"))
    if indptr.shape != (rows + 1,):
        raise ValueError(
            wrong(
                "indptr",
                f"{rows + 1} offsets, for {axes[0]} x {axes[1]} heads of {nq} rows and the end",
                f"shape {indptr.shape}",
                "give batch, heads and num_blocks as the offsets were made for",
            )
        )
    starts = indptr.astype(np.int64)
    if starts[0] != 0 or (starts[1:] < starts[:-1]).any() or starts[-1] != columns[0]:
        raise ValueError(
            wrong(
                "indptr",
                f"offsets that rise from 0 to {columns[0]}, the length of indices",
                f"first {starts[0]}, last {starts[-1]}"
                + (", falling in between" if (starts[1:] < starts[:-1]).any() else ""),
                "use the cumulative sum of the row counts",
            )
        )
    return starts


def _check_columns(
    columns: NDArray[Any],
    starts: NDArray[np.int64],
    num_blocks: tuple[int, int],
    heads: int,
    fix: str,
) -> None:
    nq, nk = num_blocks
    if not columns.size or (columns.min() >= 0 and columns.max() < nk):
        return
    first = int(np.flatnonzero((columns < 0) | (columns >= nk))[0])
    row = int(np.searchsorted(starts, first, side="right")) - 1
    raise ValueError(
        wrong(
            "indices",
            f"block columns from 0 to {nk - 1}",
            f"column {columns[first]} in {place(row, nq, heads)}",
            fix,
        )
    )


def _with_bits(entries: Entries, partial: Any, token_bits: Any, block: tuple[int, int]) -> Entries:
    if partial is None or token_bits is None:
        given, missing = ("token_bits", "partial") if partial is None else ("partial", "token_bits")
        raise ValueError(wrong(missing, f"an array, as {given} is given", None, "give both"))
    which = as_integers(to_host(partial, "partial")[0], "partial")
    bits, _ = to_host(token_bits, "token_bits")
    if bits.dtype != np.uint32:
        raise TypeError(
            wrong("token_bits", "uint32", f"dtype {bits.dtype}", "pack 32 columns to a word")
        )
    wanted = (block[0], token_bit.words(block[1]))
    if bits.ndim != 3 or bits.shape[1:] != wanted:
        raise ValueError(
            wrong(
                "token_bits",
                f"shape (P, {wanted[0]}, {wanted[1]}), for blocks of up to {block[0]} x {block[1]}",
                f"shape {bits.shape}",
                "pack every block to the largest size",
            )
        )
    if which.shape != entries.indices.shape:
        raise ValueError(
            wrong(
                "partial",
                f"shape {entries.indices.shape}, one for each of indices",
                f"shape {which.shape}",
                "give -1 for full blocks",
            )
        )
    if which.size and (which.min() < -1 or which.max() >= len(bits)):
        raise ValueError(
            wrong(
                "partial",
                f"-1 to {len(bits) - 1}, indices into token_bits",
                f"values {which.min()} to {which.max()}",
                "give -1 for full blocks",
            )
        )
    return Entries(entries.indptr, entries.indices, which.astype(np.int32), bits)
