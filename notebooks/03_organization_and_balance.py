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
# # Organization: which multiprocessor does what, and when
#
# At the end you will know
#
# - what a task is, and why the order in which tasks start decides how long a GPU takes;
# - what *longest first*, *split-K*, groups of heads, *runs*, *alternate* and twins are;
# - how to draw the tasks of a plan over time, before you have a GPU.
#
# Notebook 01 says what tiles and steps are. Nothing here needs a GPU: **all times here are
# predicted** by the package's cost model, none was measured. To run it, install the package with
# its extras from a clone of the repository: `pip install '.[notebooks]'` in the folder with
# `pyproject.toml`, or `make venv`.

# %%
# %matplotlib inline
import matplotlib.pyplot as plt
import numpy as np

from tessera_cupy import ArraySpec, BlockMask, make_plan, viz
from tessera_cupy.bench import clips
from tessera_cupy.cost import count_work, predict
from tessera_cupy.cost.timeline import first_free
from tessera_cupy.sparsifiers import spade, sta
from tessera_cupy.video import VideoGrid

# %% [markdown]
# ## A GPU is many workers
#
# A GPU has about a hundred **multiprocessors** (SMs). A **CTA** is a team of threads on one of
# them. A **task** is what one CTA does: a tile, which is some query rows and their list of steps.
# All tasks together are the attention; it is done when the last task is.
#
# Lists differ in length, so tasks do. Here is a toy: nine tasks, and a GPU with room for four CTAs,
# its **slots**. A step takes 1 ms. Whoever is free takes the next task.


# %%
def stacked(count, high):
    """Axes above each other, over one time."""
    size = (12, high * count + 0.6)
    return plt.subplots(count, 1, figsize=size, layout="constrained", sharex=True)[1]


def finish(axes, longest):
    """One scale of time, and one legend and label for all."""
    axes[0].set_xlim(0, longest)
    for ax in axes[:-1]:
        ax.get_legend().remove()
        ax.set_xlabel("")
    axes[-1].get_legend().texts[-1].set_text("the end of an even spread")


lengths = np.array([2, 3, 2, 4, 3, 2, 3, 2, 9])
longest_first = np.sort(lengths)[::-1]
parts = np.sort([2, 3, 2, 4, 3, 2, 3, 2, 3, 3, 3])[::-1]

orders = {"as they come": lengths, "longest first": longest_first, "longest first, split": parts}
axes = stacked(3, 1.8)
for ax, (name, steps) in zip(axes, orders.items(), strict=True):
    slot, start = first_free(steps.astype(float), 4)
    viz.draw_tasks(ax, slot, start, start + steps, slots=4)
    ax.set_title(f"{name}: {ax.get_title()}", fontsize=10)
finish(axes, 13)

# %% [markdown]
# A line is a slot, a box is a task, time goes to the right. Hatched is idle. The dashed line is
# where all would end if the work were spread evenly.
#
# - *As they come*, the task of nine steps starts last, and all others wait for it.
# - *Longest first*, it starts at once, and short tasks fill the end. It alone is now the limit.
# - *Split*: the long tile becomes three tasks of three steps. No task is long any more.
#
# *Busiest / mean* in the titles is the **load balance**: the busy time of the busiest slot over the
# mean of all. 1.00 is even.
#
# How can a tile be split? Attention is a weighted sum over keys, and a sum can be taken in parts.
# Each part writes its sum, and a second small kernel merges the parts, always in the same order, so
# that results are the same bit for bit. This is called **split-K**.
#
# ## A real mask
#
# SPADE's masks of eight heads, from a real clip. The longest task has twice the steps of the
# shortest. The pictures are of an H200, which has 132 multiprocessors; the kernel puts one CTA on
# each, and each takes every 132nd task.

# %%
grid = VideoGrid(13, 20, 30)
q, k, _ = clips.video_heads("bikes", grid, heads=8)
mask = spade.select(q, k, grid).mask


def plan_of(mask, heads, kernel, order, arch="sm_90a"):
    """A plan in bfloat16 with head dim 128; no data is needed to plan."""
    spec = ArraySpec((1, heads, mask.shape[0], 128), "bfloat16")
    return make_plan(mask, spec, regime=f"{kernel}/{order}", arch=arch)


def draw_plans(plans):
    """The predicted tasks of each plan over one time."""
    axes = stacked(len(plans), 2.6)
    longest = 0.0
    for ax, (name, plan) in zip(axes, plans.items(), strict=True):
        made = predict(plan)
        head = plan.tasks().task_head
        viz.draw_tasks(ax, made.slot, made.start_ms, made.end_ms, head=head, slots=made.slots)
        ax.set_title(f"{name}, {made.gpu.name}, predicted: {ax.get_title()}", fontsize=10)
        longest = max(longest, made.attend_ms)
    finish(axes, longest)


KERNEL = "attend_wgmma/q128k192/share-pack"
draw_plans({order: plan_of(mask, 8, KERNEL, order) for order in ("rows", "longest+split")})

# %% [markdown]
# Look at the right edges. In the order of rows some slots end early and others late. Longest first,
# the first three rounds end nearly together, and only a short last round is left for some. Nothing
# was split: 488 tasks fill 132 slots well enough, and the plan's `split` saw that.
#
# ## Few long rows
#
# Some masks have rows with far more keys than all others: tokens of a prompt that look at all of
# the video, for example. Here each block looks at five neighbours, and the first two blocks look at
# everything.

# %%
blocks = 64
at = np.arange(blocks)
keep = abs(at[:, None] - at) <= 2
keep[:2] = True
long_rows = BlockMask.from_dense(keep, (128, 128))
wide = "attend_wgmma/q128k192/retain-pack"
orders = ("rows", "longest", "longest+split")
draw_plans({order: plan_of(long_rows, 8, wide, order) for order in orders})

# %% [markdown]
# Two tiles of each of the eight heads are long: sixteen tasks keep sixteen slots busy, and the
# others wait. Longest first does not help: one long task takes most of the time by itself, and its
# slot gets every 132nd task all the same. Cut in parts, the long tiles are spread over all slots,
# and the whole is predicted to end in two thirds of the time.
#
# ## Splitting is not free
#
# A part starts its pipeline anew, and writes a sum that the merge reads again. One head of the same
# mask of SPADE has fewer tiles than there are slots, so `split` cuts them:

# %%
one = BlockMask.from_dense(mask.to_dense()[:, :1], (64, 64), mask.shape)
print(
    f"{'mask':<12} {'order':<14} {'tasks':>6} {'split':>6} {'predicted':>11} {'load balance':>13}"
)
for name, which, heads, kernel in (
    ("8 heads", mask, 8, KERNEL),
    ("1 head", one, 1, KERNEL),
    ("long rows", long_rows, 8, wide),
):
    for order in orders:
        plan = plan_of(which, heads, kernel, order)
        made = predict(plan)
        balance = viz.load_balance(made.slot, made.start_ms, made.end_ms, slots=made.slots)
        tasks = plan.tasks()
        print(f"{name:<12} {order:<14} {len(tasks):>6} {len(tasks.merge_tile):>6}", end=" ")
        print(f"{1000 * made.ms:>8.1f} us {balance:>13.2f}")

# %% [markdown]
# Look at the lines of one head. Its parts are a few more than the slots, so some slots get two, and
# the model expects splitting to cost more than it gains. Such cases are why the choice between
# plans is measured, and kept in tables: that is notebook 04.
#
# ## Heads within L2
#
# All tasks of a head read that head's keys and values again and again. They come from the GPU's
# **L2 cache**, as long as they fit. So tasks run in **groups of heads**: as many heads as fit in L2
# together, then the next ones. Longest first is within a group.
#
# K and V of a head here are 2 x 7,800 x 128 numbers of 2 bytes: 4 MB. The L2 of an RTX 3090 has 6
# MB, that of an A100 has 40 MB.

# %%
half = BlockMask.from_dense(mask.to_dense()[:, :4], (64, 64), mask.shape)
small = "attend_mma/q64k64/retain-pack"
cards = {"sm_86": "one head at a time", "sm_80": "all heads at once"}
draw_plans({said: plan_of(half, 4, small, "longest", arch) for arch, said in cards.items()})

# %% [markdown]
# Colours are heads. Above they follow each other: only the head that runs has to be in L2. Below
# all four fit, so they run together, and the longest tasks of all heads start first.
#
# ## Who reads the same keys at the same time
#
# Two more orders help L2. They change no task, only who runs beside whom.
#
# - **runs**: tiles whose longest run of keys lies at the same place are neighbours;
# - **alternate**: every second task walks its steps backwards, so that it begins with the keys
#   where the one before ended.
#
# The picture shows the first 32 tasks in the order of their launch, from left to right. A dot is a
# step: up the axis are the keys that it reads. Light is early in the task, dark is late.

# %%
figure, axes = plt.subplots(1, 3, figsize=(15, 4.5), layout="constrained", sharey=True)
for ax, order in zip(axes, ("rows", "runs", "alternate"), strict=True):
    plan = plan_of(one, 1, small, order, "sm_80")
    tiles, tasks = plan.tiles(), plan.tasks()
    for place in range(32):
        tile = tasks.task_tile[place]
        keys = tiles.frag_start[slice(*tiles.frag_offsets[tile : tile + 2])]
        age = np.linspace(0, 1, len(keys))
        if tasks.task_reverse[place]:
            age = age[::-1]
        dots = ax.scatter(np.full(len(keys), place), keys, c=age, cmap="Blues", vmin=-0.3, s=22)
    ax.set_title(order)
    ax.set_xlabel("task, in the order of launch")
axes[0].set_ylabel("key (token)")
bar = figure.colorbar(dots, label="when in its task: 0 first step, 1 last")
_ = bar.ax.set_ylim(0, 1)

# %% [markdown]
# In *runs* the dense diagonal climbs more evenly. In *alternate* light and dark change sides from
# one task to the next. What this gains depends on the GPU; the cost model does not know how L2 is
# shared from moment to moment, and predicts hardly a difference. Measure it.
#
# ## Twins
#
# On Hopper, two CTAs whose tiles have equal lists can share their loads: each loads half of a step
# for both. They must be neighbours in the order of launch, and walk in the same direction. STA's
# masks have many such **twins**, since a logical block of 384 queries becomes three tiles with the
# same list.

# %%
window = sta.mask(VideoGrid(18, 24, 32), [(3, 3, 3)], tile=(6, 8, 8))
for order in ("rows", "longest+split", "alternate"):
    plan = plan_of(window, 8, "attend_wgmma/q128k192/split-pack", order)
    work = count_work(plan.tiles(), plan.tasks(), plan.config)
    made = predict(plan)
    print(
        f"{order:<14} {work.twins.mean():>4.0%} of the tasks are twins; L2 alone would take",
        end=" ",
    )
    print(f"{made.bounds['L2']:.2f} ms, the whole {made.ms:.2f} ms (predicted)")

# %% [markdown]
# With *alternate* neighbours walk in opposite directions, so none are twins, and L2 has to give
# twice as much. One order can spoil what another one gains.
#
# ## Try next
#
# - In the cell *Few long rows*, make 1 or 8 rows long. From when on does splitting pay?
# - `plan_of(mask, 8, small, "longest+split", "sm_89")` is an RTX 4090; `tessera_cupy.cost.GPUS` has
#   the others.
# - On a GPU, `plan.timeline(q, k, v)` measures what is predicted here, task by task, and
#   `viz.draw_timeline(ax, plan, plan.timeline(q, k, v))` draws it. Notebook 06 does that.
# - `predict(plan).bounds` says how long arithmetic, softmax, L2 and memory would take alone.
# - Notebook 04 shows how the package chooses among all these plans.
