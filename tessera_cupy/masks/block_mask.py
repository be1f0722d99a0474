"""The logical mask: which (query block, KV block) pairs attend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.errors import wrong
from tessera_cupy.masks import bits as token_bit
from tessera_cupy.masks import block_sizes, device_source, draw, formats, readers
from tessera_cupy.masks.block_sizes import KnownSizes, UnreadSizes
from tessera_cupy.masks.device_source import DeviceSource
from tessera_cupy.masks.entries import Entries, dense_entries, sort_entries
from tessera_cupy.masks.geometry import BlockGrid, pair, resolve_grid, uniform_grid

if TYPE_CHECKING:
    from tessera_cupy.masks.key_slices import KeySlices


@dataclass(frozen=True, eq=False, repr=False)
class BlockMask(BlockGrid):
    """Block-sparse attention mask; True means keep.

    Build one with a ``from_*`` method. Each takes arrays on the host or on a GPU
    (NumPy, CuPy, torch, DLPack, ``__array__``, nested lists).

    A mask from the host is a snapshot: later in-place changes to the source are not seen.
    So is one from a GPU with token bits, or elements that are neither bytes nor int32 or int64
    columns, or with ragged blocks above the nominal size. Every other mask from a GPU is *over*
    its arrays: building it copies nothing and waits for nothing, and plans are made on the GPU
    where a plan allows it. Its arrays are an operand of each call, as q, k and v are: the call's
    stream must be behind the work that writes them. After they have changed, call
    :meth:`refresh`; a replay of a captured graph sees the change by itself. Sizes of ragged
    blocks that the host gives are copied to the GPU once, where they are first used; sizes in GPU
    memory (int32 or int64, with ``shape`` given) are an operand as the mask is, each at most the
    nominal block. What the host asks of such a mask (``nnz``, ``density()``,
    ``to_dense()``, ...) waits for the GPU, is read once, and is checked then; :meth:`check`
    checks it at any time.

    Whatever it was built from, a mask has one form: columns ascend in each row, every
    listed block has at least one active token pair, and a block whose valid pairs are
    all active carries no token bits.

    Attributes:
        block_size: (bq, bkv), tokens of a block; nominal on a ragged side.
        shape: (sq, skv), tokens.
        batch: batch axis; 1 broadcasts.
        heads: head axis; 1 broadcasts.
        q_block_sizes: None where query blocks are uniform (the last one may be short),
            else (batch, heads, nq) int32 tokens of each block.
        kv_block_sizes: the same for keys, (batch, heads, nk).
        indptr: (batch * heads * nq + 1,) int64, CSR over block rows.
        indices: (nnz,) int32, block columns.
        partial: (nnz,) int32, index into ``token_bits``, or -1 for a full block.
        token_bits: (P, rows, ceil(columns / 32)) uint32 for the largest block: bit
            ``c % 32`` of word ``c // 32`` of row ``r`` is set when the block's query
            ``r`` attends to its key ``c``.
        device: ordinal of the GPU that the source array was on, or None.
        slices: the key slices that the mask was made of, or None.

    Example:
        >>> mask = BlockMask.from_dense([[1, 0], [1, 1]], (64, 64), shape=(128, 100))
        >>> mask.nnz, mask.active_pairs()
        (3, 10496)
    """

    indptr: NDArray[np.int64] = field(repr=False)
    indices: NDArray[np.int32] = field(repr=False)
    partial: NDArray[np.int32] = field(repr=False)
    token_bits: NDArray[np.uint32] = field(repr=False)
    device: int | None = None
    # Not of ``replace``, which makes another mask.
    slices: KeySlices | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        for array in self._arrays():
            array.setflags(write=False)

    @staticmethod
    def _over(
        source: DeviceSource | None,
        block_size: Sequence[int],
        shape: Sequence[int] | None,
        sizes: tuple[Any, Any],
        read: Callable[..., BlockMask],
    ) -> BlockMask | None:
        """A mask over GPU arrays; None where the host has to read them now.

        ``read`` makes the mask of copies on the host; it takes sizes as every constructor does.
        """
        if source is None:
            return None
        from tessera_cupy.masks.device_mask import DeviceMask, UnreadMask

        tokens = None if shape is None else pair(shape, "shape")
        block = pair(block_size, "block_size")
        if sizes[0] is None and sizes[1] is None:
            return DeviceMask(grid_of(source.num_blocks, source.axes, block, tokens), source, read)
        device = source.layout.device
        q, kv = (
            None if given is None else block_sizes.of_array(given, name, device)
            for given, name in zip(sizes, block_sizes.SIDES, strict=True)
        )
        sides = device_source.bare_sizes(q), device_source.bare_sizes(kv)
        if [side is None for side in sides] != [given is None for given in sizes]:
            return None
        grid = _ragged_grid(source.num_blocks, source.axes, block, tokens, *sides)
        if grid is None:
            return None
        axes = grid.batch, grid.heads
        unread = [isinstance(side, UnreadSizes) for side in sides]
        most = grid.max_block
        most = block[0] if unread[0] else most[0], block[1] if unread[1] else most[1]
        over = device_source.with_sizes(source, (q, kv), most, grid.shape, axes)

        def on_host() -> BlockMask:
            given = {
                name: side.sizes
                if isinstance(side, KnownSizes)
                else block_sizes.read(array, name, nominal)
                for name, side, array, nominal in zip(
                    block_sizes.SIDES, sides, sizes, block, strict=True
                )
                if side is not None
            }
            return read(**given)

        return (UnreadMask if True in unread else DeviceMask)(grid, over, on_host)

    @classmethod
    def from_dense(
        cls,
        mask: Any,
        block_size: Sequence[int],
        shape: Sequence[int] | None = None,
        *,
        q_block_sizes: Any = None,
        kv_block_sizes: Any = None,
    ) -> BlockMask:
        """Build from a block map.

        Args:
            mask: bool or 0/1 integers, (B, H, nq, nk), (H, nq, nk) or (nq, nk). Of bytes in GPU
                memory each that is not 0 keeps.
            block_size: (bq, bkv) in tokens, multiples of 8 from 16 to 384; on a ragged
                side any positive nominal size.
            shape: (sq, skv) in tokens; by default whole blocks, or the sum of the sizes.
            q_block_sizes: tokens of each query block where they differ: integers
                (B, H, nq), (H, nq) or (nq,). Blocks follow each other without padding; one of
                size 0 is absent, and its row counts as empty.
            kv_block_sizes: the same for key blocks.

        Raises:
            TypeError: a dtype that is no mask or no integer.
            ValueError: shapes or sizes disagree, or an integer is neither 0 nor 1.
        """
        over = cls._over(
            device_source.dense(mask),
            block_size,
            shape,
            (q_block_sizes, kv_block_sizes),
            lambda **given: cls.from_dense(
                formats.to_host(mask, "mask")[0] != 0, block_size, shape, **given
            ),
        )
        if over is not None:
            return over
        array, device = formats.to_host(mask, "mask")
        blocks = formats.with_heads(formats.as_bools(array, "mask"), 2, "mask", "nq, nk")
        batch, heads, nq, nk = blocks.shape
        grid = resolve_grid(
            (nq, nk), batch, heads, block_size, shape, q_block_sizes, kv_block_sizes
        )
        return cls._build(dense_entries(blocks), (batch, heads), grid, device)

    @classmethod
    def from_packed_bits(
        cls,
        bits: Any,
        num_blocks: Sequence[int],
        block_size: Sequence[int],
        shape: Sequence[int] | None = None,
        *,
        q_block_sizes: Any = None,
        kv_block_sizes: Any = None,
    ) -> BlockMask:
        """Build from a block map with eight columns to a byte.

        Args:
            bits: uint8 (B, H, nq, ceil(nk / 8)) or fewer leading axes, as
                ``numpy.packbits(mask, axis=-1, bitorder="little")`` gives; column ``c`` is
                bit ``c % 8`` of byte ``c // 8``, and bits past nk are 0.
            num_blocks: (nq, nk).
            block_size: as in :meth:`from_dense`.
            shape: as in :meth:`from_dense`.
            q_block_sizes: as in :meth:`from_dense`.
            kv_block_sizes: as in :meth:`from_dense`.

        Raises:
            TypeError: ``bits`` is not uint8.
            ValueError: shapes or sizes disagree, or a bit past nk is set.
        """
        counts = pair(num_blocks, "num_blocks")
        over = cls._over(
            device_source.packed(bits, counts),
            block_size,
            shape,
            (q_block_sizes, kv_block_sizes),
            lambda **given: cls.from_packed_bits(
                formats.to_host(bits, "bits")[0], counts, block_size, shape, **given
            ),
        )
        if over is not None:
            return over
        array, device = formats.to_host(bits, "bits")
        blocks = readers.packed_blocks(array, counts)
        batch, heads = blocks.shape[:2]
        grid = resolve_grid(counts, batch, heads, block_size, shape, q_block_sizes, kv_block_sizes)
        return cls._build(dense_entries(blocks), (batch, heads), grid, device)

    @classmethod
    @readers.refuse_matrix
    def from_csr(
        cls,
        indptr: Any,
        indices: Any,
        num_blocks: Sequence[int],
        block_size: Sequence[int],
        shape: Sequence[int] | None = None,
        *,
        heads: int = 1,
        batch: int = 1,
        q_block_sizes: Any = None,
        kv_block_sizes: Any = None,
        partial: Any = None,
        token_bits: Any = None,
    ) -> BlockMask:
        """Build from one flat block-CSR over batch * heads * nq rows, batch-major.

        The attributes of a mask, given back, make the same mask.

        Args:
            indptr: (batch * heads * nq + 1,) integers, rising from 0 to nnz.
            indices: (nnz,) integers, block columns in any order within a row.
            num_blocks: (nq, nk).
            block_size: as in :meth:`from_dense`.
            shape: as in :meth:`from_dense`.
            heads: head axis of the mask.
            batch: batch axis of the mask.
            q_block_sizes: as in :meth:`from_dense`.
            kv_block_sizes: as in :meth:`from_dense`.
            partial: (nnz,) integers, index into ``token_bits``, or -1 for a full block.
            token_bits: (P, rows, words) uint32 as in the attribute of that name.

        Raises:
            TypeError: a dtype that is no integer, or a matrix in place of its arrays.
            ValueError: a column out of range or listed twice in a row, an ``indptr`` that
                does not fit, or shapes or sizes that disagree.
        """
        counts = pair(num_blocks, "num_blocks")
        axes = readers.positive_axes(batch, heads)
        if partial is None and token_bits is None:
            over = cls._over(
                device_source.csr(indptr, indices, axes, counts),
                block_size,
                shape,
                (q_block_sizes, kv_block_sizes),
                lambda **given: cls.from_csr(
                    formats.to_host(indptr, "indptr")[0],
                    formats.to_host(indices, "indices")[0],
                    counts,
                    block_size,
                    shape,
                    batch=batch,
                    heads=heads,
                    **given,
                ),
            )
            if over is not None:
                return over
        grid = resolve_grid(counts, *axes, block_size, shape, q_block_sizes, kv_block_sizes)
        entries, device = readers.csr_entries(
            indptr, indices, counts, axes, partial, token_bits, grid.max_block
        )
        return cls._build(sort_entries(entries, counts, heads), axes, grid, device)

    @classmethod
    def from_lists(
        cls,
        indices: Any,
        counts: Any,
        num_kv_blocks: int,
        block_size: Sequence[int],
        shape: Sequence[int] | None = None,
        *,
        q_block_sizes: Any = None,
        kv_block_sizes: Any = None,
    ) -> BlockMask:
        """Build from padded lists of columns, as VSA, FlexAttention and FA4 hold them.

        Args:
            indices: integers (B, H, nq, K), (H, nq, K) or (nq, K), in any order; entries
                past a row's count are ignored.
            counts: integers, the same leading axes: how many entries of each row count.
            num_kv_blocks: nk.
            block_size: as in :meth:`from_dense`.
            shape: as in :meth:`from_dense`.
            q_block_sizes: as in :meth:`from_dense`.
            kv_block_sizes: as in :meth:`from_dense`.

        Raises:
            TypeError: a dtype that is no integer.
            ValueError: a count outside 0 to K, a column out of range or listed twice in a
                row, or shapes or sizes that disagree.
        """
        over = cls._over(
            device_source.lists(indices, counts, num_kv_blocks),
            block_size,
            shape,
            (q_block_sizes, kv_block_sizes),
            lambda **given: cls.from_lists(
                formats.to_host(indices, "indices")[0],
                formats.to_host(counts, "counts")[0],
                num_kv_blocks,
                block_size,
                shape,
                **given,
            ),
        )
        if over is not None:
            return over
        entries, axes, device = readers.list_entries(indices, counts, num_kv_blocks)
        batch, heads, blocks = axes[0], axes[1], (axes[2], num_kv_blocks)
        grid = resolve_grid(blocks, batch, heads, block_size, shape, q_block_sizes, kv_block_sizes)
        return cls._build(sort_entries(entries, blocks, heads), (batch, heads), grid, device)

    @classmethod
    def from_bsr(cls, bsr: Any, shape: Sequence[int] | None = None) -> BlockMask:
        """Build from ``scipy.sparse`` block-sparse-row matrices over tokens.

        Args:
            bsr: a ``bsr_array`` or ``bsr_matrix``, or a list of them, one a head. Their
                blocksize is the mask's block size; an element that is not 0 is kept.
            shape: (sq, skv) in tokens when shorter than the matrix, which has whole blocks.

        Raises:
            TypeError: something else than BSR matrices.
            ValueError: matrices that disagree, an illegal blocksize, or a block listed twice in
                a row.
        """
        entries, heads, block_size, num_blocks = readers.bsr_entries(bsr)
        grid = resolve_grid(num_blocks, 1, heads, block_size, shape, None, None)
        return cls._build(sort_entries(entries, num_blocks, heads), (1, heads), grid, None)

    @classmethod
    def from_tokens(cls, token_mask: Any, block_size: Sequence[int]) -> BlockMask:
        """Build from a token mask, exactly: mixed blocks keep one bit a token pair.

        Args:
            token_mask: bool or 0/1 integers, (B, H, sq, skv), (H, sq, skv) or (sq, skv).
            block_size: (bq, bkv) in tokens, multiples of 8 from 16 to 384.

        Raises:
            TypeError: a dtype that is no mask.
            ValueError: an illegal shape or block size.
        """
        array, device = formats.to_host(token_mask, "token_mask")
        tokens = formats.as_bools(array, "token_mask")
        tokens = formats.with_heads(tokens, 2, "token_mask", "sq, skv")
        batch, heads, sq, skv = tokens.shape
        grid = uniform_grid(batch, heads, block_size, (sq, skv))
        entries = token_bit.token_entries(tokens, grid.block_size)
        return cls._build(entries, (batch, heads), grid, device)

    @classmethod
    def _build(
        cls, entries: Entries, axes: tuple[int, int], grid: BlockGrid, device: int | None
    ) -> BlockMask:
        entries = token_bit.refine(entries.broadcast(axes, (grid.batch, grid.heads)), grid)
        return cls(
            block_size=grid.block_size,
            shape=grid.shape,
            batch=grid.batch,
            heads=grid.heads,
            q_block_sizes=grid.q_block_sizes,
            kv_block_sizes=grid.kv_block_sizes,
            indptr=entries.indptr,
            indices=entries.indices,
            partial=entries.partial,
            token_bits=entries.bits,
            device=device,
        )

    @property
    def source(self) -> DeviceSource | None:
        """The arrays in GPU memory that the mask is over; None for a snapshot."""
        return None

    @property
    def version(self) -> int:
        """How often :meth:`refresh` was called; plans of older versions are not used again."""
        return 0

    @property
    def has_token_bits(self) -> bool:
        """Whether some blocks are partial."""
        return len(self.token_bits) > 0

    @property
    def of_slices(self) -> bool:
        """Whether the mask was made of key slices."""
        return self.slices is not None

    def on_host(self) -> BlockMask:
        """The mask as a snapshot, read from the GPU if it was not yet; a snapshot is its own."""
        return self

    def refresh(self) -> None:
        """Take up what has changed in the GPU arrays that the mask is over.

        Figures that were read before are dropped, and so are plans' arrays: the next call, or the
        next run of a plan, reads the new contents. A plan keeps its choice of mapping and kernel;
        :func:`tessera_cupy.block_sparse_attention` chooses again. Nothing waits.

        Raises:
            ValueError: the mask is a snapshot, which sees no change.
        """
        raise ValueError(
            wrong(
                "mask",
                "a mask over an array in GPU memory",
                "a snapshot, as those of host arrays and token bits are",
                "build a new mask",
            )
        )

    def check(self) -> None:
        """Check the contents of a mask over GPU arrays, which waits for the GPU; others are right.

        Raises:
            ValueError: what the same arrays on the host would raise when the mask is built.
        """

    @property
    def nnz(self) -> int:
        """Active blocks over all heads of the mask."""
        return len(self.indices)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self._arrays())

    def row_counts(self) -> NDArray[np.int64]:
        """Active blocks of each row: (batch, heads, nq) int64."""
        return np.diff(self.indptr).reshape(self.batch, self.heads, self.num_blocks[0])

    def active_pairs(self) -> int:
        """Exact number of active (query, key) token pairs over the mask's batch and heads."""
        return self._active_pairs

    def density(self) -> float:
        """Kept fraction of all token pairs, exact for tails and token bits; 0 without tokens."""
        total = self.batch * self.heads * self.shape[0] * self.shape[1]
        return self.active_pairs() / total if total else 0.0

    def run_coverage(self) -> float:
        """Fraction of active blocks in runs of two or more neighbours of a row; 0 if empty."""
        return self._run_coverage

    def to_dense(self) -> NDArray[np.bool_]:
        """Block map, (batch, heads, nq, nk) bool; partial blocks are True."""
        nq, nk = self.num_blocks
        dense = np.zeros((self.batch * self.heads * nq, nk), np.bool_)
        dense[self._entries.rows(), self.indices] = True
        return dense.reshape(self.batch, self.heads, nq, nk)

    def to_tokens(self) -> NDArray[np.bool_]:
        """Token mask, (batch, heads, sq, skv) bool: exact, so only for masks that are small."""
        nq, nk = self.num_blocks
        rows = self._entries.rows()
        full = self.partial < 0
        flat = np.zeros((self.batch * self.heads * nq, nk), np.bool_)
        flat[rows[full], self.indices[full]] = True
        dense = flat.reshape(self.batch * self.heads, nq, nk)
        shape = (self.batch, self.heads)
        q_starts = np.broadcast_to(self.q_starts(), (*shape, nq + 1)).reshape(-1, nq + 1)
        kv_starts = np.broadcast_to(self.kv_starts(), (*shape, nk + 1)).reshape(-1, nk + 1)
        tokens = np.empty((len(dense), *self.shape), np.bool_)
        for head, blocks in enumerate(dense):
            wide = np.repeat(blocks, np.diff(kv_starts[head]), axis=1)
            tokens[head] = np.repeat(wide, np.diff(q_starts[head]), axis=0)
        mixed = ~full
        heads, blocks = np.divmod(rows[mixed], max(nq, 1))
        q_first, kv_first = q_starts[heads, blocks], kv_starts[heads, self.indices[mixed]]
        entry, row, column = np.nonzero(token_bit.unpack(self.token_bits[self.partial[mixed]]))
        tokens[heads[entry], q_first[entry] + row, kv_first[entry] + column] = True
        return tokens.reshape(*shape, *self.shape)

    def __repr__(self) -> str:
        return draw.draw(self)

    @cached_property
    def _entries(self) -> Entries:
        return Entries(self.indptr, self.indices, self.partial, self.token_bits)

    @cached_property
    def _active_pairs(self) -> int:
        return token_bit.pairs(self._entries, self)

    @cached_property
    def _run_coverage(self) -> float:
        if not self.nnz:
            return 0.0
        follows = np.zeros(self.nnz + 1, np.bool_)
        np.equal(self.indices[1:], self.indices[:-1] + 1, out=follows[1:-1])
        follows[self.indptr] = False  # the first block of a row follows none
        return int(np.count_nonzero(follows[1:] | follows[:-1])) / self.nnz

    def _arrays(self) -> list[NDArray[Any]]:
        arrays: list[NDArray[Any]] = [self.indptr, self.indices, self.partial, self.token_bits]
        arrays += [a for a in (self.q_block_sizes, self.kv_block_sizes) if a is not None]
        return arrays


@lru_cache(maxsize=256)
def grid_of(
    num_blocks: tuple[int, int],
    axes: tuple[int, int],
    block_size: tuple[int, int],
    shape: tuple[int, int] | None,
) -> BlockGrid:
    """The grid of uniform blocks, checked once for masks of one geometry."""
    return resolve_grid(num_blocks, *axes, block_size, shape, None, None)


@lru_cache(maxsize=64)
def _ragged_grid(
    num_blocks: tuple[int, int],
    axes: tuple[int, int],
    block_size: tuple[int, int],
    shape: tuple[int, int] | None,
    q: KnownSizes | UnreadSizes | None,
    kv: KnownSizes | UnreadSizes | None,
) -> BlockGrid | None:
    """The grid of blocks with sizes, with a stand-in for those in GPU memory.

    None where the host has to read all: without a shape, or with blocks above the nominal size.
    """
    sizes: list[Any] = []
    for side, count, most, tokens in zip(
        (q, kv), num_blocks, block_size, shape or (None, None), strict=True
    ):
        if isinstance(side, UnreadSizes):
            fits = side.operand.shape[2] == count and tokens is not None and most > 0
            made = block_sizes.stand_in(side.axes, count, most, tokens or 0) if fits else None
            if made is None:
                return None
            sizes.append(made)
        else:
            sizes.append(None if side is None else side.sizes)
    grid = resolve_grid(num_blocks, *axes, block_size, shape, *sizes)
    over = [most > nominal for most, nominal in zip(grid.max_block, block_size, strict=True)]
    return None if True in over else grid
