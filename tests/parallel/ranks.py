"""One rank of a test: ``python -m tests.parallel.ranks FOLDER NAME``, in torch's environment.

It runs the jobs of that name one after the other in one process group and writes what it found to
``FOLDER/RANK.pkl``: by job, ``("done", result)`` or ``("failed", error's type, text, seconds)``.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tessera_cupy import ArraySpec, BlockMask, parallel
from tests.parallel.cases import DIM, FOUR, TWO, Case, local

Job = Callable[[int], Any]


def tensors(case: Case, rank: int) -> list[torch.Tensor]:
    """The rank's q, k and v."""
    parts = [
        local(x, shards, rank, case.layout)
        for x, shards in zip(case.arrays(), (case.q, case.kv, case.kv), strict=True)
    ]
    return [torch.from_numpy(part).to(getattr(torch, case.dtype)) for part in parts]


def run_case(case: Case, scheme: Any) -> Job:
    def job(rank: int) -> Any:
        q, k, v = tensors(case, rank)
        out = parallel.attention(
            q,
            k,
            v,
            case.mask(),
            scheme=scheme,
            layout=case.layout,
            text=case.text,
            text_first=case.text_first,
            sm_scale=case.scale,
            timeout=60,
        )
        assert out.dtype == q.dtype
        assert out.shape == q.shape
        return out.float().numpy()

    return job


EVEN = Case("even", (32, 32))
EVEN_FOUR = Case("even", (16, 16, 16, 16))


def plan_twice(rank: int) -> Any:
    """A plan runs again, and on a subgroup whose ranks have other numbers."""
    case = EVEN_FOUR
    q, k, v = tensors(case, rank)
    plan = parallel.make_plan(case.mask(), q, k, v, scheme="ulysses", timeout=60)
    first, second = plan.run(q, k, v), plan.run(q, k, v)
    return bool((first == second).all()), first.numpy(), repr(plan)


def subgroup(rank: int) -> Any:
    """Two groups of two, each with a sequence of its own."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = groups[rank % 2]
    q, k, v = tensors(EVEN, rank // 2)
    out = parallel.attention(q, k, v, EVEN.mask(), group=mine, scheme="ring", timeout=60)
    return out.numpy()


def keeps_heads(rank: int) -> Any:
    """Heads stay with a mask that is almost alike, and move with another."""
    q = torch.zeros(1, 4, 32, DIM)
    deals = []
    plan = None
    for counts in ((16, 12, 8, 4), (16, 12, 9, 4), (16, 1, 1, 16)):
        keep = np.zeros((4, 4, 4), bool)
        for head, count in enumerate(counts):
            keep[head].flat[:count] = True
        mask = BlockMask.from_dense(keep, (16, 16))
        if plan is None:
            plan = parallel.make_plan(mask, q, scheme="ulysses", timeout=60)
        else:
            plan = plan.update(mask)
        plan.run(q, q, q)
        deals.append(plan.schedule.deal.q)
    return deals


def auto(rank: int) -> Any:
    q, k, v = tensors(EVEN, rank)
    plan = parallel.make_plan(EVEN.mask(), ArraySpec(q.shape, "float32"), timeout=60)
    out = parallel.attention(q, k, v, EVEN.mask(), timeout=60)
    return plan.schedule.degrees.name, out.numpy()


def call(rank: int, **changed: Any) -> Any:
    """A call with other arguments."""
    q, k, v = tensors(EVEN, rank)
    given = {"q": q, "k": k, "v": v, "mask": EVEN.mask(), "scheme": "ulysses", "timeout": 20}
    given.update({name: change(given.get(name)) for name, change in changed.items()})
    return parallel.attention(**given).numpy()


def on_rank_one(change: Callable[[Any], Any], name: str) -> Job:
    return lambda rank: call(rank, **({name: change} if rank == 1 else {}))


def everywhere(change: Callable[[Any], Any], name: str) -> Job:
    return lambda rank: call(rank, **{name: change})


def other_mask(mask: BlockMask) -> BlockMask:
    return BlockMask.from_dense(~mask.to_dense(), mask.block_size, mask.shape)


BAD: dict[str, Job] = {
    "bad shape on one": on_rank_one(lambda q: q[0], "q"),
    "numpy on one": on_rank_one(lambda v: v.numpy(), "v"),
    "gradient on one": on_rank_one(lambda k: k.clone().requires_grad_(), "k"),
    "other dtype on one": on_rank_one(lambda k: k.double(), "k"),
    "other mask on one": on_rank_one(other_mask, "mask"),
    "other scheme on one": on_rank_one(lambda _: "ring", "scheme"),
    "other heads on one": lambda rank: call(
        rank, **{name: lambda x: x[:, :2] for name in ("q", "k", "v") if rank == 1}
    ),
    "scheme of no name": everywhere(lambda _: "star", "scheme"),
    "degrees of another group": everywhere(lambda _: (2, 2), "scheme"),
    "no time": everywhere(lambda _: 0, "timeout"),
    "mask of another length": everywhere(
        lambda _: BlockMask.from_dense(np.ones((5, 4), bool), (16, 16)), "mask"
    ),
    "no mask": everywhere(lambda _: None, "mask"),
    "too much text": everywhere(lambda _: 40, "text"),
    "too few heads": everywhere(lambda _: 1, "most_heads"),
    "no group": everywhere(lambda _: "everyone", "group"),
    "fine afterwards": lambda rank: call(rank),
}


def failing_kernel(rank: int) -> Any:
    """Rank 1's own attention fails, when the others wait for what it has to send."""
    if rank == 1:

        def broken(*_: Any, **__: Any) -> Any:
            raise MemoryError("no room for the tiles")

        parallel.local.block_sparse_attention = broken  # type: ignore[attr-defined]
    return call(rank, timeout=lambda _: 3)


def plan_and_wrong_run(rank: int) -> Any:
    q, k, v = tensors(EVEN, rank)
    plan = parallel.make_plan(EVEN.mask(), q, k, v, scheme="ulysses", timeout=3)
    return plan.run(q[:, :, :1] if rank == 1 else q, k, v)


def killed(scheme: Any, when: int) -> Job:
    """Rank 2 is killed, before it has sent anything or at a later request."""

    def job(rank: int) -> Any:
        case = Case("kill", (16, 16, 16, 16), density=1.0)
        q, k, v = tensors(case, rank)
        mask = BlockMask.from_dense(np.ones((4, 4), bool), (16, 16))
        plan = parallel.make_plan(mask, q, k, v, scheme=scheme, timeout=3)
        if rank == 2:
            from tessera_cupy.parallel import transfers

            serve, count = transfers._serve, 0

            def dying(*given: Any) -> Any:
                nonlocal count
                count += 1
                if count > when:
                    os.kill(os.getpid(), signal.SIGKILL)
                return serve(*given)

            transfers._serve = dying
        return plan.run(q, k, v)

    return job


def late(rank: int) -> Any:
    """Rank 0 does not come."""
    if rank == 0:
        time.sleep(3.5)
        return None
    return call(rank, timeout=lambda _: 1.5)


def jobs(name: str) -> dict[str, Job]:
    """The jobs of a name."""
    if name in ("two", "four"):
        made = {
            f"{case.name}, {scheme}": run_case(case, scheme)
            for case in (TWO if name == "two" else FOUR)
            for scheme in case.schemes
        }
        if name == "two":
            return {**made, "auto": auto, "keeps heads": keeps_heads, **BAD}
        return {**made, "plan twice": plan_twice, "subgroup": subgroup}
    return {
        "failing": {"failing": failing_kernel},
        "wrong-run": {"wrong-run": plan_and_wrong_run},
        "late": {"late": late},
        "killed-ulysses": {"killed-ulysses": killed("ulysses", 0)},
        "killed-back": {"killed-back": killed("ulysses", 1)},
        "killed-ring": {"killed-ring": killed("ring", 2)},
        "killed-hybrid": {"killed-hybrid": killed((2, 2), 1)},
    }[name]


def main() -> None:
    folder, name = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    found: dict[str, Any] = {}
    for job, work in jobs(name).items():
        begin = time.monotonic()
        try:
            found[job] = ("done", work(rank))
        except Exception as error:
            seconds = time.monotonic() - begin
            found[job] = ("failed", type(error).__name__, str(error), seconds)
    (folder / f"{rank}.pkl").write_bytes(pickle.dumps(found))
    if len(found) > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
