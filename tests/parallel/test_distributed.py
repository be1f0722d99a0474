"""Ranks of torch.distributed on the CPU, over gloo: results, and failures that all ranks see."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from filelock import FileLock

from tessera_cupy import reference
from tests.parallel.cases import FOUR, TWO, Case, local

pytestmark = pytest.mark.parallel

ROOT = Path(__file__).parents[2]
#: Largest difference from float64: of single sums, and of results that were rounded once or twice.
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}

Found = dict[str, dict[int, dict[str, Any]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """By group and rank, what each job gave; all ranks run once, whatever number of workers."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    folder = root / "ranks"
    with FileLock(root / "ranks.lock"):
        if not folder.exists():
            folder.mkdir()
            environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
            done = subprocess.run(
                [sys.executable, "-m", "tests.parallel.ranks", str(folder)],
                cwd=ROOT,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            (folder / "stderr.txt").write_text(done.stderr)
    results: Found = {}
    for path in sorted(folder.glob("*.pkl")):
        name, _, rank = path.stem.rpartition("-")
        results.setdefault(name, {})[int(rank)] = pickle.loads(path.read_bytes())
    return results


def done(found: Found, group: str, job: str) -> list[Any]:
    """Each rank's result."""
    ranks = found[group]
    for rank, jobs in ranks.items():
        assert jobs[job][0] == "done", (rank, jobs[job][1:])
    return [ranks[rank][job][1] for rank in sorted(ranks)]


def failed(found: Found, group: str, job: str = "") -> dict[int, tuple[str, str, float]]:
    """By rank, the type of its error, its text and the seconds until it came."""
    return {rank: jobs[job][1:] for rank, jobs in found[group].items() if jobs[job][0] == "failed"}


@pytest.mark.parametrize(
    ("group", "case", "scheme"),
    [
        pytest.param(group, case, scheme, id=f"{group}, {case.name}, {scheme}")
        for group, cases in (("two", TWO), ("four", FOUR))
        for case in cases
        for scheme in case.schemes
    ],
)
def test_shards_are_those_of_the_whole(found: Found, group: str, case: Case, scheme: Any) -> None:
    expected = reference.attention(*case.arrays(), case.mask(), sm_scale=case.scale)
    for rank, out in enumerate(done(found, group, f"{case.name}, {scheme}")):
        right = local(expected, case.q, rank, case.layout)
        assert out.shape == right.shape
        np.testing.assert_allclose(out, right, rtol=0, atol=TOLERANCE[case.dtype])


def test_a_plan_gives_the_same_twice(found: Found) -> None:
    case = FOUR[0]
    expected = reference.attention(*case.arrays(), case.mask())
    for rank, (same, out, shown) in enumerate(done(found, "four", "plan twice")):
        assert same
        assert shown == f"ParallelPlan(ulysses, rank {rank} of 4)"
        np.testing.assert_allclose(out, local(expected, case.q, rank, "BHSD"), atol=2e-5)


def test_groups_may_be_parts_of_all_ranks(found: Found) -> None:
    case = TWO[0]
    expected = reference.attention(*case.arrays(), case.mask())
    for rank, out in enumerate(done(found, "four", "subgroup")):
        np.testing.assert_allclose(out, local(expected, case.q, rank // 2, "BHSD"), atol=2e-5)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc")
def test_a_destroyed_group_is_not_kept_alive(found: Found) -> None:
    for before, during, after, text in done(found, "two", "ended group"):
        assert during > before
        assert after == before
        assert text.startswith("`group`: expected a process group, got one that was destroyed")


def test_auto_takes_one_scheme_on_all_ranks(found: Found) -> None:
    case = TWO[0]
    expected = reference.attention(*case.arrays(), case.mask())
    names = set()
    for rank, (name, out) in enumerate(done(found, "two", "auto")):
        names.add(name)
        np.testing.assert_allclose(out, local(expected, case.q, rank, "BHSD"), atol=2e-5)
    assert len(names) == 1


def test_heads_stay_while_that_is_even(found: Found) -> None:
    # 16, 12, 8, 4 blocks: 20 and 20. With 9 for 8, 20 and 21 is the best. Then 17 and 17.
    expected = [((0, 3), (1, 2)), ((0, 3), (1, 2)), ((0, 1), (2, 3))]
    for deals in done(found, "two", "keeps heads"):
        assert deals[:2] == expected[:2]
        assert deals[2] in (expected[2], ((0, 2), (1, 3)))


def test_turns_give_the_same_bits(found: Found) -> None:
    for same in done(found, "two", "turns"):
        assert same == [True] * 4


def test_turns_stay_with_another_deal_and_have_bounds(found: Found) -> None:
    for turns, same, refused in done(found, "two", "turns of a deal"):
        assert turns == (((0,), (1,)), ((2,), (3,)))
        assert same
        assert len(refused) == 3
        assert refused[0].startswith("`turns`: expected 1 to 2, got 3. Fix: ")
        assert refused[2].startswith("`turns`: expected 1 to 1, got 2. Fix: ")


ON_ONE = {
    "bad shape on one": "`q`: expected four axes in layout BHSD, got shape (4, 32, 8)",
    "numpy on one": "`v`: expected a torch tensor, got ndarray",
    "gradient on one": "`k`: expected a tensor that needs no gradient",
    "other dtype on one": "`k`: expected q's dtype float32, got float64",
}


@pytest.mark.parametrize("job", ON_ONE)
def test_a_fault_on_one_rank_is_an_error_on_all(found: Found, job: str) -> None:
    errors = failed(found, "two", job)
    assert sorted(errors) == [0, 1]
    for kind, text, seconds in errors.values():
        assert kind == "RankError"
        assert text.startswith("rank 1 failed: ")
        assert ON_ONE[job] in text
        assert seconds < 15


ON_ALL = {
    "other mask on one": ("ValueError", "`mask`: expected the same mask on all ranks"),
    "other mask on one, later": ("ValueError", "`mask`: expected the same mask on all ranks"),
    "other scheme on one": ("ValueError", "'ulysses' on rank 0 and 'ring' on rank 1"),
    "other heads on one": ("ValueError", "number of heads on all ranks, got 4 on rank 0 and 2"),
    "scheme of no name": ("ValueError", "`scheme`: expected 'ulysses', 'ring', 'auto', or"),
    "degrees of another group": ("ValueError", "degrees for a group of 2 ranks, got 2 x 2"),
    "no time": ("ValueError", "`timeout`: expected a finite positive time, got 0"),
    "mask of another length": ("ValueError", "`mask`: expected 64 query and 64 key tokens"),
    "no mask": ("TypeError", "`mask`: expected a BlockMask or KeySlices, got NoneType"),
    "too much text": ("ValueError", "`q`: expected at least the 40 tokens of the text"),
    "too few heads": ("ValueError", "`most_heads`: expected at least 2 heads"),
    "no group": ("TypeError", "`group`: expected a process group of torch.distributed"),
}


@pytest.mark.parametrize("job", ON_ALL)
def test_what_is_wrong_on_all_is_said_as_elsewhere(found: Found, job: str) -> None:
    errors = failed(found, "two", job)
    assert sorted(errors) == [0, 1]
    for kind, text, _ in errors.values():
        assert kind == ON_ALL[job][0]
        assert ON_ALL[job][1] in text
        assert "Fix: " in text
    assert len({text for _, text, _ in errors.values()}) == 1


def test_the_group_serves_calls_after_bad_ones(found: Found) -> None:
    case = TWO[0]
    expected = reference.attention(*case.arrays(), case.mask())
    for rank, out in enumerate(done(found, "two", "fine afterwards")):
        np.testing.assert_allclose(out, local(expected, case.q, rank, "BHSD"), atol=2e-5)


@pytest.mark.parametrize("group", ["failing", "failing-turn"])
def test_a_rank_that_fails_while_computing_is_named(found: Found, group: str) -> None:
    errors = failed(found, group)
    assert sorted(errors) == [0, 1]
    for kind, text, seconds in errors.values():
        assert (kind, text) == ("RankError", "rank 1 failed: MemoryError: no room for the tiles")
        assert seconds < 5


def test_a_plan_s_arguments_are_checked(found: Found) -> None:
    errors = failed(found, "wrong-run")
    assert sorted(errors) == [0, 1]
    for kind, text, _ in errors.values():
        assert kind == "RankError"
        assert text.startswith("rank 1 failed: ValueError: `q`: expected the plan's shape (1, 4, ")


@pytest.mark.parametrize(
    ("group", "survivors"),
    [
        ("killed-ulysses", [0, 1, 3]),
        ("killed-back", [0, 1]),
        ("killed-ring", [0, 1, 3]),
        ("killed-hybrid", [0, 1, 3]),
    ],
)
def test_a_killed_rank_ends_the_others(found: Found, group: str, survivors: list[int]) -> None:
    assert sorted(found[group]) == survivors
    for rank, (kind, text, seconds) in failed(found, group).items():
        assert kind == "RankError"
        assert text.startswith("rank 2 did not go on within 2 s"), rank
        assert seconds < 2 + 1 + 2  # the time-out, agreement, a busy machine
    assert sorted(failed(found, group)) == survivors


def test_a_rank_that_is_killed_between_turns_ends_the_other(found: Found) -> None:
    assert list(found["killed-turn"]) == [0]
    kind, text, seconds = failed(found, "killed-turn")[0]
    assert kind == "RankError"
    assert text.startswith("rank 1 did not go on within 2 s")
    assert seconds < 2 + 1 + 2


def test_the_rank_that_holds_the_store_may_be_killed_too(found: Found) -> None:
    errors = failed(found, "killed-first")
    assert list(errors) == [1]
    kind, text, seconds = errors[1]
    assert kind == "RankError"
    assert text.startswith("rank 0 is gone, most likely: the store of the process group")
    assert seconds < 2 + 1 + 2


def test_a_rank_that_does_not_come_is_waited_for_as_long_as_is_said(found: Found) -> None:
    errors = failed(found, "late")
    assert list(errors) == [1]
    kind, text, seconds = errors[1]
    assert kind == "RankError"
    assert text.startswith("rank 0 did not begin the call within 1.5 s")
    assert 1.4 < seconds < 3.5
