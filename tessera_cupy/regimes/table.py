"""Profile tables: one file for the GPUs of a generation, which ranks the plans for each request.

A table's keys are compiled (:mod:`tessera_cupy.regimes.index`), so that a lookup at call time is
a dictionary and a few bisections.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from tessera_cupy._resources import plans_dir
from tessera_cupy.errors import TableError, wrong
from tessera_cupy.regimes.features import Features
from tessera_cupy.regimes.index import Choice, Index
from tessera_cupy.regimes.plan_spec import PlanSpec
from tessera_cupy.regimes.rules import Bounds, Rule, Sizes, make_rule
from tessera_cupy.regimes.schema import Document, Key, read_document


class Table:
    """A loaded profile table.

    Attributes:
        document: the table as it stands in its file (provenance, reasons, keys).
        rules: the caller's own, in the order given; a later one comes before an earlier one.
    """

    rules: tuple[Rule, ...] = ()

    def __init__(self, document: Document) -> None:
        """Compile a document.

        Raises:
            TableError: two keys of a list, or two regimes of a key, claim the same request.
        """
        self.document = document
        self._keys = Index(document, "keys")
        self._reasoned = Index(document, "reasoned")
        self._backings: dict[tuple[int, int], Choice] = {}

    def __repr__(self) -> str:
        document = self.document
        reasoned = f" and {len(document.reasoned)} reasoned" if document.reasoned else ""
        keys = f"{len(document.keys)}{reasoned} keys"
        if self.rules:
            keys += f", {len(self.rules)} rules"
        return f"Table({document.arch}, {document.provenance}, {keys})"

    def __getstate__(self) -> dict[str, Any]:
        # Addresses mean nothing in a copy, nor in another process.
        return {**self.__dict__, "_backings": {}}

    def lookup(self, features: Features) -> Choice:
        """Rank the plans for a request.

        The table's keys are asked first, then its reasoned ones; a request for which neither has
        an answer gets the base plans. Behind an answer come the plans of the next one, for requests
        that its own cannot serve. For key slices, the keys of either list that are for slices
        alone come before all others. A lookup in a shipped table took 1.0 us in Python 3.11 on a
        virtual machine of an AMD EPYC.

        >>> table = load_for("sm90")
        >>> choice = table.lookup(
        ...     Features(
        ...         block_q=64, block_kv=64, ragged=False, token_bits=False,
        ...         dtype="bfloat16", head_dim=128, layout="BHSD", heads=12,
        ...         tokens=32760, density=0.1, run_coverage=0.8,
        ...     )
        ... )  # fmt: skip
        >>> choice.ranking[0].mapping.q
        'share'
        """
        choice = self._listed(features)
        for rule in self.rules:
            if rule.matches(features):
                choice = rule.before(choice, self.document.arch)
        return choice

    def _listed(self, features: Features) -> Choice:
        """What the file says."""
        gap = first = None
        for slices in (True, False) if features.slices else (False,):
            for index in (self._keys, self._reasoned):
                found = index.find(features, slices=slices)
                if found is None or found.origin == "base":
                    gap = gap or found
                elif first is not None:
                    return self._backed(first, found)
                elif found.origin == "reasoned":
                    return found
                else:
                    first = found
        return first or gap or self._miss(features)

    def _backed(self, first: Choice, behind: Choice) -> Choice:
        """A measured ranking with the next answer's plans behind it.

        What was measured may serve none of a key's other sizes, and the base plans are slow.
        """
        key = (id(first), id(behind))  # both live as long as the table
        if key not in self._backings:
            plans = dict.fromkeys((*first.ranking[: first.own], *behind.ranking))
            # Of two threads one keeps its answer, whose address may be part of another key.
            self._backings.setdefault(key, replace(first, ranking=tuple(plans)))
        return self._backings[key]

    def with_rule(
        self,
        plans: str | PlanSpec | Sequence[str | PlanSpec],
        *,
        why: str = "given by the caller",
        block_q: Sizes | None = None,
        block_kv: Sizes | None = None,
        ragged: bool | None = None,
        token_bits: bool | None = None,
        dtype: str | None = None,
        head_dim: Sizes | None = None,
        layout: str | None = None,
        mask: str | None = None,
        heads: Bounds | None = None,
        tokens: Bounds | None = None,
        density: Bounds | None = None,
        run_coverage: Bounds | None = None,
    ) -> Table:
        """A new table in which requests that match all of this get these plans first.

        What the table says stays behind them, for requests that they cannot serve. Of several rules
        that match, the one given last comes first. What is left out matches every request.

        Args:
            plans: a plan's name or :class:`PlanSpec`, or several from best to worst.
            why: the reason, which ``plan.explain()`` says.
            block_q: query rows of a block, or the pair (from, to) of such, both included; None
                in its place means no end. Of ragged blocks, those of the largest.
            block_kv: its key columns, likewise.
            ragged: whether blocks differ in size.
            token_bits: whether some blocks are partial.
            dtype: ``"float16"`` or ``"bfloat16"``.
            head_dim: elements of a query row, as ``block_q``.
            layout: ``"BHSD"`` or ``"BSHD"``.
            mask: ``"slices"`` for masks of key slices alone.
            heads: the pair (from, below) of batch times query heads; None in its place means no
                end.
            tokens: keys, likewise.
            density: kept fraction of the pairs, likewise, 0 to 1.
            run_coverage: fraction of active blocks in horizontal runs, likewise, 0 to 1.

        Raises:
            TypeError: a value of another type.
            ValueError: a plan's name, or a value, that there is none of.

        >>> table = load_for("sm90").with_rule(
        ...     "attend_wgmma/q128k192/regroup-pack/longest+split", block_q=64, density=(None, 0.2)
        ... )
        >>> table.rules[0].name
        'q64 density<0.2'
        """
        table = copy(self)
        match = {
            "block_q": block_q,
            "block_kv": block_kv,
            "ragged": ragged,
            "token_bits": token_bits,
            "dtype": dtype,
            "head_dim": head_dim,
            "layout": layout,
            "mask": mask,
            "heads": heads,
            "tokens": tokens,
            "density": density,
            "run_coverage": run_coverage,
        }
        table.rules = (*self.rules, make_rule(plans, why, match))
        return table

    def deciders(self, features: Features) -> tuple[Key | Rule, ...]:
        """What decides about requests that differ from this one in numbers only, those of AXES."""
        keys = [
            index.key(features, slices=slices)
            for slices in ((True, False) if features.slices else (False,))
            for index in (self._keys, self._reasoned)
        ]
        rules = [rule for rule in self.rules if rule.is_for(features)]
        return (*[key for key in keys if key is not None], *rules)

    def plans(self) -> tuple[PlanSpec, ...]:
        """Every plan that the table names, each once, in the order of the file; then the rules'."""
        rankings = [regime.plans for key in self.document.all_keys for regime in key.regimes]
        rankings += [rule.plans for rule in self.rules]
        return tuple(
            dict.fromkeys(plan for plans in [self.document.base, *rankings] for plan in plans)
        )

    def _miss(self, f: Features) -> Choice:
        shape = f"q{f.block_q}k{f.block_kv} d{f.head_dim} {f.dtype} {f.layout}"
        regime = f"{self.document.arch} base (no key for {shape})"
        why = "the table has no key for this request"
        return Choice(regime, self.document.base, key="base", why=why, origin="base")


def load_table(path: str | Path) -> Table:
    """Load a profile table from a file; :func:`load_for` loads a shipped one by name.

    Raises:
        TableError: the file is missing, or it is wrong; then the message names file, line and
            field.
    """
    path = Path(path)
    if not path.is_file():
        got = f"{str(path)!r}, {'a folder' if path.is_dir() else 'where there is no file'}"
        fix = "check the path"
        if str(path) in shipped():
            file = plans_dir() / f"{path}.yaml"
            fix = f'call tessera_cupy.regimes.load_for("{path}"), or give "{file}"'
        raise TableError(wrong("path", "the path of a profile table, a .yaml file", got, fix))
    return Table(read_document(path))


@cache
def load_for(name: str) -> Table:
    """The shipped table of a GPU generation: sm80, sm89, sm90, sm100 or sm120; loaded once.

    Raises:
        ValueError: there is no table of that name.
        TableError: the table is wrong.
    """
    known = shipped()
    if name not in known:
        expected = f"one of {', '.join(known)}"
        raise ValueError(wrong("name", expected, repr(name), "name a table that is shipped"))
    return load_table(plans_dir() / f"{name}.yaml")


def shipped() -> list[str]:
    """Names of the tables that come with the package."""
    return sorted(path.stem for path in plans_dir().glob("*.yaml"))
