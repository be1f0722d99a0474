"""Tasks over time and the parts of a request: boxes, idle time, balance, words."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tessera_cupy import ArraySpec, make_plan, viz
from tessera_cupy.masks import BlockMask
from tessera_cupy.profile import Profile
from tessera_cupy.timeline import Timeline

pytest.importorskip("matplotlib")

# Slot 0 works from 0 to 3 without a break; slot 1 from 1 to 2; slot 2 not at all.
SLOT, START, END = [0, 1, 0], [0.0, 1.0, 2.0], [2.0, 2.0, 3.0]

Box = tuple[float, float, float, float]


class FakeCupy:
    """An array that only its own ``get`` brings to the host."""

    def __init__(self, values: Any) -> None:
        self._values = np.array(values)

    def get(self) -> Any:
        return self._values


@pytest.fixture
def ax() -> Iterator[Any]:
    from matplotlib.figure import Figure

    return Figure(figsize=(8, 4)).subplots()


def boxes(ax: Any, *, hatched: bool) -> list[Box]:
    from matplotlib.collections import PolyCollection

    return sorted(
        tuple(map(float, path.get_extents().extents))
        for collection in ax.collections
        if isinstance(collection, PolyCollection) and bool(collection.get_hatch()) == hatched
        for path in collection.get_paths()
    )


def words(ax: Any) -> list[str]:
    return [text.get_text() for text in ax.get_legend().get_texts()]


@pytest.mark.parametrize("kind", [list, np.array, FakeCupy])
def test_a_box_a_task_and_idle_time_between(ax: Any, kind: Any) -> None:
    viz.draw_tasks(ax, kind(SLOT), kind(START), kind(END), slots=3)
    assert boxes(ax, hatched=False) == [(0, 0, 2, 1), (1, 1, 2, 2), (2, 0, 3, 1)]
    assert boxes(ax, hatched=True) == [(0, 1, 1, 2), (0, 2, 3, 3), (2, 1, 3, 2)]
    # 4 ms of work in 3 slots: 4/3 each, and 3 in the busiest.
    assert ax.get_title() == "3 tasks on 3 slots: 3.000 ms, busiest / mean 2.25"
    assert [float(line.get_xdata()[0]) for line in ax.lines] == [4 / 3]
    assert words(ax) == ["tasks", "idle", "the end of an even spread, 1.333 ms"]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("time (ms)", "SM slot")
    assert ax.get_ylim() == (3, 0)


def test_idle_time_is_what_tasks_leave() -> None:
    from matplotlib.figure import Figure

    rng = np.random.default_rng(0)
    slot, start, end = [], [], []
    for of in range(7):
        cuts = np.sort(rng.random(12))
        slot += [of] * 6
        start += cuts[::2].tolist()
        end += cuts[1::2].tolist()
    order = rng.permutation(len(slot))
    slot, start, end = (np.array(x)[order] for x in (slot, start, end))
    ax = Figure().subplots()
    viz.draw_tasks(ax, slot, start, end)
    idle = sum((x1 - x0) * (y1 - y0) for x0, y0, x1, y1 in boxes(ax, hatched=True))
    assert idle == pytest.approx(7 * end.max() - (end - start).sum())


def test_heads_have_colours_and_tiles_numbers(ax: Any) -> None:
    viz.draw_tasks(ax, SLOT, START, END, head=[5, 4, 5], tile=[10, 11, 12])
    assert words(ax)[:2] == ["head 4", "head 5"]
    faces = ax.collections[1].get_facecolor()
    assert (faces[0] == faces[2]).all()
    assert (faces[0] != faces[1]).any()
    assert sorted(text.get_text() for text in ax.texts) == ["10", "11", "12"]


def test_many_heads_share_the_colours(ax: Any) -> None:
    viz.draw_tasks(ax, range(9), [0] * 9, [1] * 9, head=range(9))
    assert words(ax)[0] == "tasks; 9 heads take these colours in turn"


def test_balance() -> None:
    assert viz.load_balance(SLOT, START, END) == 3 / 2
    assert viz.load_balance(SLOT, START, END, slots=3) == 9 / 4
    assert viz.load_balance([0, 1], [0, 0], [1, 1]) == 1
    assert viz.load_balance([0], [0], [0]) == 1


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"slot": [0, 1]}, ValueError, "`start`: expected shape"),
        ({"slot": [0.0, 1.0, 0.0]}, TypeError, "`slot`: expected integers"),
        ({"slot": [], "start": [], "end": []}, ValueError, "`slot`: expected at least one"),
        ({"slot": [0, -1, 0]}, ValueError, "`slot`: expected from 0 to 0"),
        ({"slots": 1}, ValueError, "`slot`: expected from 0 to 0, got slots 0 to 1"),
        ({"end": [2, 0.5, 3]}, ValueError, "0.5 before 1 of task 1"),
        ({"start": [0, 1, 1.5]}, ValueError, "task 2, which begins at 1.5 ms in slot 0"),
        ({"start": [0, float("nan"), 2]}, ValueError, "`start`: expected finite"),
        ({"head": [0, 1]}, ValueError, "`head`: expected shape"),
        ({"tile": [0.5, 1, 2]}, TypeError, "`tile`: expected integers"),
    ],
)
def test_wrong_tasks(ax: Any, change: dict[str, Any], error: Any, words: str) -> None:
    given = {"slot": SLOT, "start": START, "end": END} | change
    with pytest.raises(error, match=words):
        viz.draw_tasks(ax, **given)


def test_the_tasks_of_a_plan_where_a_model_expects_them(ax: Any) -> None:
    mask = BlockMask.from_dense([[1, 0, 0], [1, 1, 0], [1, 1, 1]], (64, 64))
    spec = ArraySpec((1, 2, 192, 64), "bfloat16")
    plan = make_plan(mask, spec, arch="sm_80", regime="attend_mma/q64k64/retain-pack/longest")
    tasks = plan.tasks()
    # A millisecond a step, dealt to two slots in turn: 3, 2, 1 and 3, 2, 1 by head.
    length = (tasks.task_end - tasks.task_begin).astype(float)
    order = np.arange(len(tasks))
    start = np.array([length[i % 2 : i : 2].sum() for i in order])
    placed = SimpleNamespace(slots=3, slot=order % 2, start_ms=start, end_ms=start + length)
    viz.draw_timeline(ax, plan, placed)
    area = sum((x1 - x0) * (y1 - y0) for x0, y0, x1, y1 in boxes(ax, hatched=False))
    assert area == 2 * (1 + 2 + 3)
    assert words(ax)[:2] == ["head 0", "head 1"]
    name, rest = ax.get_title().split("\n")
    assert name == "predicted for attend_mma/q64k64/retain-pack/longest:"
    assert rest.startswith("6 tasks on 3 slots")
    placed.slot = order[1:] % 2
    with pytest.raises(ValueError, match="`placed`: expected the plan's 6 tasks, got 5"):
        viz.draw_timeline(ax, plan, placed)


def test_measured_tasks_are_drawn_on_their_multiprocessors(ax: Any) -> None:
    """Two at a time on the last of three; the second one has nothing to do."""
    mask = BlockMask.from_dense([[1, 0, 0], [1, 1, 0], [1, 1, 1]], (64, 64))
    spec = ArraySpec((1, 1, 192, 64), "bfloat16")
    plan = make_plan(mask, spec, arch="sm_80", regime="attend_mma/q64k64/retain-pack/longest")
    measured = timeline(sm=[0, 2, 2], begin=[0, 0, 500], end=[1000, 4000, 2000])
    viz.draw_timeline(ax, plan, measured)
    # Places 2 and 5 are on multiprocessor 2, 0 and 3 on the first one.
    assert boxes(ax, hatched=False) == [(0, 0, 1, 1), (0, 2, 4, 3), (0.5, 5, 2, 6)]
    assert boxes(ax, hatched=True) == [
        *[(0, 1, 4, 2), (0, 3, 4, 4), (0, 4, 4, 5), (0, 5, 0.5, 6), (1, 0, 4, 1), (2, 5, 4, 6)]
    ]
    name, rest = ax.get_title().split("\n")
    assert name == "measured on a GPU, attend_mma/q64k64/retain-pack/longest:"
    assert rest.startswith("3 tasks on 6 slots: 4.000 ms")
    measured = timeline(sm=[0, 2], begin=[0, 0], end=[1000, 4000])
    with pytest.raises(ValueError, match="`placed`: expected the plan's 3 tasks, got 2"):
        viz.draw_timeline(ax, plan, measured)


def timeline(sm: list[int], begin: list[float], end: list[float]) -> Timeline:
    zeros = np.zeros(len(sm), np.int32)
    begins, ends = np.array(begin, float), np.array(end, float)
    numbers = (zeros, zeros, zeros, zeros > 0)
    return Timeline("a GPU", 3, np.array(sm, np.int64), begins, ends, *numbers, 0.0, 0.0)


def test_parts_of_a_request_follow_each_other(ax: Any) -> None:
    viz.draw_profile(ax, Profile(False, 0.0, 2.0, 1.0, 0.5, 4.0, 0.5))
    bars = [(bar.get_x(), bar.get_width(), bar.get_hatch()) for bar in ax.patches]
    host, gpu = "////", ""
    assert bars == [
        (0, 0, gpu),
        (0, 2, host),
        (2, 1, host),
        (3, 0.5, host),
        (3.5, 4, gpu),
        (7.5, 0.5, gpu),
    ]
    assert ax.get_title() == "a request of 8.000 ms: preparation 3.500 ms, 43.8%"
    assert [text.get_text() for text in ax.get_yticklabels()][4] == "attention"
    assert ax.texts[4].get_text() == "4.0000 ms, 50.0%"


def test_only_the_choice_is_the_hosts_where_the_gpu_plans(ax: Any) -> None:
    viz.draw_profile(ax, Profile(True, 1, 1, 1, 1, 1, 1))
    assert [bool(bar.get_hatch()) for bar in ax.patches] == [False] * 3 + [True] + [False] * 2


def test_a_request_of_no_time_is_drawn(ax: Any) -> None:
    viz.draw_profile(ax, Profile(True, 0, 0, 0, 0, 0, 0))
    assert ax.get_title() == "a request of 0.000 ms: preparation 0.000 ms, 0.0%"


def test_very_many_gaps_are_hatched_as_one_path(ax: Any) -> None:
    from matplotlib.patches import PathPatch

    at = np.arange(1001)
    viz.draw_tasks(ax, at * 0, 2 * at + 1, 2 * at + 2)
    (patch,) = [artist for artist in ax.get_children() if isinstance(artist, PathPatch)]
    assert patch.get_hatch()
    boxes = patch.get_path().vertices.reshape(-1, 5, 2)
    assert boxes[:, 0, 0].tolist() == (2 * at).tolist()
    assert boxes[:, 1, 0].tolist() == (2 * at + 1).tolist()
