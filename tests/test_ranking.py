"""What a plan says of the table that it came from, and of the plans before and behind it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tessera_cupy import ArraySpec, BlockMask, PlanSpec, Table, gpus, make_plan
from tessera_cupy.kernels.arch import ARCHS, Arch, get_arch
from tessera_cupy.kernels.catalog import fingerprint
from tessera_cupy.plan import Plan
from tessera_cupy.ranking import archs_of, is_current
from tessera_cupy.regimes import load_for

MASK = BlockMask.from_dense(np.tri(5, dtype=bool), (64, 64))
SPEC = ArraySpec((1, 1, 320, 128), "bfloat16")
BASE = tuple(PlanSpec.parse(f"attend_mma/q64k64/{how}-pack/rows") for how in ("retain", "split"))


def table(name: str = "sm80", **changes: Any) -> Table:
    """The reasoned keys of a shipped table, with other facts."""
    document = load_for(name).document
    facts = {"provenance": "default", "device": None, "catalog": None, "raw_data": None}
    return Table(
        replace(document, **{**facts, "keys": document.reasoned, "reasoned": (), **changes})
    )


def measured(name: str = "sm80", **changes: Any) -> Table:
    catalog = fingerprint(archs_of(name)[0].name)
    facts = {"provenance": "measured", "device": "NVIDIA A100", "catalog": catalog, "raw_data": "1"}
    return table(name, **{**facts, **changes})


def plan(regime: Any = "auto", arch: str = "sm_80", mask: BlockMask = MASK) -> Plan:
    spec = replace(SPEC, shape=(1, 1, mask.shape[0], 128))
    return make_plan(mask, spec, regime=regime, arch=arch)


def line(text: str, title: str) -> str:
    (found,) = [part for part in text.splitlines() if part.startswith(f"{title} ")]
    return found.removeprefix(title).strip()


def test_defaults_say_that_nothing_was_measured() -> None:
    text = line(plan(table()).explain(), "table")
    assert text == "sm80.yaml: reasoned, not measured; for every GPU of compute capability 8.0, 8.7"


def test_a_measured_table_says_where_and_how_often() -> None:
    document = load_for("sm80").document
    key = next(k for k in document.keys if k.match.mask is None and 64 in k.match.block_q)
    assert not {key.match.dtype, key.match.layout} - {None}
    keys = tuple(
        replace(k, cases=41, regimes=tuple(replace(r, cases=None) for r in k.regimes))
        for k in document.keys
    )
    text = line(plan(measured(keys=keys)).explain(), "table")
    assert text == (
        "sm80.yaml: measured on NVIDIA A100; for every GPU of compute capability 8.0, 8.7; "
        "41 cases behind this ranking"
    )
    modelled = table(provenance="model", device="A100")
    assert "yaml: from a cost model of A100; for" in line(plan(modelled).explain(), "table")


def test_a_reasoned_key_of_a_measured_table_says_so() -> None:
    document = load_for("sm80").document
    never = replace(document.keys[0], match=replace(document.keys[0].match, dtype="float16"))
    found = plan(measured(keys=(never,), reasoned=document.keys))
    assert found.choice.regime.startswith("sm80 reasoned q33-64 ")
    assert line(found.explain(), "table").endswith("capability 8.0, 8.7; this key is reasoned")
    assert found.summary()["table"]["origin"] == "reasoned"


def test_base_plans_of_a_measured_table_say_so() -> None:
    found = plan(measured(keys=(), base=BASE))
    assert line(found.explain(), "regime") == "sm80 base (no key for q64k64 d128 bfloat16 BHSD)"
    assert line(found.explain(), "table").endswith("; nothing behind the base plans")
    assert "base plans" not in line(plan(table(keys=(), base=BASE)).explain(), "table")


def test_a_table_measured_on_other_kernels_is_used_and_says_so() -> None:
    old = plan(measured(catalog="0a1b2c"))
    assert old.spec == plan(table()).spec
    now = fingerprint("sm_80")
    assert line(old.explain(), "table").endswith(
        f"; the kernels have changed since (catalog 0a1b2c, now {now})"
    )
    assert old.summary()["table"]["current"] is False
    new = plan(measured())
    assert "changed" not in new.explain()
    assert new.summary()["table"]["current"] is True


def test_one_of_the_architectures_of_a_table_was_measured(monkeypatch: Any) -> None:
    two = archs_of("sm89")
    assert [arch.name for arch in two] == ["sm_86", "sm_89"]
    document = measured("sm89", catalog="b").document

    def other(arch: str) -> str:
        return {"sm_86": "a", "sm_89": "b"}[arch]

    monkeypatch.setattr("tessera_cupy.ranking.fingerprint", other)
    assert is_current(document, two)
    assert not is_current(document, two[:1])
    assert not is_current(replace(document, catalog="c"), two)
    assert is_current(replace(document, catalog=None), two)
    text = plan(Table(document), arch="sm_86").explain()
    assert line(text, "table").endswith("; its kernels differ from those of sm_86")
    assert "differ" not in plan(Table(document), arch="sm_89").explain()


def test_a_table_of_other_gpus_says_so() -> None:
    strange = line(plan(load_for("sm80"), "sm_90a").explain(), "table")
    assert strange.endswith("; made for other GPUs than those of sm_90a")
    text = line(plan(table(arch="mine")).explain(), "table")
    assert text.endswith("; for no GPU by itself")


class Gpu:
    """A driver's view of one GPU, as CuPy gives it."""

    def __init__(self, name: bytes, capability: tuple[int, int]) -> None:
        major, minor = capability
        self.cuda = self.runtime = self
        self.found = {"name": name, "major": major, "minor": minor}

    def getDeviceProperties(self, device: int) -> dict[str, Any]:
        return self.found


@pytest.mark.parametrize(
    ("name", "capability", "expected"),
    [
        (b"NVIDIA A100-SXM4-80GB", (8, 0), "sm80"),
        (b"Orin", (8, 7), "sm80"),
        (b"NVIDIA of next year", (9, 0), "sm90"),
        (b"", (8, 6), "sm89"),
    ],
)
def test_unknown_gpus_of_a_known_family_take_its_table(
    name: bytes, capability: tuple[int, int], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus.interop, "import_cupy", lambda: Gpu(name, capability))
    gpus.arch_of.cache_clear()
    found: Arch = gpus.arch_of(0)
    gpus.arch_of.cache_clear()
    assert found.table == expected
    major, minor = capability
    made = plan(arch=f"sm_{major}{minor}")
    assert made.request.arch is found
    text = line(made.explain(), "table")
    assert text.startswith(f"{expected}.yaml: ")
    assert f"{major}.{minor}" in text.partition("compute capability ")[2]


def test_every_table_names_the_gpus_that_it_serves() -> None:
    text = line(plan(table(), arch="sm_87").explain(), "table")
    assert text.endswith("for every GPU of compute capability 8.0, 8.7")
    for arch in ARCHS:
        assert get_arch(arch) in archs_of(get_arch(arch).table)


def test_the_ranking_is_complete_and_says_which_plan_it_is() -> None:
    names = [f"attend_mma/{n}/rows" for n in ("q64k64/merge-pack", "q192k64/retain-pack")]
    ranked = tuple(PlanSpec.parse(n) for n in names) + BASE
    made = plan(table(keys=(), base=ranked))
    assert made.spec == BASE[0]
    text = made.explain()
    rows = text[text.index("ranking ") :].splitlines()
    assert [row[14:] for row in rows] == [
        f"1. {names[0]}: passed over, since {made.choice.passed_over[0][1]}",
        f"2. {names[1]}: passed over, since {made.choice.passed_over[1][1]}",
        f"3. {BASE[0].name}: this plan",
        f"4. {BASE[1].name}",
    ]
    assert "no attend_mma kernel" in rows[1]
    s = made.summary()
    assert (s["ranking"], s["position"]) == ([p.name for p in ranked], 3)


def test_a_named_plan_has_no_table_and_no_ranking() -> None:
    made = plan(BASE[0])
    titles = [row[:14].strip() for row in made.explain().splitlines()]
    assert not {"table", "ranking"} & set(titles)
    s = made.summary()
    assert (s["table"], s["ranking"], s["position"]) == (None, [], None)


@pytest.mark.parametrize(
    ("rows", "regime", "share"),
    [
        # 5 x 5 of 64 x 64: five tiles of 64 rows by five steps are all pairs, once.
        (np.ones((5, 5)), "attend_mma/q64k64/retain-retain/rows", 1.0),
        # Two steps of 192 columns for 320 keys; the sixth half of 64 rows has no part in any.
        (np.ones((5, 5)), "attend_wgmma/q128k192/share-pack/rows", 320 * 384 / 320**2),
        (np.tri(5), "attend_mma/q64k64/retain-retain/rows", 15 / 25),
    ],
)
def test_a_plan_that_saves_nothing_says_so(rows: Any, regime: str, share: float) -> None:
    mask = BlockMask.from_dense(rows.astype(bool), (64, 64))
    made = plan(regime, "sm_90a", mask)
    assert made.summary()["issued_of_dense"] == pytest.approx(share)
    rows_of_text = [r for r in made.explain().splitlines() if r.startswith("dense ")]
    expected = f"{share:.2f} times the pairs of dense attention issued: no work saved"
    assert [r[14:] for r in rows_of_text] == ([expected] if share >= 1 else [])
