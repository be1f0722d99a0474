"""The last line of a test run without a GPU: how many tests it cost, and the package's reason."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_it_gives_the_reason_in_the_packages_own_words() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "tests/attention/test_gpu_mma.py"],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    reason = r"No CUDA GPU can be used here: .*\. Fix: |CuPy is not installed"
    assert re.search(rf"^[1-9]\d* gpu tests not run\. ({reason})", done.stdout, re.MULTILINE)
