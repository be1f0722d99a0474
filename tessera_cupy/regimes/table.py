"""Profile tables: one file for the GPUs of a generation, which ranks the plans for each request.

A table's keys are compiled (:mod:`tessera_cupy.regimes.index`), so that a lookup at call time is
a dictionary and a few bisections.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from tessera_cupy._resources import plans_dir
from tessera_cupy.errors import TableError, wrong
from tessera_cupy.regimes.features import Features
from tessera_cupy.regimes.index import Choice, Index
from tessera_cupy.regimes.plan_spec import PlanSpec
from tessera_cupy.regimes.schema import Document, read_document


class Table:
    """A loaded profile table.

    Attributes:
        document: the table as it stands in its file (provenance, reasons, keys).
    """

    def __init__(self, document: Document) -> None:
        """Compile a document.

        Raises:
            TableError: two keys of a list, or two regimes of a key, claim the same request.
        """
        self.document = document
        self._keys = Index(document, "keys")
        self._reasoned = Index(document, "reasoned")

    def __repr__(self) -> str:
        document = self.document
        reasoned = f" and {len(document.reasoned)} reasoned" if document.reasoned else ""
        keys = f"{len(document.keys)}{reasoned} keys"
        return f"Table({document.arch}, {document.provenance}, {keys})"

    def lookup(self, features: Features) -> Choice:
        """Rank the plans for a request.

        The table's keys are asked first, then its reasoned ones; a request for which neither has
        an answer gets the base plans. For key slices, the keys of either list that are for slices
        alone come before all others.

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
        gap = None
        for slices in (True, False) if features.slices else (False,):
            for index in (self._keys, self._reasoned):
                found = index.find(features, slices=slices)
                if found is not None and found.origin != "base":
                    return found
                gap = gap or found
        return gap or self._miss(features)

    def plans(self) -> tuple[PlanSpec, ...]:
        """Every plan that the table names, each once, in the order of the file."""
        rankings = [regime.plans for key in self.document.all_keys for regime in key.regimes]
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
