"""``tessera-cupy plans``: what it shows, finds and compares, its exit status and its JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tessera_cupy.cli import main
from tessera_cupy.kernels.catalog import fingerprint
from tessera_cupy.ranking import archs_of
from tessera_cupy.regimes import load_for, load_table
from tessera_cupy.regimes.naming import key_name
from tessera_cupy.regimes.table import shipped

Capture = pytest.CaptureFixture[str]

#: A table as the profiler writes one: some keys measured, the others reasoned.
MEASURED = """\
schema: 1
arch: {name}
provenance: measured
device: NVIDIA RTX 4090
catalog: {catalog}
raw_data: ffee01
reasons: for tests
base:
  - attend_mma/q64k64/retain-pack/longest+split
  - attend_mma/q64k64/split-pack/longest+split
  - attend_mma/q64k32/retain-pack/longest+split
  - attend_mma/q64k32/split-pack/longest+split
keys:
  - match: {{block_q: 64, head_dim: {{from: 65, to: 128}}}}
    why: as timed
    cases: 31
    edges: {{density: [0.25]}}
    regimes:
      - when: {{density: {{below: 0.25}}}}
        plans: [attend_mma/q64k64/retain-pack/runs+split]
        cases: 12
      - when: {{density: {{from: 0.25}}}}
        plans: [attend_mma/q64k64/retain-pack/longest+split]
reasoned:
  - match: {{block_q: 128}}
    why: by thinking
    regimes:
      - {{when: {{}}, plans: [attend_mma/q128k64/retain-pack/longest+split]}}
"""


@pytest.fixture
def written(tmp_path: Path) -> Any:
    def write(name: str = "sm89", catalog: str = "", old: str = "", new: str = "") -> Path:
        catalog = catalog or fingerprint(archs_of(name)[0].name if archs_of(name) else "sm_89")
        text = MEASURED.format(name=name, catalog=catalog)
        assert old in text
        path = tmp_path / f"{name}.yaml"
        path.write_text(text.replace(old, new, 1) if old else text)
        return path

    return write


def run(arguments: list[str], capsys: Capture, status: int = 0) -> str:
    assert main(["plans", *arguments]) == status
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def run_json(arguments: list[str], capsys: Capture, status: int = 0) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(run([*arguments, "--json"], capsys, status))
    return report


def failed(arguments: list[str], capsys: Capture, status: int = 1) -> str:
    assert main(["plans", *arguments]) == status
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("tessera-cupy: ")


# Show


def test_show_has_every_key_with_its_reason_and_plans(capsys: Capture) -> None:
    path = Path(__file__).parent / "regimes" / "default" / "sm90.yaml"
    text = " ".join(run(["show", str(path)], capsys).replace("│", " ").split())
    table = load_table(path)
    for key in table.document.keys:
        assert " ".join(key.why.split()) in text
    for plan in table.plans():
        assert plan.name in text
    assert "table sm90, for sm_90a file " in text
    assert "slices q64 d<=128" in text
    assert " density>=0.75 attend_wgmma/q128k192/merge-pack/longest+split" in text
    assert "cases" not in text


def test_show_counts_cases_and_tells_measured_from_reasoned(written: Any, capsys: Capture) -> None:
    text = run(["show", str(written())], capsys)
    rows = [[cell.strip() for cell in row.split("│")[1:-1]] for row in text.splitlines()]
    rows = [row for row in rows if row]
    assert rows == [
        ["q64 d65-128", "as timed", "31"],
        ["density<0.25", "attend_mma/q64k64/retain-pack/runs+split", "12"],
        ["density>=0.25", "attend_mma/q64k64/retain-pack/longest+split", ""],
        ["q128", "by thinking"],
        ["all of them", "attend_mma/q128k64/retain-pack/longest+split"],
    ]
    assert text.index("as timed") < text.index("reasoned keys, for what keys lack")
    assert text.index("reasoned keys") < text.index("by thinking")
    lines = [" ".join(row.split()) for row in text.splitlines()]
    assert "table sm89, for sm_86, sm_89" in lines
    assert "provenance measured" in lines
    assert "device NVIDIA RTX 4090" in lines
    assert f"catalog {fingerprint('sm_89')}" in lines


def test_show_as_json(written: Any, capsys: Capture) -> None:
    report = run_json(["show", str(written(catalog="old"))], capsys)
    assert (report["catalog"], report["current"]) == ("old", False)
    assert report["archs"] == ["sm_86", "sm_89"]
    (key,) = report["keys"]
    assert (key["name"], key["cases"], key["edges"]) == ("q64 d65-128", 31, {"density": [0.25]})
    assert key["regimes"][0] == {
        "name": "density<0.25",
        "when": {"density": [None, 0.25]},
        "plans": ["attend_mma/q64k64/retain-pack/runs+split"],
        "cases": 12,
    }
    assert [key["why"] for key in report["reasoned"]] == ["by thinking"]
    assert len(report["base"]) == 4


def test_show_says_where_the_kernels_have_changed(written: Any, capsys: Capture) -> None:
    text = run(["show", str(written(catalog="old"))], capsys)
    assert "old, not the kernels of this release" in text


def test_show_one_key(capsys: Capture) -> None:
    report = run_json(["show", "sm80", "--key", "slices q192"], capsys)
    assert [key["name"] for key in report["reasoned"]] == ["slices q192 d<=128"]
    assert report["keys"] == []
    line = failed(["show", "sm80", "--key", "q7"], capsys)
    first = key_name(load_for("sm80").document.keys[0].match)
    assert f"`--key`: expected a part of a key's name, of {first}; " in line
    assert "got 'q7'" in line


def test_show_takes_the_default_table(capsys: Capture) -> None:
    assert run_json(["show"], capsys)["table"] == "sm90"


@pytest.mark.parametrize("action", [["show"], ["check"], ["diff", "sm90"]])
def test_a_table_that_is_none_is_named(action: list[str], tmp_path: Path, capsys: Capture) -> None:
    status = 2 if action[0] == "diff" else 1
    for name, got in (("sm70", "where there is no file"), (str(tmp_path), "a folder")):
        line = failed([*action, name], capsys, status)
        assert "`TABLE`: expected one of sm100, sm120, sm80, sm89, sm90, or the path of " in line
        assert f"got {name!r}, {got}. Fix: " in line


# Check


def test_the_tables_that_are_shipped_are_right(capsys: Capture) -> None:
    report = run_json(["check"], capsys)
    assert report["passed"] is True
    assert [Path(table["file"]).stem for table in report["tables"]] == shipped()
    assert all(table["problems"] == [] for table in report["tables"])
    assert run(["check", "sm90"], capsys).endswith("sm90.yaml: all is well\n")


def test_a_measured_table_is_right_on_the_kernels_of_either_architecture(
    written: Any, capsys: Capture
) -> None:
    for arch in ("sm_86", "sm_89"):
        run(["check", str(written(catalog=fingerprint(arch)))], capsys)


FEW = """\
  - attend_mma/q64k32/retain-pack/longest+split
  - attend_mma/q64k32/split-pack/longest+split
"""


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("why: as timed", "wy: as timed", "line 15, field `keys[0].wy`: expected one of match"),
        (
            "[attend_mma/q64k64/retain-pack/runs+split]",
            "[attend_mma/q64k64/retain-pack/runs+split, attend_mma/q64k96/retain-pack/runs]",
            "line 19, field `keys[0].regimes[0].plans[1]`: expected a plan with a kernel of head "
            "dim 65 to 128 on sm_86, sm_89, got attend_mma/q64k96/retain-pack/runs. Fix: ",
        ),
        # A tile that there is for head dim 64 alone, on another generation.
        (
            "attend_mma/q128k64/retain-pack/longest+split",
            "attend_mma/q128k128/retain-pack/longest+split",
            "line 28, field `reasoned[0].regimes[0].plans[0]`: expected a plan with a kernel on "
            "sm_86, sm_89, got attend_mma/q128k128/",
        ),
        # A tile for larger head dims serves those of the key, too.
        (
            "attend_mma/q64k64/retain-pack/runs+split",
            "attend_mma/q64k32/retain-pack/runs+split",
            None,
        ),
        (
            "  - attend_mma/q64k64/retain-pack/longest+split\n",
            "  - attend_wgmma/q128k192/retain-pack/longest+split\n"
            "  - attend_mma/q64k64/retain-pack/longest+split\n",
            "field `base[0]`: expected a plan with a kernel on sm_86, sm_89, got attend_wgmma/",
        ),
        (
            FEW,
            "",
            "field `base`: expected an eligible plan for every request on sm_86, sm_89, got none "
            "for blocks of any size, head dim 136 to 256, float16. Fix: list plans",
        ),
    ],
    ids=["schema", "no tile", "other generation", "head dim", "base kernel", "base dims"],
)
def test_what_is_wrong_is_said_with_its_place(
    old: str, new: str, said: str | None, written: Any, capsys: Capture
) -> None:
    path = written(old=old, new=new)
    report = run_json(["check", "sm90", str(path)], capsys, status=1 if said else 0)
    assert report["passed"] is (said is None)
    fine, checked = report["tables"]
    assert fine["problems"] == []
    if said is None:
        assert checked["problems"] == []
        return
    assert f"{path}, {said}" in checked["problems"][0]
    text = run(["check", str(path)], capsys, status=1)
    assert text == "\n".join(checked["problems"]) + "\n"


def test_base_dims_are_checked_for_each_kind_of_request(written: Any, capsys: Capture) -> None:
    report = run_json(["check", str(written(old=FEW, new=""))], capsys, status=1)
    kinds = [
        line.partition("256, ")[2].partition(". ")[0] for line in report["tables"][0]["problems"]
    ]
    assert kinds == [
        f"{dtype}{bits}" for dtype in ("float16", "bfloat16") for bits in ("", " with token bits")
    ]


def test_a_table_of_other_kernels_must_be_measured_again(written: Any, capsys: Capture) -> None:
    path = written(catalog="0a1b2c")
    (line,) = run(["check", str(path)], capsys, status=1).splitlines()
    assert line.startswith(f"{path}, field `catalog`: expected the kernels of this release (")
    assert f"{fingerprint('sm_86')} on sm_86, {fingerprint('sm_89')} on sm_89" in line
    assert line.endswith("), got 0a1b2c. Fix: measure the table again.")


def test_a_table_of_the_users_own_needs_a_kernel_somewhere(written: Any, capsys: Capture) -> None:
    own = "attend_wgmma/q128k192/retain-pack/longest+split"
    run(
        ["check", str(written("mine", old="attend_mma/q64k64/retain-pack/runs+split", new=own))],
        capsys,
    )
    none = "attend_mma/q64k96/retain-pack/longest+split"
    path = written("mine", old="attend_mma/q64k64/retain-pack/runs+split", new=none)
    assert "on any architecture, got" in run(["check", str(path)], capsys, status=1)


# Diff


def test_equal_tables_do_not_differ(written: Any, capsys: Capture) -> None:
    assert run_json(["diff", "sm90", "sm90"], capsys)["differences"] == []
    path = str(written())
    assert run(["diff", path, path], capsys) == f"{path} and {path} rank the same plans first.\n"


def test_what_differs_is_a_regime_with_both_plans(written: Any, capsys: Capture) -> None:
    one = written("one")
    two = written(
        "two",
        old="{from: 0.25}}\n        plans: [attend_mma/q64k64/retain-pack/longest",
        new="{from: 0.25}}\n        plans: [attend_mma/q64k64/retain-pack/runs",
    )
    found = run_json(["diff", str(one), str(two)], capsys, status=1)["differences"]
    assert found == [
        {
            "requests": f"{requests} density>=0.25",
            "when": {"density": [0.25, None]},
            "old": "attend_mma/q64k64/retain-pack/longest+split",
            "new": "attend_mma/q64k64/retain-pack/runs+split",
        }
        for requests in ("q64 d96-128", "slices q64 d96-128")
    ]
    text = run(["diff", str(one), str(two)], capsys, status=1)
    assert "-> attend_mma/q64k64/retain-pack/runs+split" in text


def test_a_table_that_does_not_load_is_trouble(written: Any, capsys: Capture) -> None:
    path = written(old="why: as timed", new="wy: as timed")
    line = failed(["diff", "sm90", str(path)], capsys, status=2)
    assert "line 15, field `keys[0].wy`" in line


@pytest.mark.parametrize("action", ["show", "check", "diff"])
def test_every_action_has_help(action: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["plans", action, "--help"])
    assert caught.value.code == 0
    assert "--json" in capsys.readouterr().out
