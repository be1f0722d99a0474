"""The run behind ``bench rules``: the chosen rules on their models' grids, one report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tessera_cupy import interop
from tessera_cupy.bench.machine import machine
from tessera_cupy.bench.rules import RULES, Rule, find
from tessera_cupy.bench.rules_times import COMPLETE, Input, measure
from tessera_cupy.bench.steps import Steps
from tessera_cupy.errors import MissingExtraError, wrong

if TYPE_CHECKING:
    from rich.console import Console


def run_rules(
    *,
    rules: Sequence[str] | None,
    heads: int,
    clip: str,
    console: Console,
    cold: bool = False,
) -> dict[str, Any]:
    """Time the complete call of rules on the GPU here, beside torch's dense attention.

    Args:
        rules: names in :data:`~tessera_cupy.bench.rules.RULES`; None means all.
        heads: heads of q, k and v, each with a mask of its own.
        clip: one of :data:`tessera_cupy.bench.clips.CLIPS`.
        console: where progress goes.
        cold: whether each call begins with a cold L2.

    Returns:
        JSON-able: the machine, the sizes, where the masks are from, in ``rows`` one for each rule
        as :func:`~tessera_cupy.bench.rules_times.measure` gives it or with the ``reason`` why it
        could not run, and ``passed``, whether every output was right.

    Raises:
        NoGpuError: there is none.
        MissingExtraError: scikit-video or av is not installed, or a package of a rule that is
            named.
        ValueError: an argument that cannot be served.
    """
    chosen = [find(name) for name in dict.fromkeys(RULES if rules is None else rules)]
    if heads < 1:
        raise ValueError(wrong("heads", "at least 1", heads, "pass 1 or more"))
    interop.import_cupy()
    sizes = dict.fromkeys((rule.grid, rule.head_dim, rule.sharpen) for rule in chosen)
    steps = Steps(console, count=2 * len(sizes))
    cases: dict[str, dict[str, Any]] = {}
    for size in sizes:
        alike = [rule for rule in chosen if (rule.grid, rule.head_dim, rule.sharpen) == size]
        cases |= _on_grid(alike, (clip, heads), steps, console, rules is None, cold)
    ordered = [cases[rule.name] for rule in chosen]
    return {
        **machine(),
        "heads": heads,
        "dtype": "bfloat16",
        "masks": f"regenerated from {clip}.mp4, on the grids of the rules' models without text",
        "rows": ordered,
        "passed": all(case["check"]["passed"] for case in ordered if "check" in case),
    }


def _on_grid(
    rules: Sequence[Rule],
    what: tuple[str, int],
    steps: Steps,
    console: Console,
    may_lack: bool,
    cold: bool,
) -> dict[str, dict[str, Any]]:
    """The cases of rules that take one q, k and v, by name."""
    clip, heads = what
    grid, head_dim, sharpen = rules[0].grid, rules[0].head_dim, rules[0].sharpen
    with steps.step(f"q, k, v on {grid}") as step:
        given = Input(clip, grid, heads, head_dim, sharpen)
        step.done(f"{grid.tokens:,} tokens, {heads} heads of {head_dim}, bfloat16, from {clip}.mp4")
    cases: dict[str, dict[str, Any]] = {}
    with steps.step(f"Measure on {grid}", len(rules)) as step:
        for rule in rules:
            try:
                case = cases[rule.name] = measure(rule, given, cold=cold)
            except MissingExtraError as error:
                if not may_lack:
                    raise
                cases[rule.name] = {"rule": rule.name, "clip": clip, "reason": str(error)}
                continue
            finally:
                step.advance()
            console.print(
                f"  {rule.name}: complete {case['ms'][COMPLETE]:.3f} ms, "
                f"density {case['density']:.3f}"
            )
        step.done(", ".join(rule.name for rule in rules))
    return cases
