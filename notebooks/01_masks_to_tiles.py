# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # From a mask to physical tiles
#
# A block-sparse mask says which blocks of queries attend to which blocks of keys. A GPU's
# matrix units say nothing about blocks: a kernel computes **physical tiles** of a size that
# suits the hardware, one **step** of keys after the other. This notebook takes one real mask
# and shows what happens between the two, and why *pack* is worth having.
#
# Nothing here needs a GPU. To run it, install the package with its extras from a clone of the
# repository: `pip install '.[demo,notebooks]'` in the folder with `pyproject.toml`, or `make venv`.

# %%
# %matplotlib inline
import numpy as np

from tessera_cupy import make_plan, reference, viz
from tessera_cupy.bench import clips
from tessera_cupy.mapping import Mapping, map_mask
from tessera_cupy.sparsifiers import spade
from tessera_cupy.video import VideoGrid

# %% [markdown]
# ## A real mask
#
# Thirteen frames of a small video become a grid of 13 x 20 x 30 = 7,800 tokens, with queries
# and keys made from their pixels. SPADE's rule then does two things for each head: it puts the
# tokens in the order of small 3-D tiles, so that 64 neighbours in the sequence are 64
# neighbours in the video, and it keeps, for each block of 64 queries, the blocks of 64 keys
# that promise the largest scores, with the first few blocks and the diagonal.
#
# The masks are regenerated from the video by the published rule; they are not a model's own.

# %%
grid = VideoGrid(13, 20, 30)
q, k, v = clips.video_heads("bikes", grid, heads=1)
chosen = spade.select(q, k, grid)
mask = chosen.mask
print("3-D tile of the head:", spade.tiles_of(chosen)[0])
print(mask)

# %% [markdown]
# ## One row of it
#
# All that a kernel needs of a row of blocks is its list of active key blocks. The lists are
# short and have gaps, and that is the whole difficulty: matrix units want wide tiles, here of
# 128 keys, and the mask gives blocks of 64 that mostly have no active neighbour where an
# aligned tile would need one.

# %%
row = 60
wanted = np.flatnonzero(mask.to_dense()[0, 0, row])
print(f"query block {row} keeps {len(wanted)} of {mask.num_blocks[1]} key blocks:")
print(wanted)

# %% [markdown]
# ## Three ways to fill steps of 128 keys
#
# - **retain** puts one block in each step and leaves the other half empty;
# - **merge** loads aligned pairs of neighbours, whether both are wanted or not, and masks what
#   is not;
# - **pack** takes the next two *wanted* blocks from anywhere in the list and loads them side by
#   side. The sum over keys does not care where they came from, so the result is the same.
#
# Below, each step of the row is written with the key blocks that it loads; those that the mask
# left out are in parentheses.


# %%
def steps_of_row(kv_side: str) -> list[list[int]]:
    """Key blocks that each step of the row loads."""
    tiles = map_mask(mask, Mapping("retain", kv_side), 64, 128)
    first, last = tiles.frag_offsets[row : row + 2]
    loaded = tiles.frag_len[first:last] > 0
    step = np.arange(last - first) // tiles.shape.fragments
    blocks = tiles.frag_start[first:last] // 64
    return [blocks[loaded & (step == s)].tolist() for s in range(step[-1] + 1)]


for kv_side in ("retain", "merge", "pack"):
    steps = steps_of_row(kv_side)
    useful = len(wanted) / (2 * len(steps))
    print(f"{kv_side:>6}: {len(steps):2} steps, {useful:.0%} of the work is useful")
    for step in steps:
        print("[" + " ".join(f"{b}" if b in wanted else f"({b})" for b in step) + "]", end=" ")
    print("\n")

# %% [markdown]
# Pack needs the fewest steps, and no step computes a block that the mask left out; only the last
# one of a list of odd length is half empty. The price is that a step's keys come from two
# addresses in place of one, which the GPU's asynchronous copies do at the same speed.
#
# ## The whole mask, under each mapping
#
# Queries have mappings too. *Merge* on the query side joins two rows of blocks in a tile of
# 128 queries; rows that did not ask for a block do not see it, but the tile computes it.
# *Share* joins them too, and sorts the list: steps that both rows want come first, then those of
# one row alone, which the half of the tile that has the other row skips. *Regroup* shares too,
# with rows whose lists are alike in place of neighbours.
# *Split* cuts blocks into smaller tiles: nothing is wasted, but there are many more steps,
# each too small to keep the matrix units busy.
#
# The useful fraction is the number of active (query, key) pairs over the number of pairs in the
# steps of the tiles, without what a half skips. The plan that the profile table chooses for an
# H100 has one of these mappings; an arrow marks it.

# %%
q, k, v = (chosen.permute(x) for x in (q, k, v))
plan = make_plan(mask, q, k, v, arch="sm_90a")
print(f"  {'mapping':<14} {'tile':>8} {'steps':>7} {'useful':>7}")
for way in viz.tile_each_way(mask, plan.spec):
    shape = way.tiles.shape
    size = f"{shape.q}x{shape.kv}"
    steps_in_all = int(way.tiles.steps.sum())
    print(">" if way.chosen else " ", f"{way.mapping.name:<14} {size:>8}", end=" ")
    print(f"{steps_in_all:>7,} {way.useful:>7.2f}  {way.gloss}")

# %% [markdown]
# The picture shows the orange part of the mask. The upper panel of each pair has the blocks
# where they are in the mask, the lower one has them as the kernel computes them, step by step.
# Colour and number tell which step of its tile a block went to. Hatched parts are work on
# entries that the mask leaves out; the plan's mapping has a yellow ground.

# %%
viz.mask_to_tiles(mask, plan=plan.spec, title="One mask, and the ways to tile it")

# %% [markdown]
# ## The same numbers come out
#
# A plan is a mapping, an order of the tiles and a kernel. Here it runs in NumPy, tile by tile
# as the kernel would, and is compared with attention computed the plain way in float64.

# %%
print(plan.explain())

# %%
out = reference.execute(plan, q, k, v)
exact = reference.attention(q, k, v, mask)
error = np.abs(out - exact).max()
print(f"largest error {error:.1e}, of values up to {np.abs(exact).max():.1f}")
assert error < 1e-5

# %% [markdown]
# `chosen.restore(out)` puts the tokens back in the order of the video. On a GPU, the one call
# `tessera_cupy.block_sparse_attention(q, k, v, mask)` does all of the above.
