"""From nothing to a profile table: measure, or go on measuring, and compile."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tessera_cupy import __version__
from tessera_cupy.bench.profile_cases import KINDS, PROFILE_CLIP, PROFILE_LAYERS, recipes
from tessera_cupy.bench.profile_clock import Clock, GpuClock, ModelClock
from tessera_cupy.bench.profile_run import profile
from tessera_cupy.bench.ready import build_kernels, ended_by_signal
from tessera_cupy.bench.steps import Steps
from tessera_cupy.errors import TableError, wrong
from tessera_cupy.kernels import catalog
from tessera_cupy.regimes import load_for
from tessera_cupy.regimes.compiler import LEAST_CASES, compile_table
from tessera_cupy.regimes.measurements import Case, Measurements
from tessera_cupy.regimes.schema import Document, read_document
from tessera_cupy.regimes.table import shipped
from tessera_cupy.regimes.writer import write_table

if TYPE_CHECKING:
    from rich.console import Console


def run_profile(
    *,
    out: Path,
    budget_s: float,
    kinds: Sequence[str] | None,
    model: str | None,
    edges: str,
    most_cases: int | None,
    most_tokens: int | None,
    fresh: bool,
    compile_only: bool,
    console: Console,
) -> dict[str, Any]:
    """Profile, and write a table and its measurements.

    Args:
        out: the table, named after an architecture's table such as ``sm90.yaml``; measurements go
            beside it, ``sm90.npz``.
        budget_s: seconds for measuring; compiling kernels that are missing comes before.
        kinds: of masks; None means all.
        model: architecture to predict for with the cost model; None measures on the GPU here.
        edges: as for :func:`~tessera_cupy.regimes.compiler.compile_table`.
        most_cases: of all; None means as many as the budget allows.
        most_tokens: of a mask; None means any.
        fresh: throw measurements away that are there already.
        compile_only: measure nothing.
        console: where progress goes.

    Returns:
        JSON-able: what was measured and written.

    Raises:
        NoGpuError, UnsupportedGpuError: no GPU to measure on.
        TableError: measurements that are there are of other kernels, another GPU or provenance.
        ValueError: a name that is no table's, or nothing to compile.
        MissingExtraError: the clips, or what decodes them, are not installed.
    """
    if most_cases is not None and most_cases < LEAST_CASES:
        fix = "measure more, or leave it to the budget"
        raise ValueError(wrong("cases", f"at least {LEAST_CASES}", most_cases, fix))
    raw = out.with_suffix(".npz")
    prior = prior_of(out)
    steps = Steps(console, count=1 if compile_only else 2 if model else 3)

    def measure() -> Measurements:
        clock: Clock = ModelClock(model) if model else GpuClock()
        if model is None:
            with steps.step("Compile kernels") as step:
                step.done(f"{build_kernels(clock.arch.name, 'bfloat16')} were missing")
        measured = _begin(out, raw, clock, "model" if model else "measured", fresh)
        before = len(measured.cases)
        drawn = recipes(
            PROFILE_CLIP,
            PROFILE_LAYERS,
            KINDS if kinds is None else kinds,
            most_tokens=most_tokens,
            most_active=clock.most_active,
            # The masks that the model is asked about are small anyway: the host makes the plans.
            small_too=model is None,
        )
        with steps.step(f"Measure on {clock.device}") as step:

            def on_case(case: Case) -> None:
                step.advance()
                console.print(f"  {case.source}, {case.name}: {_first(case)}", highlight=False)

            found = profile(
                drawn,
                clock,
                measured,
                path=raw,
                budget_s=budget_s,
                most_cases=most_cases,
                on_case=on_case,
            )
            step.done(f"{len(found.cases) - before} cases, {before} before; in {raw}")
        # The file has times in fewer digits: what is compiled now is what it gives again.
        return Measurements.read(raw) if found.cases else found

    if compile_only:
        measured = Measurements.read(raw)
        if measured.arch != out.stem:
            expected = f"{measured.arch}.yaml, as the measurements are of {measured.arch}"
            raise ValueError(wrong("out", expected, out.name, "rename the measurements"))
    else:
        with _alone(raw), ended_by_signal():
            measured = measure()
    with steps.step("Compile") as step:
        document = compile_table(measured, prior, path=out, edges=edges)
        write_table(document)
        step.done(f"{len(document.keys)} keys from {len(measured.cases)} cases; {out}")
    return {
        "table": str(out),
        "measurements": str(raw),
        "arch": measured.arch,
        "device": measured.device,
        "provenance": measured.provenance,
        "fingerprint": measured.fingerprint,
        "cases": len(measured.cases),
        "keys": len(document.keys),
        "regimes": sum(len(key.regimes) for key in document.keys),
        "wrong": [
            {"case": case.name, "source": case.source, "plan": t.plan.name, "note": t.note}
            for case, t in measured.wrong_outputs()
        ],
    }


def prior_of(out: Path) -> Document:
    """The table whose reasoned keys a new one at this path takes over: one that is there, or ours.

    Raises:
        ValueError: the name is no table's.
        TableError: what is there is no table.
    """
    if out.suffix != ".yaml":
        fix = "name it after the GPU's table, such as plans/sm90.yaml"
        raise ValueError(wrong("out", "a .yaml file", str(out), fix))
    if not out.parent.is_dir():
        raise ValueError(wrong("out", "a folder that exists", str(out.parent), "make it first"))
    if out.stem not in shipped():
        names = ", ".join(f"{name}.yaml" for name in shipped())
        fix = "name it after the GPU's compute capability, sm90.yaml for 9.0"
        raise ValueError(wrong("out", f"one of {names}", out.name, fix))
    return read_document(out) if out.is_file() else load_for(out.stem).document


@contextmanager
def _alone(raw: Path) -> Iterator[None]:
    """Keep other profiles from these measurements; the system lets go when this one dies.

    Raises:
        OSError: the folder cannot be written.
        ValueError: another profile is at it.
    """
    from filelock import FileLock, Timeout  # slow to import

    path = raw.with_name(f".{raw.name}.lock")
    lock = FileLock(path, timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        expected, fix = "measurements that no other profile is writing", "wait for it, or stop it"
        raise ValueError(wrong("out", expected, str(raw), fix)) from error
    except NotImplementedError:  # a file system without locks
        pass
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        lock.release()


def _begin(out: Path, raw: Path, clock: Clock, provenance: str, fresh: bool) -> Measurements:
    """The measurements to go on from: those that are there, or none."""
    table = clock.arch.table
    if out.stem != table:
        fix = f"write to {table}.yaml, or profile on a GPU of {out.stem}"
        raise ValueError(wrong("out", f"{table}.yaml for {clock.device}", out.name, fix))
    kernels = catalog.fingerprint(clock.arch.name)
    if raw.is_file() and not fresh:
        found = Measurements.read(raw)
        for name, now, then in (
            ("kernels", kernels, found.catalog),
            ("GPU", clock.device, found.device),
            ("provenance", provenance, found.provenance),
        ):
            if now != then:
                fix = "add --fresh to throw them away, or write elsewhere"
                raise TableError(wrong("out", f"measurements of {name} {now}", then, fix))
        return found
    how = "Predicted by the cost model" if provenance == "model" else "Measured"
    day = datetime.now(timezone.utc).date().isoformat()
    made = (
        f"{how} for {clock.device} on {day} with tessera-cupy {__version__}, by `{_command(out)}`.",
    )
    return Measurements(table, provenance, clock.device, kernels, made, ())


def _command(out: Path) -> str:
    """The command that runs, with the table's name alone: folders differ from user to user."""

    def named(word: str) -> str:
        option, equals, path = word.rpartition("=")
        return f"{option}{equals}{out.name}" if path and Path(path) == out else word

    return shlex.join(["tessera-cupy", *map(named, sys.argv[1:])])


def _first(case: Case) -> str:
    times = case.times()
    if not times:
        return "no plan has a time"
    best = min(times, key=lambda plan: (times[plan], plan.name))
    return f"{best.name} {times[best]:.3f} ms, {len(times)} plans"
