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
# # Measure your own mask
#
# At the end you will know
#
# - how fast your mask is on your GPU, under several plans, beside dense attention;
# - where the time of a request goes;
# - what the cost model says without a GPU, and how far to trust it.
#
# **This notebook is for a GPU.** Without one it runs all the same: it says so, and shows what the
# cost model predicts in place of what it would measure. To run it, install the package with its
# extras from a clone of the repository: `pip install '.[cuda12,notebooks]'` (or `cuda13`; or
# `'.[notebooks]'` without a GPU) in the folder with `pyproject.toml`, or `make venv`.

# %%
# %matplotlib inline
from functools import partial

import matplotlib.pyplot as plt
import numpy as np

from tessera_cupy import ArraySpec, BlockMask, make_plan, viz
from tessera_cupy.bench import gpu
from tessera_cupy.cost import predict
from tessera_cupy.errors import NoGpuError, PlanNotEligibleError, UnsupportedGpuError
from tessera_cupy.gpus import arch_of
from tessera_cupy.interop import import_cupy, numpy_dtype

# %% [markdown]
# ## Is there a GPU?

# %%
try:
    cupy = import_cupy()
    ARCH = arch_of(cupy.cuda.Device().id).name
    print(f"Measuring on {gpu.name()}, {ARCH}.")
except (NoGpuError, UnsupportedGpuError) as error:
    cupy, ARCH = None, "sm_90a"
    print(error)
    print("\nAll times below are PREDICTED for an H200. To measure, run this notebook on a machine")
    print("with an NVIDIA GPU of compute capability 8.0 or more, with the extra cuda12 or cuda13.")

# %% [markdown]
# ## Your mask
#
# Put your own mask into `my_mask`. It returns which blocks of keys each block of queries keeps, for
# each head: `True` means keep. The one here is made up: a window of neighbours, the first blocks
# for everybody, and a few blocks from anywhere, which differ from head to head.
#
# The sequence is short without a GPU, so that the notebook takes seconds; real ones have 30,000
# tokens and more.

# %%
HEADS, TOKENS = (12, 32_760) if cupy else (4, 8_190)
HEAD_DIM, BLOCK = 128, 64


def my_mask():
    """(heads, query blocks, key blocks) bool."""
    blocks = -(-TOKENS // BLOCK)
    at = np.arange(blocks)
    window = abs(at[:, None] - at) <= 2
    scattered = np.random.default_rng(0).random((HEADS, blocks, blocks)) < 0.08
    return window | (at < 4) | scattered


kept = my_mask()
mask = BlockMask.from_dense(kept, (BLOCK, BLOCK), (TOKENS, TOKENS))
print(f"density {mask.density():.3f}, run coverage {mask.run_coverage():.2f}")
_, ax = plt.subplots(figsize=(6, 6.6), layout="constrained")
viz.draw_mask(ax, mask)

# %% [markdown]
# Blue is kept: rows are queries, columns are keys.
#
# ## Several plans, one result
#
# The first plan is the one that the package would choose (notebook 04). The others are named, from
# simple to clever. A plan that the mask, the head dim or the GPU does not allow is left out.
#
# On a GPU the mask is in its memory, and the GPU makes the plan from it where it can.

# %%
NAMES = {
    "small tiles, a block a step": "attend_mma/q64k64/retain-pack/longest+split",
    "tiles of 128, aligned": "attend_wgmma/q128k192/merge-merge/longest+split",
    "tiles of 128, packed": "attend_mma/q128k64/share-pack/longest+split",
    "for Hopper, packed": "attend_wgmma/q128k192/share-pack/longest+split",
    "for Hopper, rows regrouped": "attend_wgmma/q128k192/regroup-pack/longest+split",
}
request = ArraySpec((1, HEADS, TOKENS, HEAD_DIM), "bfloat16")
there = mask
if cupy:
    there = BlockMask.from_dense(cupy.asarray(kept), (BLOCK, BLOCK), (TOKENS, TOKENS))


def plan_for(mask, regime):
    """A plan for the GPU that is here; without one, for an H200."""
    if cupy:
        return make_plan(mask, q, k, v, regime=regime)
    return make_plan(mask, request, regime=regime, arch=ARCH)


q = k = v = out = None
if cupy:
    rng = np.random.default_rng(1)
    numbers = (rng.standard_normal(request.shape, np.float32) for _ in range(3))
    q, k, v = (cupy.asarray(x.astype(numpy_dtype("bfloat16"))) for x in numbers)
    out = cupy.empty_like(q)

chosen = plan_for(there, "auto")
plans = {f"chosen: {chosen.spec.mapping.name}": chosen}
for name, regime in NAMES.items():
    try:
        plan = plan_for(there, regime)
    except PlanNotEligibleError as error:
        print(f"left out: {name}: {error}")
        continue
    if plan.spec != chosen.spec:
        plans[name] = plan
for name, plan in plans.items():
    print(f"{name:<28} {plan.spec.name}")

# %% [markdown]
# ## Right first, then fast
#
# A few rows of the first head are compared with attention computed in float64. On a GPU this is the
# output of each plan in bfloat16; without one there is nothing to check here, and notebook 01 has
# such a check.


# %%
def exact_rows(rows):
    """The output of some queries of head 0, in float64."""
    first = [cupy.asnumpy(x[0, 0]).astype(np.float64) for x in (q, k, v)]
    scores = first[0][rows] @ first[1].T / np.sqrt(HEAD_DIM)
    scores[~kept[0, rows // BLOCK].repeat(BLOCK, axis=1)[:, :TOKENS]] = -np.inf
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True) @ first[2]


if cupy:
    rows = np.array([0, TOKENS // 2, TOKENS - 1])
    exact = exact_rows(rows)
    for name, plan in plans.items():
        found = cupy.asnumpy(plan.run(q, k, v)[0, 0])[rows].astype(np.float64)
        error = np.abs(found - exact).max()
        print(f"{name:<28} largest error {error:.1e}, of values up to {np.abs(exact).max():.2f}")
        assert error < 0.02 * np.abs(exact).max()

# %% [markdown]
# ## The times
#
# On a GPU all plans are timed in turns by CUDA events, so that a clock that drifts meets all alike.
# Dense attention is timed with them: cuDNN's, through torch, where torch is installed. Without a
# GPU each time is predicted, and dense attention is this package's own.

# %%
times = {}
if cupy:
    calls = {name: partial(plan.run, q, k, v, out=out) for name, plan in plans.items()}
    if gpu.has_torch():
        dense = gpu.dense_call(q, k, v, "CUDNN_ATTENTION")
        try:
            dense()
            calls["dense, cuDNN"] = dense
        except RuntimeError as error:
            print(f"no dense attention of cuDNN: {error}")
    else:
        print("torch is not installed, or has no GPU: no dense attention of cuDNN to compare with.")
    timed = gpu.timings(calls, lambda: None, warm_up=1, runs=5)
    times = {name: timing.median for name, timing in timed.items()}
    how = f"measured on {gpu.name()}"
else:
    times = {name: predict(plan).ms for name, plan in plans.items()}
    blocks = -(-TOKENS // 128)
    every = BlockMask.from_dense(np.ones((blocks, blocks), bool), (128, 128), (TOKENS, TOKENS))
    times["dense, this package"] = predict(plan_for(every, "auto")).ms
    how = "PREDICTED for an H200, not measured"

operations = 4 * HEAD_DIM * mask.active_pairs()
_, ax = plt.subplots(figsize=(9, 3.8), layout="constrained")
for line, (name, ms) in enumerate(times.items()):
    dense = name.startswith("dense")
    work = 4 * HEAD_DIM * HEADS * TOKENS**2 if dense else operations
    style = {"color": "#D9D9D9", "hatch": "//"} if dense else {"color": "#A9DCF8"}
    ax.barh(line, ms, edgecolor="#222222", linewidth=0.8, **style)
    label = f" {ms:.3f} ms, {work / ms / 1e9:.0f} TFLOP/s"
    ax.text(ms, line, label, va="center", fontsize=9)
ax.set_yticks(range(len(times)), list(times))
ax.invert_yaxis()
ax.set_xlim(0, 1.35 * max(times.values()))
ax.set_xlabel("time of the attention (ms)")
_ = ax.set_title(f"one mask, several plans: {how}", fontsize=10)

# %% [markdown]
# Shorter is better. TFLOP/s count only the (query, key) pairs that the mask keeps, four operations
# for each of the 128 elements of a row; so the rates say how well the GPU is used, whatever the
# density. Compare two things:
#
# - the shortest bar with the hatched one, dense attention: that is what the mask saves;
# - their rates: where a plan's rate is that of dense attention, skipping work costs nothing.
#
# ## Where the time goes
#
# On a GPU, `plan.profile` takes a whole request apart: from the mask to lists of tiles, tasks, the
# attention, the merge of split tiles. The bars follow each other in time. What comes before
# *attention* is preparation, and should be short beside it.

# %%
if cupy:
    _, ax = plt.subplots(figsize=(9, 3.6), layout="constrained")
    viz.draw_profile(ax, chosen.profile(q, k, v))
else:
    print("plan.profile() needs a GPU: it would show mask, tiles, tasks, attention and merge here.")

# %% [markdown]
# Inside the attention kernel, tasks lie on the multiprocessors: a line is a slot for a CTA, a box a
# task, hatched is idle (notebook 03). The cost model says where it expects them. On a GPU,
# `plan.timeline` runs kernels that note when and where each task begins and ends, and the second
# picture shows that, over the same time.

# %%
name = min((name for name in plans if name in times), key=times.get)
fastest = plan_for(mask, plans[name].spec)
expected = predict(fastest)
seen = fastest.timeline(q, k, v) if cupy else None
rows = 2 if cupy else 1
figure, axes = plt.subplots(
    rows, figsize=(11, 4.2 * rows), layout="constrained", sharex=True, squeeze=False
)
viz.draw_timeline(axes[0, 0], fastest, expected)
print(f"{name}: balance {expected.balance:.2f} predicted for {expected.gpu.name}")
if cupy:
    viz.draw_timeline(axes[1, 0], fastest, seen)
    axes[0, 0].set_xlim(0, max(seen.attend_ms, expected.attend_ms))
    print(f"balance {seen.balance:.2f} here; the GPU's timer ticks every {seen.tick_us:.3f} us")

# %% [markdown]
# *Balance* is the time of the busiest multiprocessor over the mean of all; 1.00 is even. Where the
# two pictures differ, look for tasks that took longer than others of as many steps: what the model
# does not know (how L2 is shared, how fast the clock is) shows there.
#
# ## How far to trust the prediction
#
# The model's constants are fitted to times of one GPU. On a GPU the lines below set its predictions
# beside what was measured; without one they say what it thinks the limit is.

# %%
for name, plan in plans.items():
    made = predict(plan_for(mask, plan.spec))
    beside = f"measured {times[name]:.3f} ms, " if cupy else ""
    print(f"{name:<28} {beside}predicted {made.ms:.3f} ms on {made.gpu.name}, limit: {made.bound}")

# %% [markdown]
# ## Try next
#
# - Put your mask into `my_mask`, with your `BLOCK`, `HEADS`, `TOKENS` and `HEAD_DIM`.
# - Make the blocks smaller: 32, then 16. Which plan loses most?
# - Keep more: from which density on is dense attention faster?
# - `tessera-cupy bench families` does this for ten families of masks, with every output checked;
#   `tessera-cupy profile` makes a table for your GPU of what it finds.
