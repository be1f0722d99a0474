"""Which plan serves a request: the best-ranked one that the catalog and the mapping allow."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

from tessera_cupy.errors import PlanNotEligibleError, wrong
from tessera_cupy.kernels import catalog
from tessera_cupy.mapping import makes_halves, why_not
from tessera_cupy.masks import BlockMask
from tessera_cupy.masks.summary import MaskSummary
from tessera_cupy.regimes import Choice, Features, PlanSpec, Table, load_for
from tessera_cupy.regimes.features import kept_keys
from tessera_cupy.regimes.schema import AXES, Document
from tessera_cupy.request import Request


class PlanChoice(NamedTuple):
    """Where a plan came from.

    Attributes:
        regime: name of the regime that ranked it.
        why: the profile table's reason.
        passed_over: (plan name, reason) of better-ranked plans that were not eligible.
        answer: what the table said, the complete ranking with it; None for a plan that the caller
            named.
        table: the table as it stands in its file; None likewise.
    """

    regime: str
    why: str
    passed_over: tuple[tuple[str, str], ...]
    answer: Choice | None = None
    table: Document | None = None


_Answer: TypeAlias = tuple[PlanSpec, catalog.KernelConfig, PlanChoice]


def choose(
    mask: BlockMask,
    request: Request,
    regime: str | PlanSpec | Table,
    summary: MaskSummary | None = None,
) -> _Answer:
    """The first plan of the ranking that can serve the request, with its kernel.

    What a table says is remembered, but for ragged blocks of the host, with all that it depends on
    besides a mask's density and run coverage: a later choice is where these lie between edges.
    It took 1.4 us in Python 3.11 on a virtual machine of an Intel Xeon, with the mask's figures
    known.

    Args:
        mask: what to compute.
        request: sizes, dtype, layout and architecture.
        regime: as in :func:`tessera_cupy.make_plan`.
        summary: what a GPU counted in the mask, which is then not read.

    Raises:
        PlanNotEligibleError: no plan of the ranking can serve it; the message gives each reason.
        TypeError, ValueError: the regime is none.
    """
    regime = checked_regime(regime)
    if isinstance(regime, PlanSpec):
        return _first(mask, request, (regime,), "given by the caller", "pinned")
    table = regime if isinstance(regime, Table) else load_for(request.arch.table)
    kind = _kind_of(mask, request, table)
    if kind is None:
        return _by_table(mask, request, table, summary)
    if summary is None:
        density, run_coverage = mask.density(), mask.run_coverage()
    else:
        density, run_coverage = summary.density, summary.run_coverage
    place = (
        bisect_right(kind.densities, density),
        bisect_right(kind.runs, run_coverage),
        bisect_right(kind.kept, kept_keys(density, request.skv)),
    )
    answer = kind.answers.get(place)
    if answer is None:
        answer = kind.answers[place] = _by_table(mask, request, table, summary)
    return answer


class _Kind(NamedTuple):
    """What a table says of a request whose masks differ in their contents alone.

    Attributes:
        known: what the key names by its identity.
        densities, runs, kept: every edge of density, run coverage and kept keys that some answer
            of the table depends on.
        answers: by the places of the three between the edges.
    """

    known: tuple[object, ...]
    densities: tuple[float, ...]
    runs: tuple[float, ...]
    kept: tuple[float, ...]
    answers: dict[tuple[int, int, int], _Answer]


_kinds: dict[tuple[object, ...], _Kind] = {}
_MOST_KINDS = 256


def _kind_of(mask: BlockMask, request: Request, table: Table) -> _Kind | None:
    """The kind of a request and its mask; None where the sizes of blocks are the mask's own."""
    ragged = None
    if mask.ragged:
        source = mask.source
        if source is None:
            return None
        ragged = source.layout.ragged
    # By identity, which is quicker than hashes.
    key = (
        id(request),
        id(table),
        id(ragged),
        mask.block_size,
        mask.has_token_bits,
        mask.of_slices,
    )
    kind = _kinds.get(key)
    if kind is None:
        deciders = table.deciders(_features(mask, request, _NOTHING_KNOWN))
        edges = zip(AXES, *[decider.edges for decider in deciders], strict=True)
        sorted_edges = {axis: tuple(sorted(set().union(*of_axis))) for axis, *of_axis in edges}
        if len(_kinds) >= _MOST_KINDS:
            _kinds.clear()
        kind = _kinds[key] = _Kind(
            (request, table, ragged),
            sorted_edges["density"],
            sorted_edges["run_coverage"],
            sorted_edges["kept_keys"],
            {},
        )
    return kind


# Stands in for a mask's numbers where they decide nothing.
_NOTHING_KNOWN = MaskSummary(blocks=0, nnz=0, in_runs=0)


def _features(mask: BlockMask, request: Request, summary: MaskSummary | None) -> Features:
    return Features.of(
        mask,
        batch=request.batch,
        q_heads=request.q_heads,
        dtype=request.kernel_dtype,
        head_dim=request.head_dim,
        layout=request.layout,
        summary=summary,
    )


def _by_table(
    mask: BlockMask, request: Request, table: Table, summary: MaskSummary | None
) -> _Answer:
    answer = table.lookup(_features(mask, request, summary))
    return _first(mask, request, answer.ranking, answer.regime, answer.why, answer, table.document)


def _first(
    mask: BlockMask,
    request: Request,
    ranking: Iterable[PlanSpec],
    name: str,
    why: str,
    answer: Choice | None = None,
    document: Document | None = None,
) -> _Answer:
    """The first plan of a ranking that can serve the request, and what is told of the choice."""
    passed_over: list[tuple[str, str]] = []
    for spec in ranking:
        config, reason = eligible(spec, mask, request)
        if config is not None:
            return spec, config, PlanChoice(name, why, tuple(passed_over), answer, document)
        passed_over.append((spec.name, reason))
    raise _none_of(passed_over, request)


def checked_regime(regime: Any) -> str | PlanSpec | Table:
    """``"auto"``, a table, or the plan that a name stands for.

    Raises:
        TypeError: it is of another type.
        ValueError: a string that names no plan.
    """
    if isinstance(regime, (PlanSpec, Table)):
        return regime
    if isinstance(regime, str):
        return "auto" if regime == "auto" else _parsed(regime)
    raise TypeError(
        wrong(
            "regime",
            '"auto", a plan\'s name, a PlanSpec or a Table',
            type(regime).__name__,
            "leave it out",
        )
    )


@lru_cache(maxsize=256)
def _parsed(name: str) -> PlanSpec:
    return PlanSpec.parse(name, argument="regime")


def eligible(
    spec: PlanSpec, mask: BlockMask, request: Request
) -> tuple[catalog.KernelConfig | None, str]:
    """The kernel that runs a plan for this request, or None and the reason."""
    if mask.ragged:
        return _eligible(spec, mask, request)
    # By identity, which is quicker than hashes: what is known keeps both.
    key = (id(spec), id(request), mask.block_size, mask.has_token_bits, mask.of_slices)
    known = _uniform.get(key)
    if known is None:
        if len(_uniform) >= _MOST_KNOWN:
            _uniform.clear()
        known = _uniform[key] = _Eligible(spec, request, *_eligible(spec, mask, request))
    return known.config, known.reason


class _Eligible(NamedTuple):
    """The kernel of a plan for a request, or why there is none."""

    spec: PlanSpec
    request: Request
    config: catalog.KernelConfig | None
    reason: str


# Of masks with blocks of one size, which are alike in all that matters here.
_uniform: dict[tuple[object, ...], _Eligible] = {}
_MOST_KNOWN = 1024


def _eligible(
    spec: PlanSpec, mask: BlockMask, request: Request
) -> tuple[catalog.KernelConfig | None, str]:
    gather = spec.mapping.kv == "gather"
    # Slices that fill whole blocks need none, but other contents of the same slices may.
    bits = (mask.has_token_bits or mask.of_slices) and not gather
    config = catalog.find(
        request.arch.name,
        spec.kernel,
        request.kernel_dtype,
        request.head_dim,
        spec.tile_q,
        spec.tile_kv,
        bits,
        gather,
    )
    if config is None:
        kind = "with token bits " if bits else "that gathers rows " if gather else ""
        needed = ", which slices need that run as blocks" if bits and mask.of_slices else ""
        return None, (
            f"the catalog of {request.arch.name} has no {spec.kernel} kernel {kind}with "
            f"{spec.tile_q}x{spec.tile_kv} tiles for head dim {request.head_dim}{needed}"
        )
    if config.kernel == "attend_wgmma" and min(request.sq, request.skv, request.batch) == 0:
        return None, "attend_wgmma needs at least one query and one key for its tensor maps"
    if spec.mapping.q == "regroup" and config.kernel != "attend_wgmma":
        return None, f"{config.kernel} loads neighbouring query rows only"
    if makes_halves(mask, spec.mapping.q, spec.tile_q) and (
        config.kernel != "attend_wgmma" or config.tile_q != 128
    ):
        return None, (
            "share Q of ragged query blocks needs attend_wgmma with tiles of 128 rows (those of "
            f"two warpgroups), got {spec.kernel} with {spec.tile_q}"
        )
    reason = catalog.why_not(config, request.arch.smem_block) or why_not(
        spec.mapping, mask, spec.tile_q, spec.tile_kv
    )
    return (None, reason) if reason else (config, "")


def _none_of(refused: Iterable[tuple[str, str]], request: Request) -> PlanNotEligibleError:
    return PlanNotEligibleError(
        wrong(
            "regime",
            f"a plan that can serve {request.q_heads} heads of {request.head_dim} in "
            f"{request.dtype} on {request.arch.name}",
            "; ".join(f"{plan} ({reason})" for plan, reason in refused),
            'use "auto"',
        )
    )
