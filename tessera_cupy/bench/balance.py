"""How even heads lie on ranks, for masks of every family and rule: counted, not measured.

Work is pairs of tokens in active blocks. Masks are from a clip, on small grids: families on that of
SPADE, each rule on its own small one, where the NumPy code takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tessera_cupy.bench.corpus import NAMES, Source, stream
from tessera_cupy.bench.rules import RULES
from tessera_cupy.bench.sheet import NONE, Sheet
from tessera_cupy.errors import MissingExtraError, wrong
from tessera_cupy.masks.key_slices import block_mask
from tessera_cupy.parallel.heads import deal, even_deal, head_work

#: Name of the table's markers.
NAME = "parallel-balance"


def count_balance(
    *,
    heads: Sequence[int],
    ranks: Sequence[int],
    clip: str,
    names: Sequence[str] = NAMES,
    on_mask: Callable[[str], None] = lambda name: None,
) -> dict[str, Any]:
    """Deal the heads of each mask to ranks, and compare with the even split by count.

    Args:
        heads: numbers of heads.
        ranks: numbers of ranks.
        clip: one of :data:`tessera_cupy.bench.clips.CLIPS`.
        names: of :data:`tessera_cupy.bench.corpus.NAMES`.
        on_mask: called with each name that is done.

    Returns:
        JSON-able: what was asked for, and in ``rows`` for each mask its name, grid, density, and
        ``cases``: heads, ranks, and the largest work over the mean, ``dealt`` by work and ``even``
        by count; or the ``reason`` why not.

    Raises:
        ValueError: no heads or ranks.
    """
    checked_numbers(heads=heads, ranks=ranks)
    rows = []
    for name in names:
        rows.append(_row(name, heads, ranks, clip))
        on_mask(name)
    return {"heads": list(heads), "ranks": list(ranks), "clip": clip, "rows": rows}


def checked_numbers(**numbers: Sequence[int]) -> None:
    """Refuse numbers of heads or ranks that are none.

    Raises:
        ValueError: an empty list, or a number below 1.
    """
    for name, given in numbers.items():
        if not given or min(given) < 1:
            raise ValueError(wrong(name, "numbers of at least 1", list(given), "pass some"))


def _row(name: str, heads: Sequence[int], ranks: Sequence[int], clip: str) -> dict[str, Any]:
    rule = RULES.get(name, RULES["spade"])
    found: dict[str, Any] = {"mask": name, "grid": str(rule.small)}
    work, density = [], []
    try:
        for sample in stream([Source(clip, rule.small, max(heads), rule.head_dim)], [name]):
            mask = block_mask(sample.selection.mask).on_host()
            work.append(float(head_work(mask, 1)[0]))
            density.append(mask.density())
    except MissingExtraError as error:
        return {**found, "reason": str(error)}
    cases = []
    for count in heads:
        for size in ranks:
            cases.append(
                {
                    "heads": count,
                    "ranks": size,
                    "dealt": deal(work[:count], size).balance(work[:count]),
                    "even": even_deal(count, size).balance(work[:count]),
                }
            )
    return {**found, "density": float(np.mean(density)), "cases": cases}


def columns_of(found: Mapping[str, Any]) -> tuple[list[tuple[int, int]], list[str]]:
    """The (heads, ranks) of a table on balance, and the titles of its columns."""
    cases = [(heads, ranks) for heads in found["heads"] for ranks in found["ranks"]]
    return cases, ["mask", "density", *(f"{heads} heads, {ranks} ranks" for heads, ranks in cases)]


def balance_sheet(found: dict[str, Any]) -> Sheet:
    """The table: for each number of heads and ranks dealt by work, and split by count."""
    cases, columns = columns_of(found)
    rows = []
    for row in found["rows"]:
        if "reason" in row:
            rows.append([row["mask"], *[NONE] * (len(columns) - 1)])
            continue
        by_case = {(case["heads"], case["ranks"]): case for case in row["cases"]}
        cells = [f"{by_case[case]['dealt']:.3f} ({by_case[case]['even']:.3f})" for case in cases]
        rows.append([row["mask"], f"{row['density']:.3f}", *cells])
    grids = sorted({row["grid"] for row in found["rows"]})
    return Sheet(
        NAME,
        "Counted, not measured: work of the busiest rank over the mean, heads dealt by their work "
        "(and in equal numbers of neighbours)",
        columns,
        rows,
        [
            f"Masks regenerated from {found['clip']}.mp4, on small grids: {', '.join(grids)}",
        ],
        frozenset({"mask"}),
    )
