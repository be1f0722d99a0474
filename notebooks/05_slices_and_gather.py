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
# FG-Attn (arXiv 2509.16518) does not keep blocks of keys but **slices**: a group of 64 or so
# queries, and a list of single keys that may lie anywhere. This notebook shows such lists on real
# frames, how much attention they keep beside blocks, and how they become full physical tiles.
# Notebook 01 says what tiles, steps and mappings are.
#
# Nothing here needs a GPU. To run it, install the package with its extras from a clone of the
# repository: `pip install '.[demo,notebooks]'` in the folder with `pyproject.toml`, or `make venv`.

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
# Thirteen frames of a small video are a grid of 13 x 20 x 30 = 7,800 tokens; queries and keys are
# made from their pixels, and are not a model's. For each key, FG-Attn's rule bounds the score that
# any query of a group can have with it, and the group keeps the keys with the largest bounds: here
# 30% of all, the density at which FG-Attn's authors give its speed. The bound is by *norms*: the
# score of the group's mean query, plus the key's length times the largest distance of a query from
# that mean. Another, by *extremes*, takes for each channel the largest and the smallest value of
# the queries.

# %%
grid = VideoGrid(13, 20, 30)
q, k, v = clips.video_heads("bikes", grid, heads=4)
one_head = [x[:, :1] for x in (q, k, v)]
slices = {group: fg_attn.select(*one_head[:2], grid, group=group).mask for group in (64, 128)}
for chosen in slices.values():
    print(chosen)

# %% [markdown]
# One group on the frames: the keys that it keeps have their own colours, the others are blue. The
# shot changes between frames 6 and 9.

# %%
frames = clips.read_frames("bikes", grid.t, 2 * grid.h, 2 * grid.w) / 255
faded = 0.25 * frames.mean(axis=3, keepdims=True) + 0.75 * np.array([0.0, 0.25, 0.5])
group = 60


def on_frames(kept, title):
    """Draw which keys the 64 queries of the group keep, on five of the frames."""
    queries = np.zeros(grid.tokens, np.bool_)
    queries[64 * group : 64 * (group + 1)] = True
    places = (grid.t, grid.h, grid.w)
    kept, queries = (x.reshape(places).repeat(2, axis=1).repeat(2, axis=2) for x in (kept, queries))
    figure, axes = plt.subplots(1, 5, figsize=(15, 3.1), layout="constrained")
    for ax, t in zip(axes, (0, 3, 6, 9, 12), strict=True):
        ax.imshow(np.where(kept[t, :, :, None], frames[t], faded[t]))
        if queries[t].any():
            fine = queries[t].repeat(8, axis=0).repeat(8, axis=1)
            edges = (-0.5, 2 * grid.w - 0.5, -0.5, 2 * grid.h - 0.5)
            ax.contour(fine, levels=[0.5], colors="#D55E00", linewidths=2, extent=edges)
        ax.set_title(f"frame {t}: {kept[t].mean():.0%} of the keys", fontsize=10)
        ax.set_xticks([])
        ax.set_yticks([])
    figure.suptitle(title)
    line = Line2D([], [], color="#D55E00", linewidth=2, label="around the group's queries")
    patch = Patch(color="#1F4F80", label="skipped keys")
    figure.legend(handles=[line, patch], loc="outside lower center", ncols=2, frameon=False)


on_frames(slices[64].to_dense()[0, 0, group], f"Slices: keys of group {group}, 64 queries")

# %% [markdown]
# The same lists as a map: a line is a group, a column is one key of frame 6.

# %%
figure, axes = plt.subplots(2, 1, figsize=(15, 6), layout="constrained")
for ax, chosen in zip(axes, slices.values(), strict=True):
    viz.draw_slices(ax, chosen, window=viz.Window(2560, 5120, 3600, 4200))

# %% [markdown]
# Do the kept keys come in runs of neighbours? Blocks of 16 keys would like runs of 16 and more;
# `gather` loads a run of at least 48 as a block.

# %%
for size, chosen in slices.items():
    edges = np.diff(np.pad(chosen.to_dense()[0, 0].astype(np.int8), ((0, 0), (1, 1))), axis=1)
    begins, ends = (np.nonzero(edges == way) for way in (1, -1))
    length = ends[1] - begins[1]
    print(
        f"groups of {size}: mean run {length.mean():.1f} keys; share of the keys in runs of", end=""
    )
    print(
        "", ", ".join(f"{n}+: {length[length >= n].sum() / chosen.nnz:.1%}" for n in (2, 8, 16, 48))
    )

# %% [markdown]
# ## The same mass of attention, as slices and as blocks
#
# A mask keeps a share of each query's softmax: its **mass**, here a mean over 512 queries of each
# of four heads. First the mass that FG-Attn's 30% by extremes keep in groups of 64; then the fewest
# keys for that mass by norms, in groups of 64 and of 128, and as blocks of 64x64 chosen by the
# products of their mean rows.
#
# All of this twice: in raster order, which is FG-Attn's, where 64 neighbours are strips of two
# rows of a frame, and with the tokens in the order of small 3-D tiles, as SPADE orders them.
#
# Lines with *exact* know the whole softmax of a group or block and keep the best of it. That costs
# as much as dense attention; it tells what a rule's choice costs from what the shape costs.


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

masks, mass = {}, None
for order, tokens in orders.items():
    moved = tokens.permute(q), tokens.permute(k)
    at = np.stack([inverse(tokens.of(0, head))[queries[head]] for head in range(heads)])
    sampled = slices_mass.sample(*moved, at)
    for chooser in choosers:
        scores = slices_mass.scores_of(chooser, *moved)
        masses = slices_mass.mass_by_count(chooser, scores, sampled)
        if mass is None:
            mass = masses[int(fg_attn.BUDGET * grid.tokens) - 1]
            print(f"mass {mass:.3f} is kept by this share of the keys:")
        count = slices_mass.fewest(masses, mass)
        masks[order, chooser.name] = slices_mass.keep(chooser, scores, count, grid.tokens)
        share = count * chooser.columns / grid.tokens
        print(f"  {order:<10} {chooser.name:<22} {share:5.1%}")

# %% [markdown]
# On this clip slices by norms need fewer keys for the mass than blocks by means do: a few less in
# raster order, many less in 3-D tiles with groups of 64. By extremes they need more than blocks in
# both. Exact slices need fewer keys than exact blocks, so that slices are the better shape here,
# and what a rule makes of it is a matter of its bound. Other clips, and a model's own q and k, may
# differ.
#
# The blocks of the same queries, by means, in raster order:

# %%
blocks = masks["raster", "blocks 64x64, means"].to_dense()[0, 0, group]
on_frames(blocks.repeat(64)[: grid.tokens], f"Blocks: keys of query block {group}, 64 queries")

# %% [markdown]
# ## From slices to tiles
#
# The matrix units multiply tiles, here of 128 queries by steps of 192 keys. Slices get there in
# two ways:
#
# - **pack** takes the blocks of 16 keys of which at least one is kept. A block is loaded and
#   multiplied whole, and token bits mask the keys that are not kept;
# - **gather** loads runs of 48 keys and more as blocks, and any other key as a single row from
#   wherever it is, until a step is full.
#
# A tile is one group of 128 (*retain*), or two groups of 64 as its halves (*share*), where a key
# that both keep is loaded once and a half skips the steps of the other. *Useful* is kept (query,
# key) pairs over pairs that are multiplied, *multiplied* is the latter over all pairs, and
# *gathered* is the share of the loaded keys that are single rows. All masks keep the mass above.

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
# Gather needs less than half of pack's steps for the same slices, as it multiplies little that is
# not kept. Most of its keys are single rows: there are few runs of 48. Blocks of the same mass
# waste as little. In raster order they multiply about as many pairs, in 3-D tiles more.
#
# ## Where the columns of a tile come from
#
# One tile, which has groups 60 and 61, with pack and with gather. On top are the first keys of the
# sequence, and lines to the columns of the tile's first two steps that load them; the strip under
# the columns says how. Below are all steps of the tile, one a line. What is grey is loaded and
# multiplied for nothing; what is empty is multiplied only.

# %%
mask = slices[64].to_block_mask()
figure = plt.figure(figsize=(15, 11), layout="constrained")
rows = [["share-pack"] * 2, ["share-gather"] * 2, ["steps of share-pack", "steps of share-gather"]]
axes = figure.subplot_mosaic(rows, height_ratios=(1, 1, 1.6))
for mapping in ("share-pack", "share-gather"):
    tiles = map_mask(mask, Mapping.parse(mapping), 128, 192)
    viz.draw_gather(axes[mapping], tiles, group // 2)
    viz.draw_columns(axes[f"steps of {mapping}"], tiles, group // 2)
    for ax in (axes[mapping], axes[f"steps of {mapping}"]):
        ax.set_title(f"{mapping}, {ax.get_title()}", fontsize=11)
    axes[f"steps of {mapping}"].set_ylim(40, 0)

# %% [markdown]
# ## The same numbers come out
#
# Plans that gather are taken when they are named. Here they run in NumPy, tile by tile as the
# kernel would, and are compared with attention computed the plain way in float64.

# %%
for size, side in ((64, "share"), (128, "retain")):
    name = f"attend_wgmma/q128k192/{side}-gather/longest+split"
    plan = make_plan(slices[size], *one_head, arch="sm_90a", regime=name)
    facts = plan.summary()
    print(f"{name}: {facts['steps']:,} steps, useful fraction {facts['useful_fraction']:.2f},")
    print(f"  {facts['gathered_rows']:,} keys gathered, {facts['rows_in_runs']:,} in runs")
    out = reference.execute(plan, *one_head)
    exact_out = reference.attention(*one_head, slices[size])
    error = np.abs(out - exact_out).max()
    print(f"  largest error {error:.1e}, of values up to {np.abs(exact_out).max():.1f}")
    assert error < 1e-5

# %% [markdown]
# ## What this does not tell
#
# Steps are counted here, not timed. A gathered row is a copy of its own: on an H200 gathered keys
# run at 0.9 of the rate of 128x128 blocks in groups of 128 queries, and at 0.6 in groups of 64
# where the keys are random. On a GPU, `tessera-cupy bench slices` measures these plans beside
# blocks.
