"""A caller's own rules: plans for some requests, before all that a table says of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

from tessera_cupy.errors import wrong
from tessera_cupy.regimes.features import Features
from tessera_cupy.regimes.index import Choice
from tessera_cupy.regimes.naming import bucket_name, key_name
from tessera_cupy.regimes.plan_spec import PlanSpec
from tessera_cupy.regimes.schema import (
    ANY,
    AXES,
    DTYPES,
    FRACTIONS,
    LAYOUTS,
    MASKS,
    Interval,
    Match,
)

#: A size, or the first and the last of several; None there means no end.
Sizes: TypeAlias = int | tuple[int | None, int | None]
#: From the first value to below the second one; None there means no end.
Bounds: TypeAlias = tuple[float | None, float | None]


@dataclass(frozen=True)
class Rule:
    """Plans that come first for the requests that match.

    Attributes:
        match: which requests, by what they are.
        when: the same by numbers, one interval for each axis that tables have buckets for.
        plans: plans from best to worst.
        why: the reason, one line.
    """

    match: Match
    when: tuple[Interval, ...]
    plans: tuple[PlanSpec, ...]
    why: str

    @cached_property
    def name(self) -> str:
        """The requests that match, such as ``q64 d128 density<0.3``."""
        bounds = bucket_name(self.when)
        key = key_name(self.match)
        return bounds if bounds and key == "any" else f"{key} {bounds}".rstrip()

    @property
    def edges(self) -> tuple[tuple[float, ...], ...]:
        """Numbers at which the rule begins or ends to match, for each axis."""
        ends = [{bounds.low, bounds.high} - {-math.inf, math.inf} for bounds in self.when]
        return tuple(tuple(sorted(values)) for values in ends)

    def matches(self, f: Features) -> bool:
        """Whether a request is one that the rule is for."""
        inside = (value in bounds for value, bounds in zip(f.numbers, self.when, strict=True))
        return self.is_for(f) and all(inside)

    def is_for(self, f: Features) -> bool:
        """The same but for the request's numbers."""
        match = self.match
        for given, value in (
            (match.ragged, f.ragged),
            (match.token_bits, f.token_bits),
            (match.dtype, f.dtype),
            (match.layout, f.layout),
        ):
            if given is not None and given != value:
                return False
        return (
            (match.mask is None or f.slices)
            and f.block_q in match.block_q
            and f.block_kv in match.block_kv
            and f.head_dim in match.head_dim
        )

    def before(self, choice: Choice, arch: str) -> Choice:
        """An answer of a table, with the rule's plans before its ranking."""
        rest = tuple(plan for plan in choice.ranking if plan not in self.plans)
        return Choice(
            regime=f"{arch} rule {self.name}, before {choice.regime}",
            ranking=self.plans + rest,
            key=self.name,
            why=self.why,
            origin="rule",
        )


def make_rule(
    plans: str | PlanSpec | Sequence[str | PlanSpec], why: str, match: dict[str, Any]
) -> Rule:
    """The rule of what :meth:`tessera_cupy.regimes.Table.with_rule` was given.

    Raises:
        TypeError: a plan, a reason or a field of another type.
        ValueError: a plan's name, or a field's value, that there is none of.
    """
    fields = {name: value for name, value in match.items() if value is not None}
    if not isinstance(why, str) or not why.strip() or "\n" in why:
        raise ValueError(wrong("why", "one line of text", repr(why), "leave it out"))
    read: dict[str, Any] = {}
    for reader, names in ((_sizes, _SIZES), (_flag, _FLAGS), (_word, _WORDS)):
        read |= {name: reader(name, fields[name]) for name in names if name in fields}
    return Rule(
        match=Match(**read),
        when=tuple(_bounds(axis, fields[axis]) if axis in fields else ANY for axis in AXES),
        plans=_plans(plans),
        why=why.strip(),
    )


_SIZES = ("block_q", "block_kv", "head_dim")
_FLAGS = ("ragged", "token_bits")
_WORDS = {"dtype": DTYPES, "layout": LAYOUTS, "mask": MASKS}


def _plans(given: str | PlanSpec | Sequence[str | PlanSpec]) -> tuple[PlanSpec, ...]:
    listed = [given] if isinstance(given, (str, PlanSpec)) else given
    expected = "a plan's name, a PlanSpec, or a list of these from best to worst"
    fix = "name plans such as attend_mma/q64k64/retain-pack/longest+split"
    if not isinstance(listed, Sequence):
        raise TypeError(wrong("plans", expected, type(given).__name__, fix))
    plans: list[PlanSpec] = []
    for item in listed:
        if isinstance(item, str):
            item = PlanSpec.parse(item, argument="plans")
        elif not isinstance(item, PlanSpec):
            raise TypeError(wrong("plans", expected, f"one that is {item!r}", fix))
        if item in plans:
            raise ValueError(wrong("plans", "each plan once", f"{item.name} again", "remove one"))
        plans.append(item)
    if not plans:
        raise ValueError(wrong("plans", "one plan at least", "none", fix))
    return tuple(plans)


def _sizes(name: str, given: Any) -> Interval:
    expected = "a whole number from 1 on, or the pair (from, to) of such, both included"
    fix = "write 64, (16, 48), (None, 48) or (64, None)"
    single = isinstance(given, (int, float)) and not isinstance(given, bool)
    low, high = _pair(name, (given, given) if single else given, expected, fix)
    for end in (low, high):
        if end is not None and (not isinstance(end, int) or end < 1):
            raise ValueError(wrong(name, expected, repr(given), fix))
    if low is not None and high is not None and low > high:
        raise ValueError(wrong(name, "`from` not above `to`", repr(given), "swap them"))
    return Interval(-math.inf if low is None else low, math.inf if high is None else high + 1)


def _bounds(axis: str, given: Any) -> Interval:
    whole = axis not in FRACTIONS
    numbers = "whole numbers from 1 on" if whole else "numbers from 0 to 1"
    expected = f"the pair (from, below) of {numbers}"
    fix = f"write {'(4096, 32768)' if whole else '(0.1, 0.3)'}, with None where there is no end"
    low, high = _pair(axis, given, expected, fix)
    for end in (low, high):
        if end is None:
            continue
        if (isinstance(end, int) and end >= 1) if whole else (0 <= end <= 1):
            continue
        raise ValueError(wrong(axis, expected, repr(given), fix))
    if low is not None and high is not None and low >= high:
        raise ValueError(wrong(axis, "`from` lower than `below`", repr(given), "swap them"))
    return Interval(-math.inf if low is None else low, math.inf if high is None else high)


def _pair(name: str, given: Any, expected: str, fix: str) -> tuple[Any, Any]:
    """Two numbers, or None in place of one of them."""
    number = (int, float)
    if (
        not isinstance(given, tuple)
        or len(given) != 2
        or given == (None, None)
        or any(
            end is not None and (isinstance(end, bool) or not isinstance(end, number))
            for end in given
        )
    ):
        raise TypeError(wrong(name, expected, repr(given), fix))
    return given


def _flag(name: str, given: Any) -> bool:
    if not isinstance(given, bool):
        raise TypeError(wrong(name, "True or False", repr(given), "leave it out to mean both"))
    return given


def _word(name: str, given: Any) -> str:
    choices = _WORDS[name]
    if given not in choices:
        expected = f"one of {', '.join(choices)}"
        raise ValueError(wrong(name, expected, repr(given), "leave it out to mean any"))
    return str(given)
