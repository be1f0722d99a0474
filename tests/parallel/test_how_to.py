"""The program of the how-to guide runs under torchrun as it is written, and prints what is said."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "parallel.md").read_text()
BLOCKS = re.findall(r"<!-- needs: torch, torchrun -->\n```python\n(.*?)```", PAGE, re.DOTALL)
SAID = re.findall(r"```text\n(rank.*?)```", PAGE, re.DOTALL)
COMMANDS = re.findall(r"```bash\n(torchrun [^\n]*ranks\.py)\n```", PAGE)


def torchrun(folder: Path, code: str, *, gpus: bool = False) -> list[str]:
    """Run a program by the guide's command; its lines, in order."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if not gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    assert COMMANDS == ["torchrun --nproc-per-node 2 ranks.py"]
    (folder / "ranks.py").write_text(code)
    # Of one pipe for all ranks two could write to one line, as torchrun lets nothing be buffered.
    apart = ["--redirects", "1", "--log-dir", "logs"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *apart, *COMMANDS[0].split()[1:]],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    logs = folder.glob("logs/**/stdout.log")
    return sorted(line for log in logs for line in log.read_text().splitlines())


@pytest.mark.parallel
def test_the_guide_s_program_prints_what_it_says(tmp_path: Path) -> None:
    assert torchrun(tmp_path, BLOCKS[0]) == SAID[0].splitlines()


@pytest.mark.gpu
def test_the_guide_s_program_runs_on_two_gpus(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    assert torchrun(tmp_path, BLOCKS[0], gpus=True) == SAID[0].splitlines()


@pytest.mark.parallel
def test_the_guide_s_plan_runs_before_the_group_ends(tmp_path: Path) -> None:
    program, end = BLOCKS[0].removesuffix("\n").rsplit("\n", 1)
    assert end == "dist.destroy_process_group()"
    other = "next_mask = BlockMask.from_dense(keep.flip(0), (64, 64), (1000, 1000))"
    check = "print(torch.equal(out, parallel.attention(*shard, mask, scheme='ulysses')), plan)"
    lines = torchrun(tmp_path, "\n".join([program, other, *BLOCKS[1:], check, end]))
    assert lines[:2] == [f"True ParallelPlan(ulysses, rank {rank} of 2)" for rank in (0, 1)]
