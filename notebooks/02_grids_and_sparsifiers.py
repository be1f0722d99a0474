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
# # Grids, and the rules that make masks
#
# At the end you will know
#
# - what the token grid of a video is, and what it means to put its tokens in another order;
# - what a rule is that makes a mask, and what six published rules do;
# - why the order decides how much of the attention a mask can keep.
#
# Notebook 01 says what a mask is. Nothing here needs a GPU. To run it, install the package with its
# extras from a clone of the repository: `pip install '.[notebooks]'` in the folder with
# `pyproject.toml`, or `make venv`.

# %%
# %matplotlib inline
import matplotlib.pyplot as plt
import numpy as np

from tessera_cupy import BlockMask, viz
from tessera_cupy.bench import clips
from tessera_cupy.bench.rules import RULES
from tessera_cupy.permute import TokenOrders
from tessera_cupy.sparsifiers import spade
from tessera_cupy.video import VideoGrid

# %% [markdown]
# ## A video is a grid of tokens
#
# A video model cuts a video into small patches. Each patch is a **token**. Tokens lie on a grid of
# frames, rows and columns. Here are 4 frames of 10 rows and 14 columns; a real model has about 20
# frames of 30 by 52 and more.
#
# Attention takes a sequence, so the tokens need an order. The usual one is **raster order**: frame
# by frame, in a frame row by row, in a row from left to right.

# %%
grid = VideoGrid(4, 10, 14)
frame, row, column = 2, 3, 5
place = (frame * grid.h + row) * grid.w + column
print(f"{grid.tokens} tokens; frame {frame}, row {row}, column {column} is number {place}")

# %% [markdown]
# A mask switches **blocks** on and off: so many neighbours of the sequence at once, here 64.
#
# In the picture a square is a token. The line runs through the tokens in the order of the sequence.
# A block has one colour, and its number. Look at the shape of a block: in raster order it is a
# strip, four and a half rows high and as wide as the frame.


# %%
def draw_order(order=None, block=64):
    """The grid's frames 0, 1 and 3 in an order."""
    figure = plt.figure(figsize=(13, 4.6), layout="compressed")
    viz.draw_grid(figure, grid, order, block=block, frames=[0, 1, 3])


draw_order()

# %% [markdown]
# ## Three more orders
#
# **3-D tiles.** A tile is a small box of frames, rows and columns, here 4 x 4 x 4. All tokens of a
# tile come before those of the next one. So a block is a box, and its tokens lie close to each
# other in time and space.
#
# A frame of 10 x 14 does not divide into 4 x 4. The last tile of a row or column is cut short; such
# a block is **ragged**. Nothing is filled up: blocks have the sizes that they have. `explain` says
# how the tiles fit.

# %%
print(grid.explain((4, 4, 4)))

# %% [markdown]
# Look at the hatched blocks on the right and at the bottom: those are the short ones. And look at
# the three frames: a tile is at the same place in all of them.

# %%
tiles = grid.tile_blocks((4, 4, 4))
draw_order(tiles.order, block=tiles.sizes)

# %% [markdown]
# **Temporal-major.** The first frame comes first. After it the order goes from place to place, and
# at each place through all other frames. So a block is a few places, in every frame but the first.
# Triangles say that the sequence goes on in another frame.

# %%
draw_order(grid.temporal_order())

# %% [markdown]
# **A space-filling curve.** The Hilbert curve passes through every token of a cube, always from
# neighbour to neighbour. A block of any size is then a compact region; no tile has to be chosen. It
# changes frames often: follow it through a block, and look at the many triangles.

# %%
draw_order(grid.curve_order())

# %% [markdown]
# ## What a rule is
#
# A **rule** decides from the queries q and the keys k which blocks of keys each block of queries
# keeps. It must be much cheaper than attention itself. Most rules do three things:
#
# 1. put the tokens in an order;
# 2. make one vector of each block, and score pairs of blocks by the products of these vectors;
# 3. keep the pairs with the largest scores.
#
# Here is one in five lines. It takes the mean of each block, and keeps a fifth of the key blocks
# for each query block. Its q and k are made from the pixels of a real clip, with random projections
# in place of a model's weights: tokens that look alike score high.

# %%
grid = VideoGrid(8, 16, 24)
q, k, v = clips.video_heads("bikes", grid, heads=4)
heads, blocks = q.shape[1], grid.tokens // 64


def keep_best(q, k, share=0.2):
    """The blocks of 64 keys with the largest scores, for each block of 64 queries."""
    mean_q, mean_k = (x[0].reshape(heads, blocks, 64, -1).mean(axis=2) for x in (q, k))
    scores = mean_q @ mean_k.transpose(0, 2, 1)
    count = round(share * blocks)
    least = np.sort(scores, axis=2)[:, :, -count, None]
    return BlockMask.from_dense((scores >= least)[None], (64, 64), (grid.tokens, grid.tokens))


# %% [markdown]
# ## Why the order matters
#
# How good is a mask? Dense attention gives each key a weight; the weights of a query sum to 1. The
# **mass** that a mask keeps is the sum of the weights of the keys that it keeps, as a mean over the
# queries. At 1 nothing would be lost. A fifth of the keys, chosen blindly, would keep 0.2.
#
# The rule is the same in each line below, and so is the share that it keeps. Only the order
# differs.


# %%
def kept_mass(q, k, mask):
    """Mean share of a query's attention that the mask keeps, over some queries of all heads."""
    masses = []
    for head, kept in enumerate(mask.to_dense()[0]):
        rows = np.random.default_rng(head).choice(grid.tokens, 512, replace=False)
        scores = q[0, head, rows] @ k[0, head].T / np.sqrt(np.float32(q.shape[3]))
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        masses.append((weights * kept[rows // 64].repeat(64, axis=1)).sum(axis=1).mean())
    return np.mean(masses)


orders = {
    "raster": np.arange(grid.tokens),
    "temporal-major": grid.temporal_order(),
    "3-D tiles of 4x4x4": grid.tile_order((4, 4, 4)),
    "Hilbert curve": grid.curve_order(),
}
masks = {}
for name, order in orders.items():
    moved = TokenOrders(order)
    masks[name] = keep_best(moved.permute(q), moved.permute(k))
    mass = kept_mass(moved.permute(q), moved.permute(k), masks[name])
    print(f"{name:<20} keeps {masks[name].density():.0%} of the blocks, mass {mass:.2f}")

# %% [markdown]
# The compact blocks of the last two orders keep far more. To see why, look at one block on the
# frames of the clip. What has its own colours is in the block, all else is faded.
#
# In raster order the block is a strip from edge to edge: ground, street and what is on it. Its mean
# stands for none of them. The tile is a small patch, and the same patch in the next frames: its
# tokens are alike, its mean stands for all of them, and few blocks of keys are enough.
#
# How much an order gains differs: with 13 x 20 x 30 tokens of this clip the rule keeps 0.38 in
# raster order and 0.44 in tiles.

# %%
frames = clips.read_frames("bikes", grid.t, 2 * grid.h, 2 * grid.w) / 255
faded = 0.25 * frames.mean(axis=3, keepdims=True) + 0.75 * np.array([0.0, 0.25, 0.5])
figure, axes = plt.subplots(2, 4, figsize=(13, 4.8), layout="constrained")
for line, (name, number) in zip(axes, {"raster": 1, "3-D tiles of 4x4x4": 8}.items(), strict=True):
    inside = np.zeros(grid.tokens, bool)
    inside[orders[name][64 * number : 64 * (number + 1)]] = True
    inside = inside.reshape(grid.t, grid.h, grid.w).repeat(2, axis=1).repeat(2, axis=2)
    for t, ax in enumerate(line):
        ax.imshow(np.where(inside[t, :, :, None], frames[t], faded[t]))
        ax.set_title(f"{name}, block {number}: frame {t}", fontsize=9)
        ax.set_xticks([])
        ax.set_yticks([])

# %% [markdown]
# Attention itself does not care about the order, as long as q, k, v and the output are all in it.
# So a rule returns the order along with the mask: `chosen.permute` applies it, `chosen.restore`
# undoes it.
#
# ## Six published rules
#
# | rule | order | keeps |
# |---|---|---|
# | SPADE | 3-D tiles, a shape for each head | the best blocks by extreme values, the diagonal |
# | VSA | cubes of 4x4x4 | the best cubes by their means |
# | STA | larger tiles | a window of tiles around each; never looks at q and k |
# | Radial | raster | a band that gets thinner from frame to frame; never looks at q and k |
# | SVG | raster or temporal-major, for each head | a band: frames nearby, or places nearby |
# | SVG2 | clusters of alike tokens (k-means) | the clusters with the most mass |
#
# Each runs here with its published parameters; extents shrink with this small grid, and bands and
# windows cover more of it than of a real one. So densities are higher than the published ones.

# %%
chosen = {}
print(f"{'rule':<8} {'block':>9} {'blocks':>9} {'ragged':>7} {'density':>8} {'run coverage':>13}")
for name in ("spade", "vsa", "sta", "radial", "svg", "svg2"):
    rule = RULES[name]
    chosen[name] = rule.select(rule.sharpen * q, k, v, grid)
    mask = chosen[name].mask
    size, count = ("x".join(map(str, pair)) for pair in (mask.block_size, mask.num_blocks))
    print(f"{rule.title:<8} {size:>9} {count:>9} {mask.ragged!s:>7}", end=" ")
    print(f"{mask.density():>8.2f} {mask.run_coverage():>13.2f}")

# %% [markdown]
# Two numbers describe a mask:
#
# - **density**, the kept share of all (query, key) pairs. Half the density, half the arithmetic;
# - **run coverage**, the share of the kept blocks that have a kept neighbour beside them in their
#   row. At 1 every block is in a run, and even a simple kernel finds wide pieces to load. Two of
#   three of VSA's blocks stand alone: notebook 01 shows how *pack* makes wide steps of them.
#
# The masks of the first head. Rows are queries, columns are keys, each rule's in its own order;
# what is blue is kept. Look at the kinds of pattern: STA, Radial and SVG are regular, known before
# the data; SPADE, VSA and SVG2 follow the data. SVG's head is a spatial one: each frame attends to
# itself and to the first. SVG2's blocks differ in size, as its clusters do.

# %%
figure, axes = plt.subplots(2, 3, figsize=(15, 11), layout="constrained")
for ax, (name, selection) in zip(axes.flat, chosen.items(), strict=True):
    viz.draw_mask(ax, selection.mask)
    ax.set_title(f"{RULES[name].title}: density {viz.head_figures(selection.mask).density[0]:.2f}")

# %% [markdown]
# ## Head by head
#
# A model has many heads, and each has a mask of its own. Some rules give each head its own order,
# too. SPADE takes for each the shape of tile (frames x rows x columns) in which tokens are most
# alike. In the clip with the street all heads want a little of each axis. The other clip is of a
# man who talks in a car; little moves, and all heads want a piece of one row in all frames.

# %%
for clip in clips.CLIPS:
    q, k, _ = clips.video_heads(clip, grid, heads=4)
    print(f"{clip:<18}", *spade.tiles_of(spade.select(q, k, grid)))

# %% [markdown]
# The masks of SVG2's four heads. Each head has clusters of its own, so one's rows are not
# another's.

# %%
figure, axes = plt.subplots(1, 4, figsize=(15, 4.4), layout="constrained")
for head, ax in enumerate(axes):
    viz.draw_mask(ax, chosen["svg2"].mask, head=head)
    ax.set_title(f"SVG2, head {head}")

# %% [markdown]
# Their density as bars, their run coverage as dots; dashed lines are the means. Head 1 keeps less
# than half of what the others keep: its attention is sharper, so that fewer clusters reach the same
# mass. A GPU computes all heads in one launch, and has to spread such uneven work. That is notebook
# 03.

# %%
viz.draw_heads(plt.figure(figsize=(8, 5), layout="constrained"), chosen["svg2"].mask)

# %% [markdown]
# ## Try next
#
# - `clips.video_heads("carphone_pristine", ...)` is another clip; `seed=` other projections.
# - In `keep_best`, change `share`, or take the maximum in place of the mean.
# - `VideoGrid(21, 30, 52).explain()` says which tiles divide the grid of a real model.
# - `tessera-cupy demo --rule radial` runs one rule on a larger grid, down to the attention.
# - Notebook 03 shows how a mask's tiles are spread over a GPU.
