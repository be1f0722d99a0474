"""What is wrong with a profile table here: in its file, and beside this release's kernels.

Loading finds what the file alone shows. Here the plans that it names are looked up in the catalog
of each architecture that the table serves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf
from pathlib import Path

from tessera_cupy.errors import TableError
from tessera_cupy.kernels.arch import ARCHS, Arch
from tessera_cupy.kernels.catalog import DTYPES, MAX_HEAD_DIM, find, fingerprint
from tessera_cupy.ranking import archs_of, is_current
from tessera_cupy.regimes import PlanSpec, load_table
from tessera_cupy.regimes.schema import ANY, Document, Interval, Match, not_served

_HEAD_DIMS = range(8, MAX_HEAD_DIM + 1, 8)


def problems(path: str | Path) -> list[str]:
    """What is wrong with a table file, one line each; an empty list where nothing is.

    - It does not load: file, line and field, with what was expected.
    - A plan has no kernel, for any head dim that its key may have, on an architecture that the
      table serves. A table whose name no architecture takes must be of use on one of all.
    - The base plans, which a request without a key gets, cannot serve some blocks, head dim, dtype.
    - It was measured on kernels that differ from those of this release.

    >>> from tessera_cupy._resources import plans_dir
    >>> problems(plans_dir() / "sm90.yaml")
    []
    """
    try:
        document = load_table(path).document
    except TableError as error:
        return [str(error)]
    return [*_without_kernel(document), *_not_eligible(document), *_not_current(document)]


def _without_kernel(document: Document) -> Iterator[str]:
    served = archs_of(document.arch)
    for where, field, match, plans in _rankings(document):
        for number, plan in enumerate(plans):
            having = [arch for arch in ARCHS.values() if _has_kernel(plan, arch, match)]
            lacking = _lacking(served, having)
            if lacking:
                dims = "" if match.head_dim == ANY else f" of head dim {_dims(match.head_dim)}"
                yield (
                    f"{document.path}, {where}field `{field}[{number}]`: expected a plan with a "
                    f"kernel{dims} on {lacking}, got {plan.name}. Fix: name a tile of the catalog."
                )


def _rankings(document: Document) -> Iterator[tuple[str, str, Match, tuple[PlanSpec, ...]]]:
    """Each list of plans: where its line is known, its field, who it is for, and the list."""
    yield "", "base", Match(), document.base
    for name, keys in (("keys", document.keys), ("reasoned", document.reasoned)):
        for i, key in enumerate(keys):
            for j, regime in enumerate(key.regimes):
                field = f"{name}[{i}].regimes[{j}].plans"
                yield f"line {regime.line}, ", field, key.match, regime.plans


def _not_eligible(document: Document) -> Iterator[str]:
    served = archs_of(document.arch)
    for dtype in DTYPES:
        for bits in (False, True):
            missed: dict[tuple[str, str], list[int]] = {}
            for dim in _HEAD_DIMS:
                blocks = {
                    arch.name: not_served(
                        [p for p in document.base if _kernel_for(p, arch, dtype, dim, bits)]
                    )
                    for arch in served or ARCHS.values()
                }
                having = [ARCHS[name] for name, text in blocks.items() if text is None]
                lacking = _lacking(served, having)
                if lacking:
                    first = next(text for text in blocks.values() if text)
                    missed.setdefault((lacking, first), []).append(dim)
            for (lacking, text), dims in missed.items():
                kind = f"{dtype}{' with token bits' if bits else ''}"
                yield (
                    f"{document.path}, field `base`: expected an eligible plan for every request "
                    f"on {lacking}, got none for {text}, head dim {dims[0]} to {dims[-1]}, {kind}. "
                    "Fix: list plans of a tile that the catalog has there."
                )


def _not_current(document: Document) -> Iterator[str]:
    archs = archs_of(document.arch) or list(ARCHS.values())
    if not is_current(document, archs):
        now = ", ".join(f"{fingerprint(arch.name)} on {arch.name}" for arch in archs)
        yield (
            f"{document.path}, field `catalog`: expected the kernels of this release ({now}), "
            f"got {document.catalog}. Fix: measure the table again."
        )


def _lacking(served: Sequence[Arch], having: Sequence[Arch]) -> str:
    """The architectures of a table that lack something, as text; empty where none does.

    A table that no architecture takes by itself needs it on one only.
    """
    if served:
        return ", ".join(arch.name for arch in served if arch not in having)
    return "" if having else "any architecture"


def _has_kernel(plan: PlanSpec, arch: Arch, match: Match) -> bool:
    """Whether there is a kernel for every dtype of a key, at some head dim of it."""
    dtypes = tuple(DTYPES) if match.dtype is None else (match.dtype,)
    dims = [dim for dim in _HEAD_DIMS if dim in match.head_dim]
    bits = bool(match.token_bits)
    return all(any(_kernel_for(plan, arch, dtype, dim, bits) for dim in dims) for dtype in dtypes)


def _kernel_for(plan: PlanSpec, arch: Arch, dtype: str, head_dim: int, bits: bool) -> bool:
    gather = plan.mapping.kv == "gather"
    tile = (plan.tile_q, plan.tile_kv)
    bits = bits and not gather
    return find(arch.name, plan.kernel, dtype, head_dim, *tile, bits, gather) is not None


def _dims(interval: Interval) -> str:
    low = 8 if interval.low == -inf else interval.low
    return f"{low} to {MAX_HEAD_DIM if interval.high == inf else interval.high - 1}"
