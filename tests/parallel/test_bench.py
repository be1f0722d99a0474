"""``bench parallel``, as torchrun starts it, over gloo with tiny sizes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from tessera_cupy.bench import parallel_times
from tessera_cupy.bench.corpus import Source
from tessera_cupy.bench.mask_file import _key
from tessera_cupy.bench.parallel_request import FAMILY, with_text
from tessera_cupy.bench.ranks import Ranks
from tessera_cupy.cli import main
from tessera_cupy.video import VideoGrid

ROOT = Path(__file__).parents[2]
SIZES = ["--grid", "5", "8", "16", "--head-dim", "16"]


def torchrun(
    folder: Path, ranks: int, words: list[str], before: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run the command on so many ranks, with a line of Python before it."""
    code = f"import os, sys, time\nrank = int(os.environ['RANK'])\n{before}\n"
    code += (
        "from tessera_cupy.cli import main\nsys.exit(main(['bench', 'parallel', *sys.argv[1:]]))"
    )
    (folder / "bench.py").write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    return subprocess.run(
        [*start, "bench.py", *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def uneven(path: Path, counts: list[int]) -> list[str]:
    """Options for a mask whose heads keep so many of ten columns."""
    keep = np.zeros((len(counts), 10, 10), bool)
    for head, count in enumerate(counts):
        keep[head, :, :count] = True
    source = Source("bikes", VideoGrid(5, 8, 16), len(counts), 16)
    bits = np.packbits(keep, axis=-1, bitorder="little")
    np.savez(path, **{_key(source, FAMILY): bits})
    return ["--heads", str(len(counts)), "--mask-cache", str(path)]


class Alone:
    """The only rank."""

    on_gpu = False

    def wait(self) -> None: ...

    def tell(self, facts: dict[str, float]) -> list[dict[str, float]]:
        return [facts]


def test_a_sample_is_the_time_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(parallel_times, "now", lambda ranks: clock[0])

    def taking(ms: float) -> Callable[[], None]:
        def call() -> None:
            clock[0] += 1e-3 * ms

        return call

    calls = {"short": taking(3.0), "long": taking(50.0)}
    samples = parallel_times.timings(cast("Ranks", Alone()), calls, lambda: None)
    assert samples["short"] == pytest.approx([3.0] * 7)
    assert samples["long"] == pytest.approx([50.0] * 7)


@pytest.mark.parallel
def test_every_scheme_is_compared_and_timed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- bench:parallel -->\n<!-- /bench:parallel -->\n")
    mask = uneven(tmp_path / "masks.npz", [8, 8, 2, 2])
    words = [*SIZES, *mask, "--turns", "1", "2", "--json", "--into", str(page)]
    done = torchrun(tmp_path, 2, words)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert (report["tokens"], report["density"], report["passed"]) == (640, 0.5, True)
    alone, *rows = report["rows"]
    assert alone["ranks"] == 1
    assert [(row["scheme"], row["split"], row["turns"]) for row in rows] == [
        ("ulysses", "work", 1),
        ("ulysses", "work", 2),
        ("ulysses", "count", 1),
        ("ring", None, 1),
    ]
    # 8 and 2 columns for each rank; 16 of 20 columns are one rank's where numbers are equal.
    assert [row["work"] for row in rows] == pytest.approx([1.0, 1.0, 1.6, 1.0])
    assert rows[0]["predicted_ms"] != rows[1]["predicted_ms"]
    for row in rows:
        assert row["efficiency"] == pytest.approx(alone["ms"] / row["ms"] / 2)
        assert row["check"]["rows"] == 4 * 640
        assert row["attention_ms"]["most"] >= row["attention_ms"]["mean"] > 0
    # Half of the heads of q, k, v and O, 320 rows of 64 bytes, from each rank to the other.
    assert [row["sent_bytes"]["total"] for row in rows[:3]] == [2 * 4 * 2 * 320 * 64] * 3
    assert "| ulysses | work | 2 |" in page.read_text()
    assert "torchrun --nproc-per-node 2 -m tessera_cupy" in page.read_text()
    (tmp_path / "run.json").write_text(done.stdout)
    before = page.read_text()
    page.write_text("<!-- bench:parallel -->\n<!-- /bench:parallel -->\n")
    assert main(["bench", "report", str(tmp_path / "run.json"), "--into", str(page)]) == 0
    assert page.read_text() == before


@pytest.mark.parallel
def test_a_hybrid_runs_on_four_ranks(tmp_path: Path) -> None:
    words = ["--heads", "5", "--masks", "random", "--scheme", "2x2", "--scheme", "auto", "--json"]
    done = torchrun(tmp_path, 4, [*SIZES, *words])
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    names = [row["scheme"] for row in report["rows"]]
    assert names[1:3] == ["ulysses 2 x ring 2"] * 2
    assert names[3] == report["planner"]["takes"]


@pytest.mark.parallel
def test_a_wrong_output_on_one_rank_is_told(tmp_path: Path) -> None:
    before = """
from tessera_cupy.parallel.plan import ParallelPlan
run = ParallelPlan.run
if rank == 1:
    ParallelPlan.run = lambda *given, **more: run(*given, **more) * 1.01
"""
    words = ["--heads", "2", "--masks", "random", "--scheme", "ring"]
    done = torchrun(tmp_path, 2, [*SIZES, *words], before)
    assert done.returncode == 1
    assert "WRONG" in done.stdout
    assert "wrong output on ring: error " in done.stderr


@pytest.mark.parallel
def test_a_rank_that_hangs_ends_the_others(tmp_path: Path) -> None:
    before = """
from tessera_cupy.bench import parallel_run
if rank == 1:
    parallel_run.measure = lambda *given: time.sleep(8)
"""
    words = ["--heads", "2", "--masks", "random", "--timeout", "2"]
    done = torchrun(tmp_path, 2, [*SIZES, *words], before)
    assert done.returncode == 1
    assert "rank 1 did not begin the call within 2 s" in done.stderr


@pytest.mark.parallel
def test_torchrun_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "parallel"]) == 1
    assert "Fix: run `torchrun --nproc-per-node 2 -m" in capsys.readouterr().err


def test_text_is_kept_in_full() -> None:
    bits = np.packbits(np.eye(3, dtype=bool)[None], axis=-1, bitorder="little")
    kept = np.unpackbits(with_text(bits, 150, 100), axis=-1, count=4, bitorder="little")[0]
    # 128 tokens in whole blocks; the third block has 22 of the video and 42 of the text.
    assert kept.tolist() == [[1, 0, 1, 1], [0, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]]
