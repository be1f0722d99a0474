from dataclasses import replace

import numpy as np
import pytest

from tessera_cupy.errors import TableError
from tessera_cupy.regimes.measurements import Case, Measurements, PlanTime

from .measured import MERGE, REGROUP, RETAIN, SHARE, case, crossing, features, measured


def three():
    return measured(
        [
            case({SHARE: 1.5, MERGE: 2.0}, 0, density=0.25),
            case({SHARE: 0.5}, 1, "carphone layer 7", {MERGE: "not eligible"}, slices=True),
            case({}, 2, states={SHARE: "wrong output", RETAIN: "dropped", REGROUP: "failed"}),
        ]
    )


def test_what_is_written_is_read_again(tmp_path):
    path = tmp_path / "sm90.npz"
    three().write(path)
    again = Measurements.read(path)
    for before, after in zip(three().cases, again.cases, strict=True):
        assert (before.name, before.source, before.features) == (
            after.name,
            after.source,
            after.features,
        )
        by_name = {timing.plan.name: timing for timing in before.timings}
        assert by_name == {timing.plan.name: timing for timing in after.timings}
    assert (again.arch, again.provenance, again.device) == ("sm90", "measured", "A GPU")
    assert again.made == three().made
    assert again.fingerprint == three().fingerprint


def test_the_same_measurements_are_the_same_bytes(tmp_path):
    paths = [tmp_path / name for name in ("a.npz", "b.npz")]
    for path in paths:
        crossing().write(path)
    assert paths[0].read_bytes() == paths[1].read_bytes()


@pytest.mark.parametrize(
    "other",
    [
        [case({SHARE: 1.5, MERGE: 2.125}, density=0.25)],
        [case({SHARE: 1.5, RETAIN: 2.0}, density=0.25)],
        [case({SHARE: 1.5, MERGE: 2.0}, density=0.5)],
        [case({SHARE: 1.5, MERGE: 2.0}, source="carphone layer 1", density=0.25)],
        [case({SHARE: 1.5}, states={MERGE: "dropped"}, density=0.25)],
        [],
    ],
)
def test_the_fingerprint_tells_any_difference(other):
    one = measured([case({SHARE: 1.5, MERGE: 2.0}, density=0.25)])
    assert one.fingerprint != measured(other).fingerprint


def test_the_fingerprint_does_not_hang_on_the_day(tmp_path):
    one = three()
    later = Measurements(one.arch, one.provenance, one.device, one.catalog, ("later",), one.cases)
    assert later.fingerprint == one.fingerprint


def test_a_profile_without_cases_can_be_kept(tmp_path):
    path = tmp_path / "empty.npz"
    measured([]).write(path)
    assert Measurements.read(path).cases == ()


def test_a_failed_write_leaves_the_file_that_was_there(tmp_path, monkeypatch):
    path = tmp_path / "sm90.npz"
    three().write(path)
    before = path.read_bytes()

    def full(file, **arrays):
        file.write(b"half of it")
        raise OSError("No space left on device")

    monkeypatch.setattr(np, "savez_compressed", full)
    with pytest.raises(OSError, match="No space left"):
        crossing().write(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["sm90.npz"]


def test_wrong_outputs_are_named():
    [(found, timing)] = three().wrong_outputs()
    assert (found.name, timing.plan) == ("case 2", SHARE)


def test_times_are_those_of_plans_that_were_timed():
    one = Case(
        "x", "y", features(), (PlanTime(SHARE, "timed", 1.0, 0.9, 1.1), PlanTime(MERGE, "failed"))
    )
    assert one.times() == {SHARE: 1.0}


@pytest.mark.parametrize("content", [None, b"", b"no archive", b"PK\x03\x04 half an archive"])
def test_another_file_is_refused_by_name(tmp_path, content):
    path = tmp_path / "other.npz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TableError, match=r"`path`: expected .*measurements.*other\.npz"):
        Measurements.read(path)


def test_another_version_is_refused(tmp_path):
    path = tmp_path / "sm90.npz"
    three().write(path)
    with np.load(path) as data:
        arrays = {name: data[name] for name in data.files}
    np.savez(path, **{**arrays, "schema": np.array(2)})
    with pytest.raises(TableError, match=r"version 1 .* version 2"):
        Measurements.read(path)


def test_an_archive_that_lacks_a_field_is_refused(tmp_path):
    path = tmp_path / "sm90.npz"
    np.savez(path, schema=np.array(1))
    with pytest.raises(TableError, match="profile"):
        Measurements.read(path)


def edited(path, **changes):
    """A file of two cases, some arrays of which are others."""
    measured(
        [
            case({SHARE: 1.5, MERGE: 2.0}, 0, density=0.25),
            case({SHARE: 0.5, MERGE: 1.0}, 1, density=0.5),
        ]
    ).write(path)
    with np.load(path) as data:
        arrays = {name: data[name] for name in data.files}
    np.savez(path, **{**arrays, **{name: np.array(value) for name, value in changes.items()}})
    return path


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"ms": [[np.nan, 1], [1, 1]]}, r"`ms`: expected a positive, finite number.* nan of "),
        ({"ms": [[-2.0, 1], [1, 1]]}, r"positive, finite.* -2\.0 of "),
        ({"ms": [[0.0, 1], [1, 1]]}, "positive, finite"),
        ({"ms": [[np.inf, 1], [1, 1]]}, "positive, finite"),
        ({"ms": [[1.0], [1.0]]}, r"ms of shape \(2, 1\) for \(2, 2\)"),
        ({"state": [0, 0]}, r"state of shape \(2,\) for \(2, 2\)"),
        ({"feature_heads": [8]}, r"feature_heads of shape \(1,\) for \(2,\)"),
        ({"feature_dtype": "float16"}, r"feature_dtype of shape \(\) for \(2,\)"),
        ({"feature_density": [0.5, 1.5]}, r"density 1\.5"),
        ({"feature_run_coverage": [0.5, np.nan]}, "run_coverage nan"),
        ({"feature_tokens": [4096, 0]}, "tokens 0"),
        ({"feature_heads": ["8", "8"]}, "heads '8'"),
        ({"feature_dtype": ["float8", "float16"]}, "dtype 'float8'"),
        ({"plans": [SHARE.name, SHARE.name]}, "a plan twice"),
        ({"plans": [SHARE.name, "fastest"]}, "'fastest'"),
        ({"profile": ["sm90", "guessed", "A GPU", "0"]}, "provenance 'guessed'"),
        ({"schema": [1, 1]}, "measurements of version 1"),
    ],
)
def test_a_file_that_was_changed_by_hand_is_refused(tmp_path, changes, match):
    with pytest.raises(TableError, match=match):
        Measurements.read(edited(tmp_path / "sm90.npz", **changes))


def test_a_damaged_archive_is_refused_wherever_the_damage_is(tmp_path):
    path = tmp_path / "sm90.npz"
    crossing().write(path)
    whole = path.read_bytes()
    refused = []
    for at in range(0, len(whole), 97):
        path.write_bytes(whole[:at] + bytes(b ^ 0xFF for b in whole[at : at + 2]) + whole[at + 2 :])
        try:
            Measurements.read(path)  # a byte that nothing depends on
        except TableError as error:
            refused.append(str(error))
    assert len(refused) > 10
    assert all("sm90.npz" in message for message in refused)


def test_a_single_array_is_refused(tmp_path):
    path = tmp_path / "sm90.npz"
    with path.open("wb") as file:
        np.save(file, np.ones(3))
    with pytest.raises(TableError, match=r"measurements of version 1 .*sm90\.npz"):
        Measurements.read(path)


def test_turns_are_kept(tmp_path):
    path = tmp_path / "sm90.npz"
    one = crossing(4)
    first, second, *rest = one.cases[0].timings
    first = replace(first, rounds=(1.0, 1.5, 1.25, 1.125))
    second = replace(second, rounds=(2.0, 2.5))  # left early
    cases = [replace(one.cases[0], timings=(first, second, *rest)), *one.cases[1:]]
    one.with_cases(cases).write(path)
    found = {t.plan: t.rounds for t in Measurements.read(path).cases[0].timings}
    assert found[first.plan] == (1.0, 1.5, 1.25, 1.125)
    assert found[second.plan] == (2.0, 2.5)
    assert set(found.values()) == {first.rounds, second.rounds, ()}
