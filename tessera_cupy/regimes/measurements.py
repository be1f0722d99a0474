"""Times of plans on masks: what a profile table is compiled from, and the file that keeps them.

The file is NumPy's npz: one array a field, so that thousands of times take a few kilobytes and any
tool reads them. Its fingerprint is that of the contents, not of the bytes on disk.
"""

from __future__ import annotations

import hashlib
import math
import os
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.errors import TableError, wrong
from tessera_cupy.regimes.features import Features
from tessera_cupy.regimes.plan_spec import PlanSpec
from tessera_cupy.regimes.schema import DTYPES, FRACTIONS, LAYOUTS, PROVENANCES

#: Version of the file; another one is refused.
SCHEMA = 1

#: Why a plan has no time on a mask, by the number that the file keeps.
STATES = ("timed", "not eligible", "wrong output", "dropped", "failed")
_TIMED = STATES.index("timed")
# What NumPy and its zip files raise besides where a file is damaged, or of another shape. A single
# array in place of an archive is a TypeError, or in Python 3.10 an AttributeError.
_UNREADABLE = (
    *(ArithmeticError, AttributeError, EOFError, LookupError, NotImplementedError, OSError),
    *(TypeError, ValueError, zipfile.BadZipFile, zlib.error),
)


@dataclass(frozen=True)
class PlanTime:
    """One plan on one mask.

    Attributes:
        plan: the plan.
        state: one of :data:`STATES`: "dropped" is a plan that was too slow on all masks like
            this one before, too much for the host to make, or for the GPU's memory.
        ms: time of the attention, milliseconds; None unless timed. Of plans that took turns, the
            median, without what the turns have in common: these compare.
        low, high: the fastest and the slowest run, milliseconds; as ``ms``.
        note: what was wrong or failed, or how it was timed, in one line.
        rounds: its time in each turn; those of one turn compare with each other. Empty where
            plans took no turns.

    Raises:
        ValueError: the time of a timed plan is no positive, finite number.
    """

    plan: PlanSpec
    state: str
    ms: float | None = None
    low: float | None = None
    high: float | None = None
    note: str = ""
    rounds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.state == "timed" and not (self.ms is not None and 0 < self.ms < math.inf):
            expected, fix = "a positive, finite number, as the plan was timed", "time it anew"
            raise ValueError(wrong("ms", expected, f"{self.ms} of {self.plan.name}", fix))


@dataclass(frozen=True)
class Case:
    """One mask of a profile; name and source together tell it from the others.

    Attributes:
        name: of the family or rule that made it, with its sizes.
        source: what it was made from, such as ``bikes layer 0``: cross-validation keeps masks
            of one source together.
        features: what a table sees of it.
        timings: of every plan that was considered, each once.
        dense_ms: time of dense attention by the same kernels at this size, milliseconds; None
            where it was not taken.
    """

    name: str
    source: str
    features: Features
    timings: tuple[PlanTime, ...]
    dense_ms: float | None = None

    def times(self) -> dict[PlanSpec, float]:
        """Milliseconds of the plans that were timed."""
        return {t.plan: t.ms for t in self.timings if t.ms is not None}


@dataclass(frozen=True)
class Measurements:
    """The cases of one profile, and where they were taken.

    Attributes:
        arch: name of the profile table, such as ``"sm90"``.
        provenance: "measured", or "model" where a cost model predicted the times.
        device: the GPU.
        catalog: fingerprint of the kernels.
        made: how: the command, the day, versions; one line each.
        cases: the masks.
    """

    arch: str
    provenance: str
    device: str
    catalog: str
    made: tuple[str, ...]
    cases: tuple[Case, ...]

    @property
    def fingerprint(self) -> str:
        """Short digest of everything but ``made``: the same times give the same table."""
        digest = hashlib.sha256()
        for name, array in sorted(_arrays(self).items()):
            if name != "made":
                digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
                digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()[:16]

    def with_cases(self, cases: Iterable[Case]) -> Measurements:
        """The same profile with these cases in place of its own."""
        return replace(self, cases=tuple(cases))

    def wrong_outputs(self) -> Iterator[tuple[Case, PlanTime]]:
        """Plans whose output was wrong, with the mask."""
        for case in self.cases:
            for timing in case.timings:
                if timing.state == "wrong output":
                    yield case, timing

    def write(self, path: Path) -> None:
        """Write the file whole, or leave the one that is there as it is.

        Raises:
            OSError: the folder cannot be written.
        """
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".npz", delete=False) as file:
            try:
                np.savez_compressed(file, allow_pickle=False, **_arrays(self))
                file.flush()
                os.fsync(file.fileno())
            except BaseException:
                os.unlink(file.name)
                raise
        os.chmod(file.name, 0o644)
        os.replace(file.name, path)

    @classmethod
    def read(cls, path: Path) -> Measurements:
        """Read a file that :meth:`write` wrote.

        Raises:
            TableError: there is no such file, or it is another kind of file or version.
        """
        if not path.is_file():
            raise TableError(
                wrong("path", "a file of measurements", str(path), "check the path, or profile")
            )
        try:
            with np.load(path, allow_pickle=False) as data:
                return _measurements({name: data[name] for name in data.files})
        except _UNREADABLE as error:
            raise TableError(
                wrong(
                    "path",
                    f"measurements of version {SCHEMA} that `tessera-cupy profile` wrote",
                    f"{path}: {error}",
                    "profile anew, or take the file from the release that you run",
                )
            ) from error


def _arrays(m: Measurements) -> dict[str, NDArray[Any]]:
    """One array a field; times as (cases, plans), NaN where there is none."""
    plans = sorted({t.plan.name for case in m.cases for t in case.timings})
    place = {name: i for i, name in enumerate(plans)}
    shape = (len(m.cases), len(plans))
    times = {name: np.full(shape, np.nan, np.float32) for name in ("ms", "low", "high")}
    state = np.full(shape, 255, np.uint8)  # not considered
    turns = max((len(t.rounds) for case in m.cases for t in case.timings), default=0)
    rounds = np.full((*shape, turns), np.nan, np.float32)
    notes: list[tuple[int, int, str]] = []
    for row, case in enumerate(m.cases):
        for timing in case.timings:
            at = row, place[timing.plan.name]
            state[at] = STATES.index(timing.state)
            for name, values in times.items():
                value = getattr(timing, name)
                values[at] = np.nan if value is None else value
            rounds[at][: len(timing.rounds)] = timing.rounds
            if timing.note:
                notes.append((*at, timing.note))
    notes.sort()
    arrays: dict[str, NDArray[Any]] = {
        "schema": np.array(SCHEMA),
        "profile": np.array([m.arch, m.provenance, m.device, m.catalog]),
        "made": _texts(m.made),
        "names": _texts([case.name for case in m.cases]),
        "sources": _texts([case.source for case in m.cases]),
        "dense_ms": np.array(
            [np.nan if case.dense_ms is None else case.dense_ms for case in m.cases], np.float32
        ),
        "plans": _texts(plans),
        "state": state,
        "rounds": rounds,
        "note_places": np.array([note[:2] for note in notes], np.int32).reshape(-1, 2),
        "note_texts": _texts([note[2] for note in notes]),
        **times,
    }
    for name in Features._fields:
        column = [getattr(case.features, name) for case in m.cases]
        text = bool(column) and isinstance(column[0], str)
        arrays[f"feature_{name}"] = _texts(column) if text else np.array(column)
    return arrays


def _texts(values: Sequence[str]) -> NDArray[Any]:
    return np.array(list(values), dtype=f"U{max([1, *map(len, values)])}")


def _measurements(arrays: dict[str, NDArray[Any]]) -> Measurements:
    if int(arrays["schema"]) != SCHEMA:
        raise ValueError(f"version {int(arrays['schema'])}")
    arch, provenance, device, catalog = map(str, arrays["profile"])
    if provenance not in PROVENANCES or provenance == "default":
        raise ValueError(f"provenance {provenance!r}")
    plans = [PlanSpec.parse(str(name)) for name in arrays["plans"]]
    if len(set(plans)) < len(plans):
        raise ValueError("a plan twice")
    _check_shapes(arrays, len(plans))
    notes = {
        (int(row), int(column)): str(text)
        for (row, column), text in zip(arrays["note_places"], arrays["note_texts"], strict=True)
    }
    columns = {name: arrays[f"feature_{name}"].tolist() for name in Features._fields}
    cases = []
    for row, (name, source, dense) in enumerate(
        zip(arrays["names"], arrays["sources"], arrays["dense_ms"], strict=True)
    ):
        features = Features(**{field: values[row] for field, values in columns.items()})
        _check_features(features)
        timings = []
        for column, plan in enumerate(plans):
            state = int(arrays["state"][row, column])
            if state >= len(STATES):
                continue
            ms, low, high = (
                None if state != _TIMED else float(arrays[name][row, column])
                for name in ("ms", "low", "high")
            )
            note = notes.get((row, column), "")
            turns = arrays["rounds"][row, column]
            rounds = tuple(turns[np.isfinite(turns)].tolist())
            timings.append(PlanTime(plan, STATES[state], ms, low, high, note, rounds))
        known = None if np.isnan(dense) else float(dense)
        cases.append(Case(str(name), str(source), features, tuple(timings), known))
    made = tuple(map(str, arrays["made"]))
    return Measurements(arch, provenance, device, catalog, made, tuple(cases))


def _check_shapes(arrays: dict[str, NDArray[Any]], plans: int) -> None:
    """See that there are as many rows as cases, and as many columns as plans."""
    cases = len(arrays["names"])
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(
        ("state", "ms", "low", "high"), (cases, plans)
    )
    shapes["rounds"] = (cases, plans, arrays["rounds"].shape[-1])
    shapes |= {name: (cases,) for name in arrays if name.startswith("feature_")}
    for name, shape in shapes.items():
        if arrays[name].shape != shape:
            raise ValueError(f"{name} of shape {arrays[name].shape} for {shape}")


def _check_features(f: Features) -> None:
    """See that a request may be as these features say."""
    for name in ("block_q", "block_kv", "head_dim", "heads", "tokens"):
        value = getattr(f, name)
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} {value!r}")
    for name in FRACTIONS:
        value = getattr(f, name)
        if not isinstance(value, float) or not 0 <= value <= 1:
            raise ValueError(f"{name} {value!r}")
    for name, known in (
        *((name, (False, True)) for name in ("ragged", "token_bits", "slices")),
        ("dtype", DTYPES),
        ("layout", LAYOUTS),
    ):
        if getattr(f, name) not in known:
            raise ValueError(f"{name} {getattr(f, name)!r}")
