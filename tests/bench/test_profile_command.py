import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from tessera_cupy.bench import profile_job, regret_run
from tessera_cupy.cli import main
from tessera_cupy.kernels.arch import get_arch
from tessera_cupy.regimes import load_table
from tessera_cupy.regimes.measurements import Measurements, PlanTime

SIZES = ["--most-tokens", "4096", "--families", "dense"]
TWO = ["--most-tokens", "4096", "--families", "dense", "dense-64"]


class Predictable:
    """Stands in for the cost model: times by the length of a plan's name."""

    most_active = 1e6
    to_device = staticmethod(np.asarray)

    def __init__(self, arch):
        self.arch = get_arch(arch)
        self.device = f"A GPU of {arch}"

    def summary(self, mask):
        return None

    def times(self, mask, heads, head_dim, plans):
        return tuple(PlanTime(p, "timed", len(p.name) / 8, 1.0, 9.0) for p in plans)


@pytest.fixture(autouse=True)
def predictable(monkeypatch):
    monkeypatch.setattr(profile_job, "ModelClock", Predictable)
    monkeypatch.setattr(regret_run, "ModelClock", Predictable)


def run(capsys, *words):
    status = main([*map(str, words), "--json"])
    captured = capsys.readouterr()
    return status, json.loads(captured.out), captured.err


def profiled(capsys, out, *more):
    words = ["profile", "--model", "sm_80", "--out", out, "--cases", 24, *SIZES, *more]
    return run(capsys, *words)


def test_a_profile_writes_a_table_and_its_measurements(tmp_path, capsys):
    out = tmp_path / "sm80.yaml"
    status, report, _ = profiled(capsys, out)
    assert status == 0
    assert report["cases"] == 24
    table = load_table(out)
    measured = Measurements.read(tmp_path / "sm80.npz")
    assert table.document.raw_data == measured.fingerprint == report["fingerprint"]
    assert table.document.provenance == "model"
    assert table.document.device == "A GPU of sm_80"
    assert "Predicted by the cost model for A GPU of sm_80" in table.document.reasons
    assert {key.cases for key in table.document.keys} == {8, 16}  # of head dims 64 and 128
    assert table.document.reasoned


def test_compiling_again_gives_the_same_bytes_and_needs_no_clock(tmp_path, capsys, monkeypatch):
    out = tmp_path / "sm80.yaml"
    profiled(capsys, out)
    before = out.read_bytes()
    monkeypatch.delattr(profile_job, "ModelClock")
    status, report, _ = run(capsys, "profile", "--out", out, "--compile-only")
    assert (status, report["cases"]) == (0, 24)
    assert out.read_bytes() == before


def test_a_second_run_goes_on(tmp_path, capsys):
    out = tmp_path / "sm80.yaml"
    profiled(capsys, out)
    status, report, _ = profiled(capsys, out, "--cases", 30)
    assert (status, report["cases"]) == (0, 30)
    status, report, _ = profiled(capsys, out, "--fresh")
    assert (status, report["cases"]) == (0, 24)


def test_measurements_of_others_are_not_mixed_in(tmp_path, capsys, monkeypatch):
    out = tmp_path / "sm80.yaml"
    profiled(capsys, out)
    monkeypatch.setattr(profile_job.catalog, "fingerprint", lambda arch: "another")
    status, report, _ = profiled(capsys, out)
    assert status == 1
    assert "measurements of kernels another" in report["error"]["message"]
    assert "--fresh" in report["error"]["message"]


def test_a_wrong_output_is_the_exit_status(tmp_path, capsys, monkeypatch):
    def times(self, mask, heads, head_dim, plans):
        wrong = PlanTime(plans[0], "wrong output", note="off by one")
        return (wrong, *(PlanTime(p, "timed", 1.0, 1.0, 1.0) for p in plans[1:]))

    monkeypatch.setattr(Predictable, "times", times)
    status, report, err = profiled(capsys, tmp_path / "sm80.yaml")
    assert status == 1
    assert report["wrong"][0]["note"] == "off by one"
    assert "wrong output of" in err
    assert "off by one" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--out", "sm80.yml"], "`out`: expected a .yaml file"),
        (["--out", "sm91.yaml"], "`out`: expected one of sm100.yaml"),
        (["--out", "sm90.yaml", "--model", "sm_80"], "expected sm80.yaml for A GPU of sm_80"),
        (["--out", "nowhere/sm80.yaml"], "`out`: expected a folder that exists, got nowhere"),
        (["--out", "sm80.yaml", "--compile-only", "--fresh"], "`--compile-only`"),
        (["--out", "sm80.yaml", "--compile-only"], "expected a file of measurements, got sm80.npz"),
        (["--out", "sm80.yaml", "--model", "sm_80", "--cases", "2", *SIZES], "expected at least 3"),
        (["--out", "sm80.yaml", "--model", "sm_80", "--cases", "3", *TWO], "at most 2 of one"),
    ],
)
def test_bad_input_is_refused(tmp_path, capsys, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    status, report, _ = run(capsys, "profile", *words)
    assert status == 1
    assert message in report["error"]["message"]
    assert not list(tmp_path.glob("*.yaml"))


@pytest.mark.parametrize("budget", ["10", "m", "-1m", "1d", "1 m"])
def test_a_budget_has_a_unit(capsys, budget):
    with pytest.raises(SystemExit):
        main(["profile", "--out", "sm80.yaml", f"--budget={budget}"])
    assert "expected a time such as 90s, 10m or 1h" in capsys.readouterr().err


def test_a_profiled_table_is_judged_on_other_masks(tmp_path, capsys):
    out = tmp_path / "sm80.yaml"
    profiled(capsys, out)
    kept = tmp_path / "held.npz"
    words = ["bench", "regret", "--model", "sm_80", "--table", out, "--cases", 6, *SIZES]
    status, report, _ = run(capsys, *words, "--keep", kept)
    assert status == 0
    # Times hang on names alone, so the table knows the best plan everywhere.
    assert report["all"] == {"mean": 1.0, "p95": 1.0, "p99": 1.0, "close": 1.0, "cases": 6}
    assert report["table_provenance"] == "model"
    assert report["search"] is None
    assert {case.source.split()[0] for case in Measurements.read(kept).cases} == {
        "carphone_pristine"
    }
    again = ["bench", "regret", "--table", out, "--measurements", kept]
    status, offline, _ = run(capsys, *again)
    assert status == 0
    assert (offline["all"], offline["worst"]) == (report["all"], report["worst"])
    (tmp_path / "page.md").write_text("<!-- bench:regret -->\n<!-- /bench:regret -->\n")
    assert run(capsys, *again, "--into", tmp_path / "page.md")[0] == 0
    assert "| all | 6 | 1.0000 |" in (tmp_path / "page.md").read_text()


def test_the_ablation_is_of_masks_of_its_own(tmp_path, capsys):
    """In the order of rows a plan's name is shorter, so here that is faster than any other."""
    kept = tmp_path / "held.npz"
    words = ["bench", "regret", "--model", "sm_80", "--cases", 4, "--most-tokens", "4096"]
    words += ["--families", "vsa", "Q64K64", "--keep", kept]
    status, report, _ = run(capsys, *words)
    assert status == 0
    assert (report["all"]["cases"], report["ablation"]["cases"]) == (4, 1)
    assert len(Measurements.read(kept).cases) == 5
    retain = len("attend_mma/q64k32/split-split/rows")
    share = len("attend_mma/q64k64/share-pack/longest+split")
    assert report["ablation"]["full"] == pytest.approx(retain / share)
    in_rows = len("attend_mma/q64k64/share-pack/rows")
    assert report["ablation"]["mapping"] == pytest.approx(retain / in_rows)
    status, offline, _ = run(capsys, "bench", "regret", "--table", "sm80", "--measurements", kept)
    assert (status, offline["ablation"]) == (0, report["ablation"])
    (tmp_path / "report.json").write_text(json.dumps(report))
    assert main(["bench", "report", str(tmp_path / "report.json")]) == 0
    assert "block families (1 masks)" in " ".join(capsys.readouterr().out.split())


def test_a_command_names_its_table_alone(tmp_path, capsys, monkeypatch):
    out = tmp_path / "sm80.yaml"
    for words in (["--out", str(out)], [f"--out={out}"]):
        monkeypatch.setattr("sys.argv", ["tessera-cupy", "profile", *words])
        profiled(capsys, out, "--fresh")
        assert "`tessera-cupy profile --out" in " ".join(load_table(out).document.reasons.split())
        assert str(tmp_path) not in out.read_text()


def test_the_regret_is_shown_as_tables(tmp_path, capsys):
    words = ["bench", "regret", "--model", "sm_80", "--table", "sm80", "--cases", "2", *SIZES]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "within 3%" in shown
    assert "Regret of the table sm80.yaml (model)" in shown


def test_regret_refuses_no_cases(capsys):
    status, report, _ = run(capsys, "bench", "regret", "--model", "sm_80", "--cases", "0")
    assert status == 1
    assert "`cases`: expected at least 1, got 0" in report["error"]["message"]


def test_a_table_that_is_not_there_is_said(capsys):
    words = ["bench", "regret", "--model", "sm_80", "--table", "no.yaml", "--cases", "1", *SIZES]
    status, report, _ = run(capsys, *words)
    assert status == 1
    assert str(Path("no.yaml")) in report["error"]["message"]


def test_what_is_compiled_is_what_the_file_has(tmp_path, capsys, monkeypatch):
    """Times are kept in float32, which an eighth of a name's length plus 1e-9 has no room for."""

    def times(self, mask, heads, head_dim, plans):
        return tuple(PlanTime(p, "timed", len(p.name) / 8 + 1e-9, 1.0, 9.0) for p in plans)

    monkeypatch.setattr(Predictable, "times", times)
    compiled = []
    compile_table = profile_job.compile_table
    monkeypatch.setattr(
        profile_job,
        "compile_table",
        lambda measured, *a, **k: compiled.append(measured) or compile_table(measured, *a, **k),
    )
    assert profiled(capsys, tmp_path / "sm80.yaml")[0] == 0
    assert compiled == [Measurements.read(tmp_path / "sm80.npz")]


def test_two_profiles_do_not_write_the_same_file(tmp_path, capsys, monkeypatch):
    out = tmp_path / "sm80.yaml"
    second = []
    times = Predictable.times

    def meanwhile(self, *given):
        if not second:
            second.append(None)
            second[0] = profiled(capsys, out)
        return times(self, *given)

    monkeypatch.setattr(Predictable, "times", meanwhile)
    status, report, _ = profiled(capsys, out)
    assert (status, report["cases"]) == (0, 24)
    [(status, report, _)] = second
    assert status == 1
    assert "no other profile is writing" in report["error"]["message"]
    assert {path.name for path in tmp_path.iterdir()} == {"sm80.yaml", "sm80.npz"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--table", "no.yaml"], "no.yaml"),
        (
            ["--table", "sm80", "--keep", "nowhere/held.npz"],
            "`keep`: expected a folder that exists",
        ),
    ],
)
def test_regret_refuses_before_it_measures(tmp_path, capsys, monkeypatch, words, message):
    def never(self, *given):
        raise AssertionError("measured")

    monkeypatch.setattr(Predictable, "times", never)
    monkeypatch.chdir(tmp_path)
    fixed = ["bench", "regret", "--model", "sm_80", "--cases", "1", *SIZES]
    status, report, _ = run(capsys, *fixed, *words)
    assert status == 1
    assert message in report["error"]["message"]


def test_measurements_of_another_architecture_are_not_compiled(tmp_path, capsys):
    profiled(capsys, tmp_path / "sm80.yaml")
    (tmp_path / "sm80.npz").rename(tmp_path / "sm90.npz")
    status, report, _ = run(capsys, "profile", "--out", tmp_path / "sm90.yaml", "--compile-only")
    assert status == 1
    assert "`out`: expected sm80.yaml, as the measurements" in report["error"]["message"]


def test_what_was_measured_is_written_when_the_run_is_told_to_end(tmp_path, capsys, monkeypatch):
    """As by `timeout`; the next run goes on."""
    out, asked = tmp_path / "sm80.yaml", []
    times = Predictable.times

    def until_told(self, *given):
        asked.append(None)
        if len(asked) == 10:
            os.kill(os.getpid(), signal.SIGTERM)
        return times(self, *given)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(Predictable, "times", until_told)
    with pytest.raises(SystemExit) as ended:
        profiled(capsys, out)
    assert ended.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before
    assert len(Measurements.read(tmp_path / "sm80.npz").cases) == 9
    assert {path.name for path in tmp_path.iterdir()} == {"sm80.npz"}
    status, report, _ = profiled(capsys, out)
    assert (status, report["cases"]) == (0, 24)


def test_a_regret_whose_budget_ends_says_of_how_many(tmp_path, capsys):
    words = ["bench", "regret", "--model", "sm_80", "--table", "sm80", "--cases", "6", *SIZES]
    kept = tmp_path / "held.npz"
    status, report, _ = run(capsys, *words, "--budget", "1h", "--keep", kept)
    assert (status, report["all"]["cases"]) == (0, 6)
    status, report, _ = run(capsys, *words, "--budget", "0s", "--keep", kept)
    assert status == 1
    assert "No case was timed" in report["error"]["message"]
