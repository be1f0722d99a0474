"""Key slices: groups of query rows, each of which attends to single keys of its own choice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.errors import wrong
from tessera_cupy.masks import bits as token_bit
from tessera_cupy.masks import device_source, draw, formats
from tessera_cupy.masks.block_mask import BlockMask
from tessera_cupy.masks.device_source import DeviceSource
from tessera_cupy.masks.entries import dense_entries
from tessera_cupy.masks.geometry import check_blocks, pair
from tessera_cupy.masks.readers import packed_blocks, positive_axes

#: Query rows of a group.
GROUPS = (16, 64, 128, 192)

#: Keys of a block, where slices run as blocks: the fewest that there are, which waste the fewest
#: columns. On 7,800 tokens of real video, in tiles of 128 x 192, Chipmunk's 6% of the keys take 944
#: steps in blocks of 16 keys, 1,412 of 32 and 2,019 of 64; FG-Attn's 30% take 2,297, 2,455 and
#: 2,485; 10% at random, of 4,096 tokens for groups of 128, take 579, 676 and 700. The price is
#: bits, since a word holds those of 32 keys: up to 1.7 times as many bytes as with 32 or 64.
BLOCK_KV = 16


@dataclass(frozen=True, eq=False, repr=False)
class SliceBlocks(BlockMask):
    """The exact blocks that key slices run as: a group of rows by some keys, with token bits."""


@dataclass(frozen=True, eq=False, repr=False)
class KeySlices:
    """Attention mask of slices: ``group`` neighbouring query rows by one key; listed means keep.

    Build one with a ``from_*`` method. Each takes arrays on the host or on a GPU (NumPy, CuPy,
    torch, DLPack, ``__array__``, nested lists). Wherever a mask is asked for, slices are taken too.
    Plans that gather read single keys; in others they run as blocks with token bits
    (:meth:`to_block_mask`), made once for an object.

    Slices from the host are a snapshot, as are those of a token mask, or of arrays in GPU memory
    whose elements are neither bytes (of a map) nor int32 or int64 (of lists). All others from a GPU
    are *over* their arrays, as a :class:`BlockMask` is: building copies nothing and waits for
    nothing, and plans that gather are made on the GPU. There all keys are gathered, where the host
    makes blocks of long runs. Keys out of range, and those that a group lists again, are left out
    then; :meth:`check` and :meth:`tessera_cupy.Plan.check` tell of them. After the arrays have
    changed, call :meth:`refresh`.

    Slices are those of FG-Attn, arXiv 2509.16518, and Chipmunk, arXiv 2506.03275.

    Attributes:
        group: query rows of a group, one of :data:`GROUPS`; the last group may be short.
        shape: (sq, skv), tokens.
        batch: batch axis; 1 broadcasts.
        heads: head axis; 1 broadcasts.
        indptr: (batch * heads * groups + 1,) int64, CSR over groups, batch-major.
        indices: (nnz,) int32, keys, ascending in each group.
        device: ordinal of the GPU that the source array was on, or None.

    Example:
        >>> slices = KeySlices.from_groups([[1, 0, 1], [0, 0, 0]], 16, (20, 3))
        >>> slices.nnz, slices.active_pairs()
        (2, 32)
    """

    group: int
    shape: tuple[int, int]
    batch: int
    heads: int
    indptr: NDArray[np.int64] = field(repr=False)
    indices: NDArray[np.int32] = field(repr=False)
    device: int | None = None

    def __post_init__(self) -> None:
        self.indptr.setflags(write=False)
        self.indices.setflags(write=False)

    @classmethod
    def from_csr(
        cls,
        indptr: Any,
        indices: Any,
        group: int,
        shape: Sequence[int],
        *,
        heads: int = 1,
        batch: int = 1,
    ) -> KeySlices:
        """Build from one flat CSR over batch * heads * groups rows, batch-major.

        The attributes of slices, given back, make the same slices.

        Args:
            indptr: (batch * heads * groups + 1,) integers, rising from 0 to nnz.
            indices: (nnz,) integers, keys in any order within a group.
            group: query rows of a group, one of :data:`GROUPS`.
            shape: (sq, skv) in tokens; there are ``ceil(sq / group)`` groups.
            heads: head axis of the slices.
            batch: batch axis of the slices.

        Raises:
            TypeError: a dtype that is no integer.
            ValueError: a key out of range or listed twice in a group, an ``indptr`` that does not
                fit, or another group size.
        """
        tokens = _checked_shape(group, shape)
        axes = positive_axes(batch, heads)
        rows = (_count(tokens[0], group), tokens[1])
        over = cls._over(
            device_source.csr(indptr, indices, axes, rows),
            group,
            tokens,
            lambda: cls.from_csr(
                formats.to_host(indptr, "indptr")[0],
                formats.to_host(indices, "indices")[0],
                group,
                tokens,
                heads=heads,
                batch=batch,
            ),
        )
        if over is not None:
            return over
        offsets = formats.as_integers(formats.to_host(indptr, "indptr")[0], "indptr")
        keys, device = formats.to_host(indices, "indices")
        keys = formats.as_integers(keys, "indices")
        _check_offsets(offsets, keys.shape, axes, _count(tokens[0], group))
        return cls._build(offsets.astype(np.int64), keys, group, tokens, axes, device)

    @classmethod
    def from_lists(cls, indices: Any, counts: Any, group: int, shape: Sequence[int]) -> KeySlices:
        """Build from padded lists of keys.

        Args:
            indices: integers (B, H, groups, K), (H, groups, K) or (groups, K), in any order;
                entries past a group's count are ignored.
            counts: integers, the same leading axes: how many entries of each group count.
            group: query rows of a group, one of :data:`GROUPS`.
            shape: (sq, skv) in tokens.

        Raises:
            TypeError: a dtype that is no integer.
            ValueError: a count outside 0 to K, a key out of range or listed twice in a group,
                shapes that disagree, or another group size.
        """
        tokens = _checked_shape(group, shape)
        over = cls._over(
            device_source.lists(indices, counts, tokens[1]),
            group,
            tokens,
            lambda: cls.from_lists(
                formats.to_host(indices, "indices")[0],
                formats.to_host(counts, "counts")[0],
                group,
                tokens,
            ),
        )
        if over is not None:
            return over
        listed, device = formats.to_host(indices, "indices")
        listed = formats.with_heads(
            formats.as_integers(listed, "indices"), 2, "indices", "groups, K"
        )
        lengths = formats.as_integers(formats.to_host(counts, "counts")[0], "counts")
        lengths = formats.with_heads(lengths, 1, "counts", "groups")
        _check_groups("indices", listed.shape[2], tokens[0], group)
        width = listed.shape[3]
        if lengths.shape != listed.shape[:3]:
            expected = f"shape {listed.shape[:3]}, the leading axes of indices"
            fix = "give one count for each group"
            raise ValueError(wrong("counts", expected, f"shape {lengths.shape}", fix))
        if lengths.size and (lengths.min() < 0 or lengths.max() > width):
            got = f"values {lengths.min()} to {lengths.max()}"
            fix = "count the valid entries of each group"
            raise ValueError(wrong("counts", f"0 to {width}, the width of indices", got, fix))
        keys = listed[np.arange(width) < lengths[..., None]]
        starts = np.zeros(lengths.size + 1, np.int64)
        np.cumsum(lengths.ravel(), out=starts[1:])
        return cls._build(starts, keys, group, tokens, listed.shape[:2], device)

    @classmethod
    def from_groups(cls, mask: Any, group: int, shape: Sequence[int] | None = None) -> KeySlices:
        """Build from a map of groups and keys.

        Args:
            mask: bool or 0/1 integers, (B, H, groups, skv), (H, groups, skv) or (groups, skv). Of
                bytes in GPU memory each that is not 0 keeps.
            group: query rows of a group, one of :data:`GROUPS`.
            shape: (sq, skv) in tokens; by default whole groups.

        Raises:
            TypeError: a dtype that is no mask.
            ValueError: shapes that disagree, or another group size.
        """
        group_count(0, group)
        source = device_source.dense(mask)
        if source is not None:
            groups, keys = source.num_blocks
            over = cls._over(
                source,
                group,
                _checked_shape(group, (groups * group, keys) if shape is None else shape),
                lambda: cls.from_groups(formats.to_host(mask, "mask")[0] != 0, group, shape),
            )
            if over is not None:
                return over
        array, device = formats.to_host(mask, "mask")
        kept = formats.with_heads(formats.as_bools(array, "mask"), 2, "mask", "groups, skv")
        tokens = _checked_shape(group, (kept.shape[2] * group, kept.shape[3]))
        if shape is not None:
            tokens = _checked_shape(group, shape)
            _check_groups("mask", kept.shape[2], tokens[0], group)
            if kept.shape[3] != tokens[1]:
                expected, got = f"{tokens[1]} keys, as in shape", f"{kept.shape[3]}"
                raise ValueError(wrong("mask", expected, got, "give each key one column"))
        entries = dense_entries(kept)
        axes = (kept.shape[0], kept.shape[1])
        return cls(group, tokens, *axes, entries.indptr, entries.indices, device)

    @classmethod
    def from_packed_bits(
        cls, bits: Any, group: int, shape: Sequence[int], *, most: int | None = None
    ) -> KeySlices:
        """Build from a map of groups and keys with eight keys to a byte.

        Args:
            bits: uint8 (B, H, groups, ceil(skv / 8)) or fewer leading axes, as
                ``numpy.packbits(mask, axis=-1, bitorder="little")`` gives; key ``j`` is bit
                ``j % 8`` of byte ``j // 8``, and bits past skv are 0.
            group: query rows of a group, one of :data:`GROUPS`.
            shape: (sq, skv) in tokens.
            most: how many keys a map in GPU memory keeps at most, over all groups of its heads,
                where that is known: plans that gather have room for as many at once, where
                otherwise they have it for what the geometry needed last.

        Raises:
            TypeError: ``bits`` is not uint8, or ``most`` no integer.
            ValueError: shapes that disagree, a bit past skv, another group size, or ``most``
                below 0.

        >>> KeySlices.from_packed_bits(np.array([[5], [0]], np.uint8), 16, (20, 3)).nnz
        2
        """
        tokens = _checked_shape(group, shape)
        rows = (_count(tokens[0], group), tokens[1])
        _check_most(most)
        source = device_source.packed(bits, rows)
        if source is not None and most is not None:
            source = device_source.at_most(source, most)
        over = cls._over(
            source,
            group,
            tokens,
            lambda: cls.from_packed_bits(formats.to_host(bits, "bits")[0], group, tokens),
        )
        if over is not None:
            return over
        array, device = formats.to_host(bits, "bits")
        entries = dense_entries(kept := packed_blocks(array, rows))
        axes = (kept.shape[0], kept.shape[1])
        return cls(group, tokens, *axes, entries.indptr, entries.indices, device)

    @classmethod
    def from_tokens(cls, token_mask: Any, group: int) -> KeySlices:
        """Build from a token mask whose rows are equal within each group.

        Args:
            token_mask: bool or 0/1 integers, (B, H, sq, skv), (H, sq, skv) or (sq, skv).
            group: query rows of a group, one of :data:`GROUPS`.

        Raises:
            TypeError: a dtype that is no mask.
            ValueError: two rows of a group differ; the message names the first such group.
        """
        array, device = formats.to_host(token_mask, "token_mask")
        tokens = formats.with_heads(
            formats.as_bools(array, "token_mask"), 2, "token_mask", "sq, skv"
        )
        batch, heads, sq, skv = tokens.shape
        _checked_shape(group, (sq, skv))
        first = tokens[:, :, ::group]
        for b, h in np.ndindex(batch, heads):
            differs = tokens[b, h] != np.repeat(first[b, h], group, axis=0)[:sq]
            rows = np.flatnonzero(differs.any(axis=1))
            if len(rows):
                at = int(rows[0])
                raise ValueError(
                    wrong(
                        "token_mask",
                        f"equal rows in each group of {group}",
                        f"row {at} unlike row {at // group * group} in batch {b}, head {h}, "
                        f"group {at // group}",
                        "take smaller groups, or BlockMask.from_tokens, which keeps any mask",
                    )
                )
        entries = dense_entries(first)
        return cls(group, (sq, skv), batch, heads, entries.indptr, entries.indices, device)

    @staticmethod
    def _over(
        source: DeviceSource | None,
        group: int,
        shape: tuple[int, int],
        read: Callable[[], KeySlices],
    ) -> KeySlices | None:
        """Slices over GPU arrays; None where the host has to read them now, or to refuse them.

        ``read`` makes the slices of copies on the host.
        """
        if source is None or source.num_blocks != (_count(shape[0], group), shape[1]):
            return None
        from tessera_cupy.masks.device_slices import DeviceSliceBlocks, DeviceSlices

        return DeviceSlices(DeviceSliceBlocks(source, group, shape, read))

    @classmethod
    def _build(
        cls,
        starts: NDArray[np.int64],
        keys: NDArray[Any],
        group: int,
        shape: tuple[int, int],
        axes: Sequence[int],
        device: int | None,
    ) -> KeySlices:
        rows = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
        _check_keys(keys, rows, group, shape, axes[1])
        # Of both sorted together: one number for a place of the map.
        places = rows * shape[1] + keys.astype(np.int64)
        places.sort()
        repeated = np.flatnonzero(places[1:] == places[:-1])
        if len(repeated):
            row, key = divmod(int(places[repeated[0]]), shape[1])
            got = f"key {key} twice in {_place(row, group, shape, axes[1])}"
            raise ValueError(
                wrong("indices", "each key at most once in a group", got, "remove the duplicates")
            )
        sorted_keys = (places - rows * shape[1]).astype(np.int32)
        return cls(group, shape, axes[0], axes[1], starts, sorted_keys, device)

    def refresh(self) -> None:
        """Take up what has changed in the GPU arrays that the slices are over.

        As :meth:`BlockMask.refresh`: what was read and what was planned before is dropped. Nothing
        waits.

        Raises:
            ValueError: the slices are a snapshot, which sees no change.
        """
        raise ValueError(
            wrong(
                "slices",
                "slices over arrays in GPU memory",
                "a snapshot, as those of host arrays are",
                "build new ones",
            )
        )

    def check(self) -> None:
        """Check the contents of slices over GPU arrays, which waits for the GPU; others are right.

        Raises:
            ValueError: what the same arrays on the host would raise when the slices are built.
        """

    @property
    def groups(self) -> int:
        """Groups of a head."""
        return _count(self.shape[0], self.group)

    @property
    def nnz(self) -> int:
        """Slices over all heads."""
        return len(self.indices)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return self.indptr.nbytes + self.indices.nbytes

    def row_counts(self) -> NDArray[np.int64]:
        """Keys of each group: (batch, heads, groups) int64."""
        return np.diff(self.indptr).reshape(self.batch, self.heads, self.groups)

    def active_pairs(self) -> int:
        """Number of active (query, key) token pairs over all heads, exact for a short group."""
        edges = np.minimum(np.arange(self.groups + 1) * self.group, self.shape[0])
        return int((self.row_counts() * np.diff(edges)).sum())

    def density(self) -> float:
        """Kept fraction of all token pairs; 0 without tokens."""
        total = self.batch * self.heads * self.shape[0] * self.shape[1]
        return self.active_pairs() / total if total else 0.0

    def to_dense(self) -> NDArray[np.bool_]:
        """Map of groups and keys, (batch, heads, groups, skv) bool."""
        dense = np.zeros((len(self.indptr) - 1, self.shape[1]), np.bool_)
        dense[self._rows(), self.indices] = True
        return dense.reshape(self.batch, self.heads, self.groups, self.shape[1])

    def to_block_mask(self, block_kv: int = BLOCK_KV) -> BlockMask:
        """The same mask, exactly, as blocks of a group by ``block_kv`` keys.

        A block of which all keys are listed is full; others carry token bits, equal in all rows.
        With the default the blocks are made once and kept with the slices.

        Args:
            block_kv: keys of a block, a multiple of 8 from 16 to 384.

        Raises:
            TypeError: ``block_kv`` is no integer.
            ValueError: no such block.
        """
        if isinstance(block_kv, bool) or not isinstance(block_kv, int | np.integer):
            raise TypeError(wrong("block_kv", "an int", repr(block_kv), f"pass {BLOCK_KV}"))
        return self._blocks if block_kv == BLOCK_KV else self._to_blocks(block_kv)

    @cached_property
    def _blocks(self) -> BlockMask:
        return self._to_blocks(BLOCK_KV)

    def _to_blocks(self, block_kv: int) -> BlockMask:
        check_blocks((self.group, block_kv), "choose such a number of keys")
        columns = -(-self.shape[1] // block_kv)
        blocks, within = np.divmod(self.indices, block_kv)
        # Keys ascend, so that those of a block, and of a word of its bits, are neighbours.
        starts = _changes(self._rows() * columns + blocks)
        found = np.diff(np.append(starts, self.nnz))
        valid = np.minimum(self.shape[1] - blocks[starts].astype(np.int64) * block_kv, block_kv)
        partial = found < valid
        words = token_bit.words(block_kv)
        bits = np.zeros((len(starts), words), np.uint32)
        word = np.repeat(np.arange(len(starts)), found) * words + within // 32
        first = _changes(word)
        if len(first):
            ones = np.uint32(1) << (within % 32).astype(np.uint32)
            bits.ravel()[word[first]] = np.add.reduceat(ones, first, dtype=np.uint32)
        bits = bits[partial]
        mask = SliceBlocks.from_csr(
            np.searchsorted(starts, self.indptr),
            blocks[starts],
            (self.groups, columns),
            (self.group, block_kv),
            self.shape,
            batch=self.batch,
            heads=self.heads,
            partial=np.where(partial, np.cumsum(partial) - 1, -1),
            token_bits=np.broadcast_to(bits[:, None], (len(bits), self.group, words)),
        )
        mask = replace(mask, device=self.device)
        # A copy over the same arrays, so that slices and their blocks do not keep each other.
        object.__setattr__(mask, "slices", replace(self))
        return mask

    def _rows(self) -> NDArray[np.int64]:
        return np.repeat(np.arange(len(self.indptr) - 1), np.diff(self.indptr))

    def __repr__(self) -> str:
        parts = [
            f"batch {self.batch}, heads {self.heads}",
            f"{self.groups} groups of {self.group} rows",
            f"{self.shape[0]}x{self.shape[1]} tokens",
            f"density {self.density():.3g}",
        ]
        lines = draw.picture((self.groups, self.shape[1]), self.indptr, self.indices)
        return "\n".join([f"KeySlices({', '.join(parts)})", *lines])


def block_mask(mask: BlockMask | KeySlices) -> BlockMask:
    """The blocks of key slices; anything else as it is, to be checked where it is used.

    >>> block_mask(KeySlices.from_groups([[1, 0]], 16)).nnz
    1
    """
    return mask.to_block_mask() if isinstance(mask, KeySlices) else mask


def _count(sq: int, group: int) -> int:
    return -(-sq // group)


def _changes(values: NDArray[Any]) -> NDArray[np.int64]:
    """Where a run of equal values begins."""
    if not len(values):
        return np.zeros(0, np.int64)
    return np.append(0, np.flatnonzero(values[1:] != values[:-1]) + 1)


def _place(row: int, group: int, shape: tuple[int, int], heads: int) -> str:
    head, index = divmod(row, _count(shape[0], group))
    return f"batch {head // heads}, head {head % heads}, group {index}"


def group_count(tokens: int, group: int) -> int:
    """Groups of ``group`` query rows in so many tokens.

    Raises:
        ValueError: a group that slices do not come in.

    >>> group_count(100, 64)
    2
    """
    # 64.0 is in GROUPS too, and of an array it cannot be said.
    if not isinstance(group, int | np.integer) or group not in GROUPS:
        raise ValueError(
            wrong(
                "group",
                f"{', '.join(map(str, GROUPS[:-1]))} or {GROUPS[-1]} query rows",
                repr(group),
                "take one of these",
            )
        )
    return _count(tokens, group)


def _checked_shape(group: int, shape: Sequence[int]) -> tuple[int, int]:
    group_count(0, group)
    return pair(shape, "shape")


def _check_most(most: int | None) -> None:
    if most is None:
        return
    if isinstance(most, bool) or not isinstance(most, int | np.integer):
        raise TypeError(wrong("most", "an int or None", repr(most), "count keys, or leave it out"))
    if most < 0:
        raise ValueError(wrong("most", "no negative number", most, "leave it out"))


def _check_groups(name: str, got: int, sq: int, group: int) -> None:
    if got != _count(sq, group):
        raise ValueError(
            wrong(
                name,
                f"{_count(sq, group)} groups of {group} for {sq} query tokens",
                f"{got} groups",
                "pass the shape and the group that they were made for",
            )
        )


def _check_offsets(
    offsets: NDArray[Any], keys: tuple[int, ...], axes: tuple[int, int], groups: int
) -> None:
    if len(keys) != 1:
        raise ValueError(wrong("indices", "one axis", f"shape {keys}", "flatten it"))
    if offsets.shape != (axes[0] * axes[1] * groups + 1,):
        raise ValueError(
            wrong(
                "indptr",
                f"{axes[0] * axes[1] * groups + 1} offsets, for {axes[0]} x {axes[1]} heads of "
                f"{groups} groups and the end",
                f"shape {offsets.shape}",
                "give batch, heads, group and shape as the offsets were made for",
            )
        )
    falls = bool((offsets[1:] < offsets[:-1]).any())
    if offsets[0] != 0 or falls or offsets[-1] != keys[0]:
        raise ValueError(
            wrong(
                "indptr",
                f"offsets that rise from 0 to {keys[0]}, the length of indices",
                f"first {offsets[0]}, last {offsets[-1]}" + (", falling in between" * falls),
                "use the cumulative sum of the groups' counts",
            )
        )


def _check_keys(
    keys: NDArray[Any],
    rows: NDArray[np.int64],
    group: int,
    shape: tuple[int, int],
    heads: int,
) -> None:
    if not keys.size or (keys.min() >= 0 and keys.max() < shape[1]):
        return
    first = int(np.flatnonzero((keys < 0) | (keys >= shape[1]))[0])
    raise ValueError(
        wrong(
            "indices",
            f"keys from 0 to {shape[1] - 1}",
            f"key {keys[first]} in {_place(int(rows[first]), group, shape, heads)}",
            "list tokens of k, not blocks, and give shape as (query, key) tokens",
        )
    )
