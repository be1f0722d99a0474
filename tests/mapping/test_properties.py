"""What must hold for the tiles of any mask, on random masks and tile shapes."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera_cupy.mapping import Mapping, choose_slot, expand, map_mask, useful_fraction, why_not
from tessera_cupy.mapping.stats import issued_pairs
from tessera_cupy.masks import BlockMask

MAPPINGS = [
    Mapping(q, kv)
    for q in ("retain", "merge", "share", "regroup", "split")
    for kv in ("retain", "merge", "split", "pack")
]
TILE_Q = (16, 32, 64, 128, 192, 256)
TILE_KV = (32, 64, 128)
BLOCKS = st.one_of(st.sampled_from((16, 32, 48, 64, 128)), st.integers(2, 48).map(lambda n: 8 * n))


def blocky(rng, heads, sq, skv, density):
    """Token mask whose pieces are smaller than most blocks, with some single tokens."""
    coarse = rng.random((heads, sq // 24 + 1, skv // 24 + 1)) < density
    tokens = np.repeat(np.repeat(coarse, 24, axis=1), 24, axis=2)[:, :sq, :skv]
    return tokens ^ (rng.random(tokens.shape) < 0.002)


def ragged_sizes(rng, heads, blocks, total, step):
    """Sizes of each head that sum to ``total``; all starts are multiples of ``step``."""
    share = rng.dirichlet(np.ones(blocks) * 0.7)
    sizes = rng.multinomial(total // step, share, size=heads) * step
    last = sizes.cumsum(axis=1).argmax(axis=1)  # the last block that is not empty
    sizes[np.arange(heads), last] += total - sizes.sum(axis=1)
    return sizes


def spread(blocks, q_sizes, kv_sizes):
    """Token mask of a block map, head by head."""
    return np.stack(
        [
            np.repeat(np.repeat(block, q, axis=0), kv, axis=1)
            for block, q, kv in zip(blocks, q_sizes, kv_sizes, strict=True)
        ]
    )


@st.composite
def masks(draw):
    """A mask and the token mask that it stands for, made without the mask's own methods."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    block = (draw(BLOCKS), draw(BLOCKS))
    sq, skv = draw(st.integers(0, 420)), draw(st.integers(0, 420))
    heads = draw(st.integers(1, 3))
    density = draw(st.sampled_from((0.0, 0.1, 0.5, 0.9, 1.0)))
    kind = draw(st.sampled_from(("blocks", "tokens", "causal", "ragged")))
    if kind == "tokens":
        tokens = blocky(rng, heads, sq, skv, density)
        return BlockMask.from_tokens(tokens, block), tokens
    if kind == "causal":
        tokens = np.broadcast_to(np.tri(sq, skv, dtype=bool), (heads, sq, skv))
        return BlockMask.from_tokens(tokens, block), tokens
    if kind == "blocks":
        nq, nk = -(-sq // block[0]), -(-skv // block[1])
        blocks = rng.random((heads, nq, nk)) < density
        tokens = np.repeat(np.repeat(blocks, block[0], axis=1), block[1], axis=2)[:, :sq, :skv]
        return BlockMask.from_dense(blocks, block, (sq, skv)), tokens
    nq, nk = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    q_sizes = ragged_sizes(rng, heads, nq, sq, draw(st.sampled_from((1, 8))))
    kv_sizes = ragged_sizes(rng, heads, nk, skv, draw(st.sampled_from((1, 8, 16))))
    blocks = rng.random((heads, nq, nk)) < density
    mask = BlockMask.from_dense(
        blocks, block, q_block_sizes=q_sizes[None], kv_block_sizes=kv_sizes[None]
    )
    return mask, spread(blocks, q_sizes, kv_sizes)


def legal_slots(kv):
    return [slot for slot in (8, 16, 32, 64, 128) if kv % slot == 0]


def fragments_of(tiles):
    """For each fragment its tile, its step within the tile, and whether it holds pairs."""
    counts = np.diff(tiles.frag_offsets)
    tile = np.repeat(np.arange(len(tiles)), counts)
    within = np.arange(len(tile)) - np.repeat(tiles.frag_offsets[:-1], counts)
    return tile, within // tiles.shape.fragments, tiles.frag_members != 0


def check_arrays(tiles):
    for name, array in tiles.arrays().items():
        assert array.flags.c_contiguous, name
        expected = {"frag_offsets": np.int64, "frag_members": np.uint32, "bits": np.uint32}
        assert array.dtype == expected.get(name, np.int32), name
    total = len(tiles.frag_start)
    assert tiles.tile_q.shape == (len(tiles), 2)
    assert tiles.frag_offsets.shape == (len(tiles) + 1,)
    assert tiles.frag_offsets[0] == 0
    assert tiles.frag_offsets[-1] == total
    assert (np.diff(tiles.frag_offsets) >= 0).all()
    assert len(tiles.frag_len) == len(tiles.frag_members) == len(tiles.frag_bits) == total
    assert tiles.bits.shape[1:] == (tiles.shape.q, -(-tiles.shape.slot // 32))


def check_halves(tiles, sq):
    """The first half has the tile's first rows, the second those from the middle on."""
    first, rows = tiles.tile_q.T
    halves = tiles.tile_halves
    middle = tiles.shape.q // 2
    assert halves.shape == (len(tiles),)
    assert ((halves >= 0) & (halves <= rows)).all()
    assert (np.maximum(halves, rows - halves) <= middle).all()
    covered = []
    for tile, (head, half) in enumerate(zip(tiles.tile_head, halves, strict=True)):
        expected = [*range(half), *range(middle, middle + rows[tile] - half)]
        assert tiles.tile_rows(tile).tolist() == expected
        query = tiles.query_rows(tile, np.array(expected))
        np.testing.assert_array_equal(query, first[tile] + np.arange(rows[tile]))
        covered.append(head * sq + query)
    np.testing.assert_array_equal(np.concatenate(covered), np.arange(tiles.heads * sq))


def check_rows(tiles, sq):
    """Tiles ascend, and those of a head cover rows 0 to sq: in turn, unless regrouped."""
    first, rows = tiles.tile_q.T
    if sq == 0:
        assert len(tiles) == 0
        return
    assert ((rows >= 1) & (rows <= tiles.shape.q)).all()
    if tiles.tile_halves is not None:
        check_halves(tiles, sq)
    units = tiles.tile_units
    if units is not None:
        assert units.shape == (len(tiles), tiles.shape.q // 16)
        np.testing.assert_array_equal(units[:, 0], first)
        np.testing.assert_array_equal(units >= 0, np.arange(0, tiles.shape.q, 16) < rows[:, None])
        assert (np.diff(tiles.tile_head * (sq + 1) + first) > 0).all()
        tile, row = np.nonzero(np.arange(tiles.shape.q) < rows[:, None])
        covered = tiles.tile_head[tile] * sq + tiles.query_rows(tile, row)
        np.testing.assert_array_equal(np.sort(covered), np.arange(tiles.heads * sq))
        return
    opens = np.flatnonzero(first == 0)
    np.testing.assert_array_equal(tiles.tile_head[opens], np.arange(tiles.heads))
    np.testing.assert_array_equal(np.cumsum(first == 0) - 1, tiles.tile_head)
    ends = first + rows
    closes = np.append(opens[1:], len(tiles)) - 1
    inside = np.setdiff1d(np.arange(len(tiles)), closes)
    np.testing.assert_array_equal(ends[inside], first[inside + 1])
    assert (ends[closes] == sq).all()


def written(tiles, *, ragged):
    """Keys by which packed fragments of a tile, or of a class of it, ascend.

    Those with token bits come last; of ragged blocks short ones before them, by falling KV row.
    """
    start = tiles.frag_start.astype(np.int64)
    bits = tiles.frag_bits >= 0
    short = (tiles.frag_len < tiles.shape.slot) & ~bits & ragged
    return 2**33 * (2 * bits + short) + np.where(short, -start, start)


def check_fragments(tiles, skv, *, packed, ragged, in_order=True):
    tile, _, real = fragments_of(tiles)
    start, length = tiles.frag_start.astype(np.int64), tiles.frag_len
    assert ((length >= 0) & (length <= tiles.shape.slot)).all()
    assert ((start >= 0) & (start + length <= skv)).all()
    # Padding holds nothing at all.
    assert (length[real] > 0).all()
    empty = length == 0
    assert (start[empty] == 0).all()
    assert (tiles.frag_bits[~real] == -1).all()
    groups = np.arange(tiles.shape.groups)
    there = tiles.exists(tile[:, None], 8 * groups)
    assert not ((tiles.frag_members[:, None] >> groups.astype(np.uint32) & 1 == 1) & ~there).any()
    # Fragments with members do not overlap, and ascend by KV row, packed ones kind by kind.
    t, s, e = tile[real], start[real], (start + length)[real]
    key = written(tiles, ragged=ragged)[real] if packed else s
    assert (np.diff(key) > 0)[(t[1:] == t[:-1]) & in_order].all()
    order = np.lexsort((s, t))
    t, s, e = t[order], s[order], e[order]
    assert (s[1:] >= e[:-1])[t[1:] == t[:-1]].all()


def check_bits(tiles):
    """Bits stay within members, rows and columns, and are there only where they say more."""
    used = np.flatnonzero(tiles.frag_bits >= 0)
    np.testing.assert_array_equal(np.sort(tiles.frag_bits[used]), np.arange(len(tiles.bits)))
    tile = fragments_of(tiles)[0][used]
    flags = np.unpackbits(tiles.bits.astype("<u4").view(np.uint8), axis=-1, bitorder="little")
    flags = flags[tiles.frag_bits[used]].astype(bool)
    row, column = np.arange(tiles.shape.q), np.arange(flags.shape[2])
    member = tiles.frag_members[used, None] >> (row // 8).astype(np.uint32) & 1 == 1
    rows_on = member & (row < tiles.tile_q[tile, 1, None])
    allowed = rows_on[:, :, None] & (column < tiles.frag_len[used, None])[:, None, :]
    assert not (flags & ~allowed).any()
    groups = (len(used), tiles.shape.groups, 8 * flags.shape[2])
    some = flags.reshape(groups).any(axis=2)
    np.testing.assert_array_equal(some, member[:, ::8])
    assert (flags != allowed).any(axis=(1, 2)).all()


def wanted_blocks(tiles, tokens, starts):
    """(tiles, KV blocks) bool: the blocks that have a pair in a tile's rows, from the tokens."""
    out = []
    for head, (first, rows) in zip(tiles.tile_head, tiles.tile_q, strict=True):
        keys = tokens[head, first : first + rows].any(axis=0)
        edges = starts[min(head, len(starts) - 1)]
        out.append([bool(keys[a:b].any()) for a, b in pairwise(edges)])
    return np.array(out, bool).reshape(len(tiles), starts.shape[1] - 1)


def check_classes(tiles, *, ragged):
    """Steps of both halves come first, then those of one; fillers cost neither half a step."""
    tile, step, real = fragments_of(tiles)
    half = tiles.shape.groups // 2
    members = tiles.frag_members
    kind = (members & ((1 << half) - 1) != 0) * 1 + (members >> half != 0) * 2
    for t in range(len(tiles)):
        mine = (tile == t) & real
        kinds, steps = kind[mine], step[mine]
        keys = written(tiles, ragged=ragged)[mine]
        of_step = np.zeros(tiles.steps[t], int)
        np.bitwise_or.at(of_step, steps, kinds)
        assert (np.diff((of_step == 3).astype(int)) <= 0).all()
        in_both = of_step[steps] == 3
        assert (np.diff((kinds[in_both] == 3).astype(int)) <= 0).all()
        for of_kind, among in (
            (3, in_both),
            (1, in_both),
            (2, in_both),
            (1, ~in_both),
            (2, ~in_both),
        ):
            assert (np.diff(keys[among & (kinds == of_kind)]) > 0).all()
        plain = [-(-np.count_nonzero(kinds == k) // tiles.shape.fragments) for k in (1, 2, 3)]
        assert len(of_step) <= sum(plain)
        halves = np.count_nonzero(of_step & 1) + np.count_nonzero(of_step & 2)
        assert halves <= plain[0] + plain[1] + 2 * plain[2]


def check_steps(tiles, mask, tokens, mapping):
    if mapping.q in ("share", "regroup"):
        check_classes(tiles, ragged=mask.kv_block_sizes is not None)
        return
    kv_side = mapping.kv
    shape = tiles.shape
    tile, step, real = fragments_of(tiles)
    counts = np.diff(tiles.frag_offsets)
    starts = mask.kv_starts().reshape(-1, mask.num_blocks[1] + 1)
    wanted = wanted_blocks(tiles, tokens, starts)
    np.testing.assert_array_equal(tiles.steps, -(-counts // shape.fragments))
    if kv_side == "pack":
        assert real.all()
        return
    # A step without any pair would be pure waste.
    assert len(np.unique(np.stack([tile, step])[:, real], axis=1).T) == tiles.steps.sum()
    most = -(-max(np.diff(starts).max(initial=0), 1) // shape.slot)
    if kv_side == "merge":
        bkv = mask.block_size[1]
        frags = -(-bkv // shape.slot)
        joined = shape.fragments // frags
        assert (counts % shape.fragments == 0).all()
        grouped = np.pad(wanted, ((0, 0), (0, -wanted.shape[1] % joined)))
        grouped = grouped.reshape(len(tiles), grouped.shape[1] // joined, joined).any(axis=2)
        np.testing.assert_array_equal(tiles.steps, grouped.sum(axis=1))
        if not len(tiles.frag_start):
            return
        # Every key of an active group is present, in its place, members or none.
        place = np.arange(shape.fragments)
        block, within = place // frags, place % frags * shape.slot
        group = np.concatenate([np.flatnonzero(row) for row in grouped])
        start = (group[:, None] * joined + block) * bkv + within
        length = np.minimum(bkv - within, shape.slot)
        length = np.where(block < joined, np.clip(mask.shape[1] - start, 0, length), 0)
        np.testing.assert_array_equal(tiles.frag_len.reshape(length.shape), length)
        start = np.where(length > 0, start, 0)
        np.testing.assert_array_equal(tiles.frag_start.reshape(start.shape), start)
        return
    # Retain and split: no step mixes blocks, and nothing pads the end of a list.
    head = np.minimum(tiles.tile_head[tile], len(starts) - 1)
    block = (starts[head, 1:-1] <= tiles.frag_start[:, None]).sum(axis=1)
    pairs = np.unique(np.stack([tile, step, block])[:, real], axis=1)
    assert pairs.shape[1] == tiles.steps.sum()
    assert real[tiles.frag_offsets[1:][counts > 0] - 1].all()
    if kv_side == "retain":
        np.testing.assert_array_equal(tiles.steps, wanted.sum(axis=1))
    else:
        limit = -(-most // shape.fragments)
        assert (tiles.steps <= wanted.sum(axis=1) * limit).all()
    if len(mask.token_bits) == 0 and len(tiles):
        width = np.diff(starts)[np.minimum(tiles.tile_head, len(starts) - 1)]
        each = np.ceil(np.ceil(width / shape.slot) / shape.fragments).astype(int)
        np.testing.assert_array_equal(tiles.steps, (each * wanted).sum(axis=1))


def check_tile_count(tiles, mask, q_side):
    sizes = np.diff(
        np.broadcast_to(mask.q_starts(), (mask.batch, mask.heads, mask.num_blocks[0] + 1))
    )
    if q_side in ("merge", "share", "regroup"):
        joined = tiles.shape.q // max(int(sizes.max(initial=0)), 8)
        if mask.q_block_sizes is None:
            joined = tiles.shape.q // mask.block_size[0]
        # Two blocks, each a half of the tile, wherever three would not fit.
        halved = q_side == "share" and mask.q_block_sizes is not None
        halved = halved and 4 * sizes.max(initial=0) > tiles.shape.q
        if halved:
            joined = 2
        assert (tiles.tile_halves is not None) == halved
        pad = -sizes.shape[2] % joined
        grouped = np.pad(sizes, ((0, 0), (0, 0), (0, pad)))
        grouped = grouped.reshape(tiles.heads, (sizes.shape[2] + pad) // joined, joined).sum(axis=2)
        assert len(tiles) == np.count_nonzero(grouped)
        np.testing.assert_array_equal(tiles.tile_q[:, 1], grouped[grouped > 0])
        if halved:
            firsts = np.pad(sizes, ((0, 0), (0, 0), (0, pad)))[:, :, ::2].reshape(grouped.shape)
            np.testing.assert_array_equal(tiles.tile_halves, firsts[grouped > 0])
    else:
        assert len(tiles) == (-(-sizes // tiles.shape.q)).sum()


@given(masks(), st.sampled_from(TILE_Q), st.sampled_from(TILE_KV), st.data())
@settings(max_examples=150)
def test_each_active_pair_once_and_no_other(made, q, kv, data):
    mask, tokens = made
    slot = data.draw(st.sampled_from([None, *legal_slots(kv)]), "slot")
    for mapping in MAPPINGS:
        if why_not(mapping, mask, q, kv) is not None:
            continue
        tiles = map_mask(mask, mapping, q, kv, slot)
        assert tiles.shape.slot == (choose_slot(mask, kv) if slot is None else slot)
        assert tiles.heads == mask.batch * mask.heads
        np.testing.assert_array_equal(expand(tiles, *mask.shape), tokens, mapping.name)
        check_arrays(tiles)
        check_rows(tiles, mask.shape[0])
        in_order = mapping.q not in ("share", "regroup")
        packed, ragged = mapping.kv == "pack", mask.kv_block_sizes is not None
        check_fragments(tiles, mask.shape[1], packed=packed, ragged=ragged, in_order=in_order)
        check_bits(tiles)
        check_steps(tiles, mask, tokens, mapping)
        check_tile_count(tiles, mask, mapping.q)
        assert 0 <= useful_fraction(tiles, mask) <= 1
        assert issued_pairs(tiles) >= tokens.sum()


@given(st.integers(0, 2**32 - 1), st.integers(1, 9), st.sampled_from((16, 32, 64, 128)))
@settings(max_examples=60)
def test_halves_of_any_ragged_blocks(seed, nq, q):
    """Sizes per head from 0 to half a tile; blocks of the largest one fill more than a quarter."""
    rng = np.random.default_rng(seed)
    most = rng.integers(q // 4 + 1, q // 2 + 1)
    one = rng.integers(0, most + 1, nq)
    one[rng.random(nq) < 0.3] = 0
    one[rng.integers(nq)] = most
    q_sizes = np.array([rng.permutation(one) for _ in range(3)])
    kv_sizes = ragged_sizes(rng, 3, 7, int(rng.integers(1, 200)), 1)
    blocks = rng.random((3, nq, 7)) < rng.choice([0.1, 0.5, 0.9])
    tokens = spread(blocks, q_sizes, kv_sizes)
    mask = BlockMask.from_dense(
        blocks, (64, 200), q_block_sizes=q_sizes[None], kv_block_sizes=kv_sizes[None]
    )
    mapping = Mapping("share", "pack")
    assert why_not(mapping, mask, q, 64) is None
    tiles = map_mask(mask, mapping, q, 64)
    np.testing.assert_array_equal(expand(tiles, *mask.shape), tokens)
    assert tiles.tile_halves is not None
    assert tiles.arrays()["tile_halves"] is tiles.tile_halves
    assert tiles.nbytes == sum(a.nbytes for a in tiles.arrays().values())
    check_arrays(tiles)
    check_rows(tiles, mask.shape[0])
    ragged = mask.kv_block_sizes is not None
    check_fragments(tiles, mask.shape[1], packed=True, ragged=ragged, in_order=False)
    check_classes(tiles, ragged=ragged)
    check_tile_count(tiles, mask, "share")


@given(masks(), st.sampled_from(TILE_Q), st.sampled_from(TILE_KV))
@settings(max_examples=60)
def test_some_mapping_is_always_eligible(made, q, kv):
    mask, _ = made
    assert any(why_not(Mapping(side, "pack"), mask, q, kv) is None for side in ("retain", "split"))


@given(masks(), st.sampled_from(TILE_Q), st.sampled_from(TILE_KV))
@settings(max_examples=30)
def test_repeats_are_identical(made, q, kv):
    mask, _ = made
    for mapping in MAPPINGS:
        if why_not(mapping, mask, q, kv) is None:
            first = map_mask(mask, mapping, q, kv).arrays()
            again = map_mask(mask, mapping, q, kv).arrays()
            for name, array in first.items():
                np.testing.assert_array_equal(again[name], array, name)


@given(st.integers(0, 2**32 - 1), st.integers(1, 400), st.integers(1, 400))
@settings(max_examples=12)
def test_one_token_mask_in_three_block_sizes(seed, sq, skv):
    tokens = blocky(np.random.default_rng(seed), 2, sq, skv, 0.4)
    for block in (32, 64, 128):
        mask = BlockMask.from_tokens(tokens, (block, block))
        for mapping in MAPPINGS:
            if why_not(mapping, mask, 64, 64) is None:
                tiles = map_mask(mask, mapping, 64, 64)
                np.testing.assert_array_equal(expand(tiles, sq, skv), tokens)


def test_shuffled_lists_give_the_same_tiles():
    rng = np.random.default_rng(3)
    dense = rng.random((2, 9, 14)) < 0.4
    counts = dense.sum(axis=2)
    lists = np.zeros((2, 9, 14), np.int64)
    for head, row in np.ndindex(2, 9):
        columns = rng.permutation(np.flatnonzero(dense[head, row]))
        lists[head, row, : len(columns)] = columns
    ours = BlockMask.from_dense(dense, (32, 32))
    theirs = BlockMask.from_lists(lists, counts, 14, (32, 32))
    for mapping in MAPPINGS:
        if why_not(mapping, ours, 64, 64) is None:
            expected = map_mask(ours, mapping, 64, 64).arrays()
            for name, array in map_mask(theirs, mapping, 64, 64).arrays().items():
                np.testing.assert_array_equal(array, expected[name], name)


def test_broadcast_axes_stay_broadcast():
    dense = np.random.default_rng(4).random((7, 9)) < 0.5
    one = map_mask(BlockMask.from_dense(dense, (64, 64)), Mapping("merge", "pack"), 128, 64)
    assert one.heads == 1
    assert set(one.tile_head) == {0}
    six = BlockMask.from_dense(np.broadcast_to(dense, (2, 3, 7, 9)), (64, 64))
    tiles = map_mask(six, Mapping("merge", "pack"), 128, 64)
    assert tiles.heads == 6
    np.testing.assert_array_equal(tiles.tile_head, np.repeat(np.arange(6), len(one)))
    np.testing.assert_array_equal(tiles.frag_start, np.tile(one.frag_start, 6))


@pytest.mark.parametrize("side", ["retain", "merge", "split"])
def test_token_bits_in_many_chunks(side, monkeypatch):
    """Chunks of one entry, and of one tile, give what a single chunk gives."""
    tokens = blocky(np.random.default_rng(5), 2, 200, 300, 0.5)
    q = {"retain": 64, "merge": 128, "split": 32}[side]
    mask = BlockMask.from_tokens(tokens, (48, 48))
    whole = map_mask(mask, Mapping(side, "pack"), q, 64).arrays()
    monkeypatch.setattr("tessera_cupy.mapping.bits._CHUNK_ROWS", 1)
    monkeypatch.setattr("tessera_cupy.mapping.q_side._UNION_CELLS", 1)
    assert len(whole["bits"]) > 10
    for name, array in map_mask(mask, Mapping(side, "pack"), q, 64).arrays().items():
        np.testing.assert_array_equal(array, whole[name], name)
