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
# # Regimes: how a request finds its plan
#
# At the end you will know
#
# - what a profile table is, what it looks at, and how to read its answer;
# - how to overrule it: for one call, or for some requests;
# - how measurements become a table, and how to tell whether a table is good.
#
# A **plan** is a mapping (notebook 01), an organization (notebook 03) and a kernel. Nothing here
# needs a GPU: **all times here are predicted** by the package's cost model, none was measured. To
# run it, install the package with its extras from a clone of the repository:
# `pip install '.[notebooks]'` in the folder with `pyproject.toml`, or `make venv`.

# %%
# %matplotlib inline
from dataclasses import replace
from functools import cache
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from tessera_cupy import ArraySpec, BlockMask, load_table, make_plan, viz
from tessera_cupy.bench import clips
from tessera_cupy.bench.profile_clock import ModelClock
from tessera_cupy.bench.regret import judge
from tessera_cupy.errors import PlanNotEligibleError
from tessera_cupy.kernels import catalog
from tessera_cupy.regimes import Features, PlanSpec, Table, load_for
from tessera_cupy.regimes.compiler import compile_table
from tessera_cupy.regimes.measurements import Case, Measurements
from tessera_cupy.regimes.regret import Regret
from tessera_cupy.sparsifiers import spade
from tessera_cupy.video import VideoGrid

# %% [markdown]
# ## Many plans, one request
#
# One mask can be computed by dozens of plans, all with the same result. Which is fastest depends on
# the mask and on the GPU. Trying all of them at each call would take far longer than the attention.
# So the answer is looked up, in about a microsecond, in a **profile table**: a file for each
# generation of GPUs, which ranks plans from best to worst.
#
# What does a table see of a request? Not q and k, and not the blocks one by one, but these
# **features**:

# %%
grid = VideoGrid(8, 16, 32)
q, k, _ = clips.video_heads("bikes", grid, heads=4)
mask = spade.select(q, k, grid).mask
request = ArraySpec((1, 4, grid.tokens, 128), "bfloat16")
features = Features.of(mask, batch=1, q_heads=4, dtype="bfloat16", head_dim=128, layout="BHSD")
for name, value in features._asdict().items():
    print(f"{name:<13} {value}")

# %% [markdown]
# Sizes of blocks, head dim and the flags pick a **key** of the table: the kinds of request that it
# has an answer for. Heads, tokens, density, run coverage and their products then pick a
# **regime**: a bucket between edges, each with a ranking of its own.
#
# Here is a key of `sm90`, the table of the H100 and H200, as a map. The title names the key: *q* is
# the rows of a query block, *k* the columns of a key block, *uniform* means that blocks are of one
# size, *no-bits* that none is kept in part, *d* is the head dim. A box is a regime. The axes show
# where edges are, not how far they are apart; *rows* are heads times tokens, *kept keys* density
# times tokens. The text in a box is its first plan: mapping, and rows x columns of a tile. Look at
# the thick lines: there the ranking changes.

# %%
shipped = load_for("sm90")
keys = shipped.document.keys
most = max(range(len(keys)), key=lambda number: sum(map(len, keys[number].edges)))
others = {"heads": 12, "run_coverage": 0.5}
_, ax = plt.subplots(figsize=(9, 3.2), layout="constrained")
viz.draw_table(ax, shipped, key=most, x="kept_keys", y="rows", at=others)

# %% [markdown]
# The title ends in where the rankings come from: *default* is reasoned and not measured, *model* is
# predicted, *measured* is measured.
#
# ## Ask for the reasons
#
# `plan.explain()` tells what was chosen and why. Look at four lines: *regime* is the bucket, *why*
# the reason that the table gives, *table* where that comes from, and *ranking* is the list. The
# first plan that can serve the request is taken.

# %%
plan = make_plan(mask, request, arch="sm_90a")
print(plan.explain())

# %% [markdown]
# ## Decide yourself
#
# **For one call**, name the plan. A name has four parts: kernel, tile, mapping, organization. A
# plan that cannot serve the request is refused, and the error says why.

# %%
pinned = make_plan(
    mask, request, arch="sm_90a", regime="attend_mma/q64k64/retain-pack/longest+split"
)
print(pinned.spec.name, "|", pinned.choice.why)
try:
    make_plan(mask, request, arch="sm_90a", regime="attend_mma/q64k64/share-pack/longest+split")
except PlanNotEligibleError as error:
    print(error)

# %% [markdown]
# **For some requests**, add a rule. It comes before all that the table says. `load_table` reads a
# table from any file; here it is the one that comes with the package.

# %%
table = load_table(shipped.document.path).with_rule(
    "attend_wgmma/q128k192/regroup-pack/longest+split",
    block_q=64,
    density=(None, 0.5),
    why="my masks serve many calls, so that the longer planning is paid once",
)
ruled = make_plan(mask, request, arch="sm_90a", regime=table)
print(ruled.spec.name, "|", ruled.choice.regime, "|", ruled.choice.why)

# %% [markdown]
# ## From measurements to a table
#
# A table should be measured. `tessera-cupy profile` does that on a GPU. Here a `ModelClock` stands
# in for the GPU: it asks the cost model for each time, so that you can see how it works.
#
# A **case** is one mask: its features, and the time of each plan on it. These have 1 to 32 heads,
# 1,024 to 4,096 tokens, and keep 2% to 95%. Two of three come from SPADE's rule, the others are
# drawn at random. Four plans compete.

# %%
clock = ModelClock("sm_90a")
names = {
    "retain": "attend_wgmma/q128k192/retain-pack/longest+split",
    "merge": "attend_wgmma/q128k192/merge-pack/longest+split",
    "share": "attend_wgmma/q128k192/share-pack/longest+split",
    "small tiles": "attend_mma/q64k64/retain-pack/longest+split",
}
plans = {name: PlanSpec.parse(text) for name, text in names.items()}
grids = (VideoGrid(4, 16, 16), VideoGrid(8, 16, 16), VideoGrid(8, 16, 32))


@cache
def queries_and_keys(clip, layer, grid):
    q, k, _ = clips.video_heads(clip, grid, heads=4, seed=layer)
    return q, k


def make_case(clip, layer, rng):
    """A mask of random size and density, and each plan's time on it."""
    grid, heads = grids[rng.integers(3)], int(rng.choice([1, 2, 4, 8, 16, 32]))
    keep = float(np.exp(rng.uniform(np.log(0.02), np.log(0.95))))
    blocks = grid.tokens // 64
    if rng.random() < 1 / 3:
        kept = rng.random((heads, blocks, blocks)) < keep
    else:
        q, k = (x[:, : min(4, heads)] for x in queries_and_keys(clip, layer, grid))
        kept = spade.select(q, k, grid, keep=keep, sinks=1).mask.to_dense()[0]
        kept = np.tile(kept, (-(-heads // 4), 1, 1))
    mask = BlockMask.from_dense(kept, (64, 64))
    features = Features.of(
        mask, batch=1, q_heads=heads, dtype="bfloat16", head_dim=128, layout="BHSD"
    )
    times = clock.times(mask, heads, 128, list(plans.values()))
    return Case(f"{grid} {heads} heads {keep:.3f}", f"{clip} layer {layer}", features, times)


rng = np.random.default_rng(0)
cases = [make_case("bikes", number % 4, rng) for number in range(100)]
first = cases[0]
print(first.name)
for timing in first.timings:
    print(f"  {timing.plan.name:<50} {1000 * timing.ms:6.1f} us (predicted)")

# %% [markdown]
# Which plan won where? A dot is a case, its colour and shape the fastest plan. Look from left to
# right: with few heads *retain* wins most often, with many *share* does.
#
# Why? *Retain* puts one query block of 64 rows into a tile of 128 and leaves half of it empty. With
# few heads there are not enough tiles for 132 multiprocessors anyway, and many half-empty tiles
# beat few full ones. With many heads all are busy, and empty halves cost.

# %%
marks = dict(zip(plans, "os^v", strict=True))
colours = dict(zip(plans, ("#0072B2", "#E69F00", "#009E73", "#CC79A7"), strict=True))
winner = [min(plans, key=lambda name: case.times()[plans[name]]) for case in cases]
figure, ax = plt.subplots(figsize=(9, 4.5), layout="constrained")
for name in plans:
    won = [case.features for case, best in zip(cases, winner, strict=True) if best == name]
    jitter = np.random.default_rng(1).uniform(0.93, 1.07, len(won))
    ax.scatter(
        jitter * [f.heads for f in won],
        [f.density for f in won],
        marker=marks[name],
        color=colours[name],
        label=f"{name}: fastest in {len(won)}",
    )
ax.set_xscale("log", base=2)
ax.set_xticks([1, 2, 4, 8, 16, 32], ["1", "2", "4", "8", "16", "32"])
ax.set_xlabel("heads (dots are moved a little to the side)")
ax.set_ylabel("density (kept fraction)")
ax.set_title("the fastest plan of each case, predicted for an H200", fontsize=10)
_ = figure.legend(loc="outside right center", frameon=False)

# %% [markdown]
# `compile_table` finds the edges with a decision tree. The tree may only cut where it helps on
# masks of a source that it did not see, and a regime has at least 32 cases. So a table is coarser
# than the dots; it should hold for your masks, and not only for these. Here it cuts by *rows*,
# heads times tokens: how many tiles there are hangs on both.

# %%
measured = Measurements(
    arch="sm90",
    provenance="model",
    device=clock.device,
    catalog=catalog.fingerprint("sm_90a"),
    made=("Predicted by the cost model in a notebook.",),
    cases=tuple(cases),
)
document = compile_table(measured, shipped.document, path=Path("sm90.yaml"))
compiled = Table(document)
print(document.keys[0].why)
_, ax = plt.subplots(figsize=(9, 3), layout="constrained")
viz.draw_table(ax, compiled, key=0, x="rows", y="density")

# %% [markdown]
# The title now ends in *model*, so that nobody takes it for measured.
#
# ## Is it any good?
#
# **Regret** is the time of the plan that a table picks, over the time of the best plan: 1.00 is
# perfect. It has to be judged on masks that the table was not made from. These come from the other
# clip. Four ways to choose are compared: this table, the one that is shipped, and two plans that
# are always taken.

# %%
other = [make_case("carphone_pristine", 100 + number % 2, rng) for number in range(40)]
held_out = measured.with_cases(other)
ratios = {
    "the compiled table": [one.ratio for one in judge(compiled, held_out)],
    "the shipped table": [one.ratio for one in judge(shipped, held_out)],
}
for name in ("retain", "small tiles"):
    times = [case.times() for case in other]
    ratios[f"always {name}"] = [of[plans[name]] / min(of.values()) for of in times]

_, ax = plt.subplots(figsize=(9, 4), layout="constrained")
for (name, values), line in zip(ratios.items(), ("-", "--", ":", "-."), strict=True):
    regret = Regret.of(values)
    label = f"{name}: mean {regret.mean:.2f}, {regret.close:.0%} within 3%"
    ax.plot(sorted(values), line, color="#222222" if line == "-" else None, label=label)
ax.set_xlabel("case, from the least regret to the largest")
ax.set_ylabel("time over that of the best plan")
ax.set_title("regret on masks of another clip, predicted for an H200", fontsize=10)
_ = ax.legend(frameon=False)

# %% [markdown]
# Read it from the right: the height is how much a way loses in its worst cases. From the left: how
# far a line stays at 1 is how often the best plan was taken.
#
# These are the model's times, of small requests. The compiled table was made from such requests,
# and the shipped one was not, so this is no fair race: it shows that a table is as good as its
# cases. `tessera-cupy bench regret` makes the same judgement on a GPU.
#
# ## When no key fits
#
# A table need not know everything. Behind its own keys come the *reasoned* ones of the table before
# it, and behind those the **base plans**, which serve every size of block. Here is the compiled
# table without the reasoned keys, and a request of a kind that it never saw: blocks of 16 rows.

# %%
bare = Table(replace(document, reasoned=()))
tiny = BlockMask.from_dense(np.eye(64, dtype=bool), (16, 16))
small = ArraySpec((1, 4, 1024, 128), "bfloat16")
for name, table in {"with reasoned keys": compiled, "without": bare}.items():
    found = make_plan(tiny, small, arch="sm_90a", regime=table)
    print(f"{name}: {found.choice.regime}\n  {found.choice.why}\n  {found.spec.name}")

# %% [markdown]
# So there always is a plan, and the result is the same with any: a table decides how fast, never
# what.
#
# ## Try next
#
# - Draw another key of the shipped table: `viz.draw_table` names them all if you pass a wrong one.
# - Make cases with a head dim of 64, or on an A100: `ModelClock("sm_80")` and plans of
#   `attend_mma`.
# - Take only 40 cases. How many regimes does the tree dare to make?
# - On a GPU: `tessera-cupy profile --out plans/sm90.yaml --budget 10m` measures a table.
# - Notebook 06 measures plans on a mask of your own.
