"""Made-up measurements, with times that are written down."""

from tessera_cupy.regimes import Features, PlanSpec
from tessera_cupy.regimes.measurements import Case, Measurements, PlanTime

SHARE = PlanSpec.parse("attend_wgmma/q128k192/share-pack/longest+split")
GATHER = PlanSpec.parse("attend_wgmma/q128k192/share-gather/longest+split")
MERGE = PlanSpec.parse("attend_wgmma/q128k192/merge-pack/longest+split")
RETAIN = PlanSpec.parse("attend_mma/q64k64/retain-pack/longest+split")
REGROUP = PlanSpec.parse("attend_wgmma/q128k192/regroup-pack/longest+split")


def features(**changes):
    given = {
        "block_q": 64,
        "block_kv": 64,
        "ragged": False,
        "token_bits": False,
        "dtype": "bfloat16",
        "head_dim": 128,
        "layout": "BHSD",
        "heads": 8,
        "tokens": 32760,
        "density": 0.1,
        "run_coverage": 0.8,
        "slices": False,
    }
    return Features(**{**given, **changes})


def case(times, number=0, source="bikes layer 0", states=None, **changes):
    """A case with times by plan, and states of plans that have none."""
    timings = [PlanTime(plan, "timed", ms, ms, ms) for plan, ms in times.items()]
    timings += [PlanTime(plan, state, note="because") for plan, state in (states or {}).items()]
    return Case(f"case {number}", source, features(**changes), tuple(timings))


def measured(cases, arch="sm90", provenance="measured"):
    made = ("Measured by a test on 2026-11-30.",)
    return Measurements(arch, provenance, "A GPU", "0123456789ab", made, tuple(cases))


def crossing(count=128, edge=0.3, sources=4):
    """Share wins below a density, merge from it on, by a factor of 2 each time."""
    cases = []
    for number in range(count):
        density = (number + 1) / (count + 1)
        fast, slow = (SHARE, MERGE) if density < edge else (MERGE, SHARE)
        # Neighbours are of different sources, so that none lacks a range of densities.
        source = f"bikes layer {number % sources}"
        times = {fast: 1.0, slow: 2.0, RETAIN: 3.0}
        cases.append(case(times, number, source, density=density))
    return measured(cases)
