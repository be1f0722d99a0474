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
# # Slices of single keys, and how they are gathered
#
# At the end you will know
#
# - what key slices are, and how they differ from blocks;
# - how much attention slices and blocks keep, for the same number of keys;
# - how a GPU can compute single keys from anywhere in full tiles: *gather*.
#
# Notebook 01 says what tiles, steps and mappings are. Nothing here needs a GPU. To run it, install
# the package with its extras from a clone of the repository: `pip install '.[notebooks]'` in the
# folder with `pyproject.toml`, or `make venv`.

# %%
# %matplotlib inline
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from tessera_cupy import make_plan, reference, viz
from tessera_cupy.bench import clips, slices_mass
from tessera_cupy.mapping import Mapping, issued_pairs, map_mask, useful_fraction
from tessera_cupy.masks.key_slices import block_mask
from tessera_cupy.permute import TokenOrders
from tessera_cupy.sparsifiers import fg_attn, scoring, spade
from tessera_cupy.video import VideoGrid, inverse

# %% [markdown]
# ## The keys that a group keeps
#
# A block mask keeps or skips 64 neighbouring keys at once. FG-Attn (arXiv 2509.16518) decides on
# each key by itself. A **group** of 64 queries has one list of keys, which may lie anywhere. Such a
# list is a **slice** of the attention matrix: 64 queries high, one key wide.
#
# Which keys? A rule cannot compute all scores; that would be dense attention. FG-Attn's rule bounds
# the score that any query of the group can have with a key, and the group keeps the keys with the
# largest bounds, here 30% of all. The bound by *norms* is the score of the group's mean query, plus
# the length of the key times the largest distance of a query from that mean.
#
# Queries and keys are made from the pixels of a clip; they are not a model's.

# %%
grid = VideoGrid(13, 14, 20)
q, k, v = clips.video_heads("bikes", grid, heads=2)
one_head = [x[:, :1] for x in (q, k, v)]
slices = {group: fg_attn.select(*one_head[:2], grid, group=group).mask for group in (64, 128)}
for chosen in slices.values():
    print(chosen)

# %% [markdown]
# One group on the frames. The orange line goes around its queries: some rows of frame 6. Keys that
# it keeps have their own colours, the others are blue.
#
# Look at the edges: what is kept follows the things in the picture, from key to key. And look at
# frames 9 and 12. The shot has changed before them, and hardly any key there is kept.

# %%
frames = clips.read_frames("bikes", grid.t, 2 * grid.h, 2 * grid.w) / 255
faded = 0.25 * frames.mean(axis=3, keepdims=True) + 0.75 * np.array([0.0, 0.25, 0.5])
group = 28


def on_frames(kept, title):
    """Draw which keys the 64 queries of the group keep, on five of the frames."""
    queries = np.zeros(grid.tokens, bool)
    queries[64 * group : 64 * (group + 1)] = True
    places = (grid.t, grid.h, grid.w)
    kept, queries = (x.reshape(places).repeat(2, axis=1).repeat(2, axis=2) for x in (kept, queries))
    figure, axes = plt.subplots(1, 5, figsize=(14, 3), layout="constrained")
    for ax, t in zip(axes, (0, 3, 6, 9, 12), strict=True):
        ax.imshow(np.where(kept[t, :, :, None], frames[t], faded[t]))
        if queries[t].any():
            fine = queries[t].repeat(8, axis=0).repeat(8, axis=1)
            edges = (-0.5, 2 * grid.w - 0.5, -0.5, 2 * grid.h - 0.5)
            ax.contour(fine, levels=[0.5], colors="#D55E00", linewidths=2, extent=edges)
        ax.set_title(f"frame {t}: {kept[t].mean():.0%} of its keys", fontsize=10)
        ax.set_xticks([])
        ax.set_yticks([])
    figure.suptitle(title)
    line = Line2D([], [], color="#D55E00", linewidth=2, label="around the group's queries")
    patch = Patch(color="#1F4F80", label="skipped keys")
    figure.legend(handles=[line, patch], loc="outside lower center", ncols=2, frameon=False)


on_frames(slices[64].to_dense()[0, 0, group], f"slices: keys of group {group}, 64 queries")

# %% [markdown]
# The same lists as a map, groups of 64 above and of 128 below. Rows are queries, columns are keys:
# a part of the matrix, all keys of frames 5 to 7. Look at how fine the columns are: a block of 64
# would be a fourteenth of the width.

# %%
window = viz.Window(1280, 2560, 5 * grid.frame_tokens, 8 * grid.frame_tokens)
figure, axes = plt.subplots(2, 1, figsize=(13, 7), layout="constrained")
for ax, chosen in zip(axes, slices.values(), strict=True):
    viz.draw_slices(ax, chosen, window=window)

# %% [markdown]
# Do the kept keys come in **runs** of neighbours? It matters, because a run can be loaded as one
# piece. Most keys have a neighbour in their list, but long runs are rare.

# %%
for size, chosen in slices.items():
    edges = np.diff(np.pad(chosen.to_dense()[0, 0].astype(np.int8), ((0, 0), (1, 1))), axis=1)
    begins, ends = (np.nonzero(edges == way) for way in (1, -1))
    length = ends[1] - begins[1]
    print(f"groups of {size}: mean run {length.mean():.1f} keys;", end=" ")
    shares = (f"{n}+: {length[length >= n].sum() / chosen.nnz:.1%}" for n in (2, 8, 16, 48))
    print("share of the keys in runs of", ", ".join(shares))

# %% [markdown]
# ## The same mass of attention, as slices and as blocks
#
# Are slices worth it? Dense attention gives each key a weight, and the weights of a query sum to 1.
# The **mass** of a mask is the share of these weights that it keeps, as a mean over queries.
#
# The question is then: how few keys keep the same mass? It is asked for
#
# - slices by *norms* and by *extremes*, FG-Attn's two bounds, in groups of 64 and 128;
# - blocks of 64 x 64, by the products of their *means*;
# - slices and blocks *exact*: by the true weights. That costs as much as dense attention. It tells
#   what the shape costs from what a rule's guess costs.
#
# And it is asked in two orders of the tokens: raster, where 64 neighbours are three rows of a
# frame, and 3-D tiles, where they are a small box in time and space (notebook 02).


# %%
def exact(rows, columns):
    """What a group or block really attends to: the mass of each column, over all its queries."""

    def score(q, k):
        weights = q[0, 0] @ k[0, 0].T / np.float32(q.shape[3] ** 0.5)
        weights = np.exp(weights - weights.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        for axis, size in enumerate((rows, columns)):
            if size > 1:
                starts = np.arange(0, weights.shape[axis], size)
                weights = np.add.reduceat(weights, starts, axis=axis)
        return weights[None, None]

    name = f"slices of {rows}" if columns == 1 else f"blocks {rows}x{columns}"
    return slices_mass.Chooser(f"{name}, exact", rows, columns, score)


choosers = (
    slices_mass.slices_by_bound(64, "extremes"),
    slices_mass.slices_by_bound(64, "norms"),
    slices_mass.slices_by_bound(128, "norms"),
    slices_mass.blocks_by_means(64),
    exact(64, 1),
    exact(64, 64),
)
orders = {
    "raster": TokenOrders.raster(grid.tokens),
    "3-D tiles": scoring.most_alike(q, 64, spade.candidates(grid, spade.WAN_TILES)),
}
rng = np.random.default_rng(0)
heads = q.shape[1]
queries = np.stack([rng.choice(grid.tokens, 512, replace=False) for _ in range(heads)])

masks, shares, mass = {}, {}, None
for order, tokens in orders.items():
    moved = tokens.permute(q), tokens.permute(k)
    at = np.stack([inverse(tokens.of(0, head))[queries[head]] for head in range(heads)])
    sampled = slices_mass.sample(*moved, at)
    for chooser in choosers:
        scores = slices_mass.scores_of(chooser, *moved)
        masses = slices_mass.mass_by_count(chooser, scores, sampled)
        if mass is None:  # that of the first line: 30% of the keys, as FG-Attn's authors keep
            mass = masses[int(fg_attn.BUDGET * grid.tokens) - 1]
        count = slices_mass.fewest(masses, mass)
        masks[order, chooser.name] = slices_mass.keep(chooser, scores, count, grid.tokens)
        shares[order, chooser.name] = count * chooser.columns / grid.tokens

# %% [markdown]
# A bar is the share of the keys that is needed for the mass in the title. Shorter is better.

# %%
figure, ax = plt.subplots(figsize=(9, 4), layout="constrained")
for offset, (order, colour) in enumerate(zip(orders, ("#D9D9D9", "#A9DCF8"), strict=True)):
    values = [shares[order, chooser.name] for chooser in choosers]
    place = np.arange(len(values)) + 0.4 * offset
    bars = ax.barh(place, values, 0.38, color=colour, edgecolor="#222222", label=order)
    ax.bar_label(bars, [f"{value:.1%}" for value in values], padding=3, fontsize=9)
ax.set_yticks(np.arange(len(choosers)) + 0.2, [chooser.name for chooser in choosers])
ax.invert_yaxis()
ax.set_xlim(0, 0.35)
ax.set_xlabel("share of the keys")
ax.set_title(f"keys that keep a mass of {mass:.2f}", fontsize=10)
_ = figure.legend(loc="outside right center", frameon=False)

# %% [markdown]
# Look at three things.
#
# - *Exact* slices need far fewer keys than exact blocks: slices are the better shape.
# - What a rule makes of it is a matter of its bound. By *norms*, slices of 64 need fewer keys than
#   blocks by means: a little in raster order, a lot in 3-D tiles. By *extremes* they need more.
# - The order matters for slices too, since the 64 queries of a group share one list.
#
# Other clips, and a model's own q and k, may differ.
#
# For comparison, the blocks of the same queries on the frames: strips of three rows, wanted or not.

# %%
blocks = masks["raster", "blocks 64x64, means"].to_dense()[0, 0, group]
on_frames(blocks.repeat(64)[: grid.tokens], f"blocks: keys of query block {group}, 64 queries")

# %% [markdown]
# ## From slices to tiles
#
# Matrix units multiply tiles, here of 128 queries by steps of 192 keys. How does a list of single
# keys become full steps? In two ways:
#
# - **pack** takes the blocks of 16 keys with at least one kept key in them. A block is loaded and
#   multiplied whole; a bit for each pair masks what is not kept.
# - **gather** copies each kept key as a single row, from wherever it is, until a step is full. Only
#   long runs, of 48 keys and more, are loaded in one piece.
#
# A tile holds one group of 128 queries (*retain*), or two groups of 64 as its halves (*share*).
# What both halves keep is loaded once, and a half skips the steps of the other.
#
# All masks in the table keep the mass above. *Useful* is kept pairs over multiplied pairs.
# *Multiplied* is the latter over all pairs: dense attention would be 100%. *Gathered* is the share
# of the loaded keys that are single rows.

# %%
wanted = {
    "slices of 64, norms": ("share-pack", "share-gather"),
    "slices of 128, norms": ("retain-pack", "retain-gather"),
    "blocks 64x64, means": ("share-pack",),
}
print(f"{'':<45} {'steps':>6} {'useful':>7} {'multiplied':>11} {'gathered':>9}")
for order in orders:
    for name, mappings in wanted.items():
        mask = block_mask(masks[order, name])
        for mapping in mappings:
            tiles = map_mask(mask, Mapping.parse(mapping), 128, 192)
            useful = useful_fraction(tiles, mask, 64)
            multiplied = issued_pairs(tiles, 64) / heads / grid.tokens**2
            gathered = 0.0
            if tiles.frag_gathered is not None:
                gathered = tiles.frag_len[tiles.frag_gathered].sum() / tiles.frag_len.sum()
            print(f"{order:<10} {name:<20} {mapping:<13} {tiles.steps.sum():>6,}", end=" ")
            print(f"{useful:>7.2f} {multiplied:>11.1%} {gathered:>9.1%}")

# %% [markdown]
# Compare pack and gather of the same slices: gather needs less than half of the steps, since it
# multiplies little that is not kept. Nearly all of its keys are single rows.
#
# Then look at blocks: there, too, hardly anything is multiplied in vain. In raster order they and
# gathered slices of 64 multiply about as many pairs; in 3-D tiles the slices need the fewest. What
# gather loses is the last step of a list, which is rarely full; here lists are short.
#
# ## Where the columns of a tile come from
#
# One tile, with groups 28 and 29 as its halves. In each picture, on top are the keys of the
# sequence; below are the columns of the tile's first two steps; a line goes from each key to its
# column. Blue is kept by both groups, orange and green by one, and grey by none: it is loaded and
# multiplied in vain. The strip at the bottom says how a column was loaded.
#
# With **pack**, blocks of 16 keys come as they are, grey ones included.

# %%
tile = group // 2
packed, gathered = (
    map_mask(slices[64].to_block_mask(), Mapping.parse(name), 128, 192)
    for name in ("share-pack", "share-gather")
)
_, ax = plt.subplots(figsize=(13, 3.6), layout="constrained")
viz.draw_gather(ax, packed, tile)

# %% [markdown]
# With **gather**, each kept key comes alone. There is no grey, and the yellow strip says that every
# column is a row of its own.

# %%
_, ax = plt.subplots(figsize=(13, 3.6), layout="constrained")
viz.draw_gather(ax, gathered, tile)

# %% [markdown]
# All steps of the same tile: a line is a step, 192 keys side by side. Pack on the left, gather on
# the right. Look at the grey, and at how many lines there are.

# %%
figure, axes = plt.subplots(1, 2, figsize=(14, 5), layout="constrained")
for ax, tiles, name in zip(axes, (packed, gathered), ("pack", "gather"), strict=True):
    viz.draw_columns(ax, tiles, tile)
    ax.set_title(f"{name}, {ax.get_title()}", fontsize=10)
_ = axes[1].set_ylim(axes[0].get_ylim())

# %% [markdown]
# ## The same numbers come out
#
# Both mappings give the same result. Here plans that gather run in NumPy, tile by tile as the
# kernel would, and are compared with attention computed the plain way in float64.

# %%
for size, side in ((64, "share"), (128, "retain")):
    name = f"attend_wgmma/q128k192/{side}-gather/longest+split"
    plan = make_plan(slices[size], *one_head, arch="sm_90a", regime=name)
    out = reference.execute(plan, *one_head)
    exact_out = reference.attention(*one_head, slices[size])
    error = np.abs(out - exact_out).max()
    print(f"{name}: largest error {error:.1e}, of values up to {np.abs(exact_out).max():.1f}")
    assert error < 1e-5

# %% [markdown]
# ## What this does not tell
#
# Steps are counted here, not timed. A gathered row is a copy of its own: on an H200 gathered keys
# run at 0.9 of the rate of 128x128 blocks in groups of 128 queries, and at 0.6 in groups of 64
# where the keys are random.
#
# ## Try next
#
# - `fg_attn.select(..., budget=0.1)` keeps a tenth of the keys. What becomes of the runs?
# - Take `group = 36`, after the change of the shot.
# - Permute q and k by `orders["3-D tiles"]` before `fg_attn.select`, and draw the tile again.
# - On a GPU, `tessera-cupy bench slices` times these plans beside blocks.
# - Notebook 06 measures plans on a mask of your own.
