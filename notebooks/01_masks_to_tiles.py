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
# At the end you will know
#
# - what a block-sparse mask is;
# - why a GPU does not want to compute its blocks one by one;
# - what *pack* does, and why it helps; and what the other mappings are for.
#
# Nothing here needs a GPU. To run it, install the package with its extras from a clone of the
# repository: `pip install '.[notebooks]'` in the folder with `pyproject.toml`, or `make venv`.

# %%
# %matplotlib inline
import matplotlib.pyplot as plt
import numpy as np

from tessera_cupy import ArraySpec, BlockMask, make_plan, reference, viz
from tessera_cupy.bench import clips
from tessera_cupy.cost import predict
from tessera_cupy.errors import PlanNotEligibleError
from tessera_cupy.mapping import Mapping, map_mask, useful_fraction
from tessera_cupy.regimes.candidates import candidates
from tessera_cupy.sparsifiers import spade
from tessera_cupy.video import VideoGrid

# %% [markdown]
# ## What a mask leaves out
#
# A video model cuts a video into **tokens**, small patches. Each token has a query, a key and a
# value. In attention every query looks at every key: it multiplies itself with each, turns the
# products into weights, and takes the weighted sum of the values.
#
# With 30,000 tokens that is 900 million pairs for each head, and most weights are next to nothing.
# A **mask** says which pairs to compute. It does so by **blocks**: so many queries by so many keys,
# here 64 by 64, all or none.
#
# Here is a small one. Each row of blocks is 64 queries, each column 64 keys. Blue blocks are kept,
# the others are skipped. Read a row from left to right: it is a list of the key blocks that these
# queries want. There are gaps in it.

# %%
keep = np.zeros((3, 12), bool)
for row, columns in enumerate(([0, 3, 4, 7, 10], [1, 3, 6, 7, 10, 11], [0, 2, 5, 9])):
    keep[row, columns] = True
small = BlockMask.from_dense(keep, (64, 64))
figure, ax = plt.subplots(figsize=(9, 3.4), layout="constrained")
viz.draw_mask(ax, small)

# %% [markdown]
# ## What a GPU wants
#
# A GPU multiplies with **matrix units**, and they want large pieces. So a kernel works in
# **physical tiles**, of a size that suits the GPU and not the mask. A tile is some query rows; it
# goes through its keys in **steps** of a fixed width. Here a tile has 64 rows, and a step 128 keys:
# room for two blocks side by side.
#
# A step takes the same time whether it is full or half empty. So fewer steps are faster. How should
# the blocks of a row fill them? This is called **mapping**, and here are three answers:
#
# - **retain**: one block in each step. The other half is empty;
# - **merge**: cut the keys into pairs of neighbours, and take every pair with a wanted block in it.
#   What was not wanted is computed all the same, and thrown away;
# - **pack**: take the next two *wanted* blocks of the list, from wherever they are, and put them
#   side by side.
#
# Below, each line is a tile, and its framed boxes are steps. The number is the key block that lies
# there, as in the mask above, where the first column is block 0; hatched is computed in vain. Look
# at how long the lines are, and at which blocks pack joins.

# %%
figure, axes = plt.subplots(3, 1, figsize=(9, 5.6), layout="constrained", sharex=True)
for ax, name in zip(axes, ("retain", "merge", "pack"), strict=True):
    tiles = map_mask(small, Mapping("retain", name), 64, 128)
    viz.draw_steps(ax, tiles, key_block=64)
    useful = useful_fraction(tiles, small)
    ax.set_title(
        f"{name}: {tiles.steps.sum()} steps, {useful:.0%} of the work is useful", fontsize=10
    )
    ax.set_ylabel("rows of the tiles")

# %% [markdown]
# Pack needs the fewest steps. All that is left over is half a step where a list has an odd length.
#
# Is the result still right? Yes: attention sums over keys, and a sum does not care in which order
# its terms come. The price is that the keys of a step come from two addresses in place of one; the
# GPU's asynchronous copies do that at the same speed.
#
# **That is pack: wide steps for the GPU, with nothing in them that the mask did not ask for.**
#
# ## A real mask
#
# Thirteen frames of a clip become a grid of 13 x 20 x 30 = 7,800 tokens, with queries and keys made
# from their pixels. A published rule, SPADE, then chooses the blocks that promise the largest
# weights. It first puts the tokens in an order in which 64 neighbours of the sequence are
# neighbours in the video; notebook 02 is about that. The masks are made by the published rule; they
# are not those of a model.
#
# The text picture is the mask: the darker, the more is kept.

# %%
grid = VideoGrid(13, 20, 30)
q, k, v = clips.video_heads("bikes", grid, heads=1)
chosen = spade.select(q, k, grid)
mask = chosen.mask
print(mask)

# %% [markdown]
# One row of it, and its steps in full. In brackets is a step, in parentheses what the mask left
# out.


# %%
def steps_of_row(kv_side):
    """Key blocks that each step of the row loads."""
    tiles = map_mask(mask, Mapping("retain", kv_side), 64, 128)
    first, last = tiles.frag_offsets[row : row + 2]
    loaded = tiles.frag_len[first:last] > 0
    step = np.arange(last - first) // tiles.shape.fragments
    blocks = tiles.frag_start[first:last] // 64
    return [blocks[loaded & (step == s)].tolist() for s in range(step[-1] + 1)]


row = 60
wanted = np.flatnonzero(mask.to_dense()[0, 0, row])
print(f"query block {row} keeps {len(wanted)} of {mask.num_blocks[1]} key blocks\n")
for kv_side in ("retain", "merge", "pack"):
    steps = steps_of_row(kv_side)
    useful = len(wanted) / (2 * len(steps))
    print(f"{kv_side}: {len(steps)} steps, {useful:.0%} of the work is useful")
    boxes = ["[" + " ".join(f"{b}" if b in wanted else f"({b})" for b in s) + "]" for s in steps]
    for first in range(0, len(boxes), 12):
        print("  ", *boxes[first : first + 12])

# %% [markdown]
# ## Queries have mappings too
#
# So far a tile had the 64 rows of one query block. Modern GPUs like 128 rows: the keys of a step
# are loaded once and serve twice as many queries. So two query blocks have to meet in a tile.
#
# - **merge** takes two neighbours and all that either wants. A row does not *see* what it did not
#   ask for, but the tile computes it.
# - **share** takes the same two, and sorts their list: first the steps that both want, then those
#   of one alone, which the half of the tile with the other one skips.
# - **regroup** shares too, but between rows whose lists are alike, wherever they are.
# - **split** is for the opposite case: it cuts blocks into smaller tiles. Nothing is wasted, but
#   there are many small steps, which keep no matrix unit busy.
#
# The table has the whole mask under each. A name says the mapping of queries, then of keys.
# *Useful* is the number of pairs that the mask keeps, over the number of pairs that are computed.
# The arrow marks what the package would choose for an H100. *Predicted ms* is what the cost model
# expects of the fastest kernel for the mapping, whose tiles are in parentheses: not every size in
# the table has a kernel. It is for 40 heads with this mask, since one does not fill the GPU, on an
# H200 in bfloat16. A step of 128x192 is three times one of 64x128: compare times, not steps.
# Regroup's tiles are made by the host, which is not in its time.

# %%
q, k, v = (chosen.permute(x) for x in (q, k, v))
plan = make_plan(mask, q, k, v, arch="sm_90a")
request = ArraySpec((1, 40, *q.shape[2:]), "bfloat16")


def predicted_ms(mapping):
    """Of the fastest kernel for a mapping, with its tiles, if there is one."""
    times = {}
    for spec in candidates("sm_90a"):
        if spec.mapping == mapping:
            try:
                made = make_plan(mask, request, regime=spec, arch="sm_90a")
            except PlanNotEligibleError:
                continue
            times[f"({spec.tile_q}x{spec.tile_kv})"] = predict(made).ms
    tile = min(times, key=times.get, default=None)
    return f"{times[tile]:.3f} {tile}" if tile else "none"


print(f"  {'mapping':<14} {'tile':>8} {'steps':>7} {'useful':>7} {'predicted ms':>16}")
for way in viz.tile_each_way(mask, plan.spec):
    shape = way.tiles.shape
    size = f"{shape.q}x{shape.kv}"
    steps_in_all = int(way.tiles.steps.sum())
    ms = predicted_ms(way.mapping)
    print(">" if way.chosen else " ", f"{way.mapping.name:<14} {size:>8}", end=" ")
    print(f"{steps_in_all:>7,} {way.useful:>7.2f} {ms:>16}  {way.gloss}")

# %% [markdown]
# The same as pictures. On the left is the mask; the small orange frame is the part that is drawn on
# the right, twice for each mapping: above, the blocks where they are in the mask; below, as the
# kernel computes them, a tile a line, its steps side by side.
#
# Colour and number say which step of its tile a block is in: equal numbers meet in one step.
# Hatched is computed in vain. Look first at *retain Q, pack KV*. Then compare *share Q, pack KV*
# with *merge Q, pack KV*: share has hardly any hatching, since halves skip. What the package
# chooses has a yellow ground.

# %%
window = viz.diagonal_window(mask, (4, 12))
viz.mask_to_tiles(mask, plan=plan.spec, window=window, title="One mask, and the ways to tile it")

# %% [markdown]
# ## The same numbers come out
#
# A **plan** is a mapping, an order of the tiles, and a kernel. Here it runs in NumPy, tile by tile
# as the kernel would, and is compared with attention computed the plain way in float64.

# %%
out = reference.execute(plan, q, k, v)
exact = reference.attention(q, k, v, mask)
error = np.abs(out - exact).max()
print(plan.spec.name)
print(f"largest error {error:.1e}, of values up to {np.abs(exact).max():.1f}")
assert error < 1e-5

# %% [markdown]
# On a GPU, one call does all of the above: `tessera_cupy.block_sparse_attention(q, k, v, mask)`.
# Then `chosen.restore(out)` puts the tokens back in the order of the video.
#
# ## Try next
#
# - Change the lists in the small mask, and predict the number of steps before you run the cell.
# - `print(plan.explain())` says in words what the plan does, and why it was chosen.
# - `spade.select(q, k, grid, block_size=(32, 32))` makes smaller blocks. What becomes of merge?
# - Notebook 02: where masks come from. 03: how tiles are spread over a GPU. 04: how the package
#   chooses. 05: single keys in place of blocks. 06: your own mask, measured.
