"""A profile table as the text of its file, the same to the last byte for the same table."""

from __future__ import annotations

import math
import os
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from tessera_cupy.regimes.schema import ANY, AXES, SCHEMA, Document, Interval, Key, Match

_WIDTH = 98


def table_text(document: Document) -> str:
    """The file of a table; :func:`~tessera_cupy.regimes.schema.read_document` reads it back.

    >>> from tessera_cupy.regimes import load_for
    >>> table_text(load_for("sm90").document).splitlines()[1]
    'arch: sm90'
    """
    return "\n".join(map(_printable, _lines(document))) + "\n"


def write_table(document: Document) -> None:
    """Write a table to its path, whole or not at all.

    Raises:
        OSError: the folder cannot be written.
    """
    path = Path(document.path)
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", dir=path.parent, suffix=".yaml.tmp", delete=False
    ) as file:
        try:
            file.write(table_text(document))
            file.flush()
            os.fsync(file.fileno())
        except BaseException:
            os.unlink(file.name)
            raise
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


def _lines(document: Document) -> Iterator[str]:
    yield f"schema: {SCHEMA}"
    yield f"arch: {document.arch}"
    yield f"provenance: {document.provenance}"
    yield f"device: {_text(document.device)}"
    yield f"catalog: {_text(document.catalog)}"
    yield f"raw_data: {_text(document.raw_data)}"
    yield "reasons: |"
    for paragraph in document.reasons.strip().splitlines():
        wrapped = textwrap.wrap(paragraph, _WIDTH, break_long_words=False, break_on_hyphens=False)
        yield from (f"  {line}" for line in wrapped or [""])
    yield "base:"
    yield from (f"  - {plan.name}" for plan in document.base)
    for title, keys in (("keys", document.keys), ("reasoned", document.reasoned)):
        if keys:
            yield f"{title}:"
            for key in keys:
                yield from _key(key)


def _printable(line: str) -> str:
    """A line without characters that a table may not have, such as those of odd file names."""
    return line if line.isprintable() else "".join(c if c.isprintable() else "?" for c in line)


def _key(key: Key) -> Iterator[str]:
    yield f"  - match: {_match(key.match)}"
    yield f"    why: {_text(key.why)}"
    if key.cases is not None:
        yield f"    cases: {key.cases}"
    if any(key.edges):
        pairs = [
            f"{axis}: [{', '.join(map(_number, edges))}]"
            for axis, edges in zip(AXES, key.edges, strict=True)
            if edges
        ]
        yield f"    edges: {{{', '.join(pairs)}}}"
    yield "    regimes:"
    for regime in key.regimes:
        yield f"      - when: {_when(regime.when)}"
        if regime.cases is not None:
            yield f"        cases: {regime.cases}"
        yield "        plans:"
        yield from (f"          - {plan.name}" for plan in regime.plans)


def _match(match: Match) -> str:
    fields = [
        ("mask", match.mask),
        ("ragged", _flag(match.ragged)),
        ("token_bits", _flag(match.token_bits)),
        ("block_q", _sizes(match.block_q)),
        ("block_kv", _sizes(match.block_kv)),
        ("dtype", match.dtype),
        ("head_dim", _sizes(match.head_dim)),
        ("layout", match.layout),
    ]
    return "{" + ", ".join(f"{name}: {value}" for name, value in fields if value) + "}"


def _flag(value: bool | None) -> str | None:
    return None if value is None else str(value).lower()


def _sizes(sizes: Interval) -> str | None:
    if sizes == ANY:
        return None
    if sizes.high == sizes.low + 1:
        return _number(sizes.low)
    ends = []
    if sizes.low > -math.inf:
        ends.append(f"from: {_number(sizes.low)}")
    if sizes.high < math.inf:
        ends.append(f"to: {_number(sizes.high - 1)}")
    return "{" + ", ".join(ends) + "}"


def _when(box: Sequence[Interval]) -> str:
    bounds = []
    for axis, interval in zip(AXES, box, strict=True):
        ends = []
        if interval.low > -math.inf:
            ends.append(f"from: {_number(interval.low)}")
        if interval.high < math.inf:
            ends.append(f"below: {_number(interval.high)}")
        if ends:
            bounds.append(f"{axis}: {{{', '.join(ends)}}}")
    return "{" + ", ".join(bounds) + "}"


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(float(value))


def _text(value: str | None) -> str:
    """A text in quotes where YAML could take it for something else."""
    if value is None:
        return "null"
    plain = value[:1].isalpha() and not any(c in value for c in ":#'\"\n{}[]&*!|>%@`")
    if plain and value.lower() not in ("null", "true", "false", "yes", "no", "on", "off", "y", "n"):
        return value
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
