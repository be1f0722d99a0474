"""All ranks of all tests: ``python -m tests.parallel.ranks FOLDER``.

One process loads torch and forks the ranks of one group after the other, as torchrun would start
them. They run the group's jobs in one process group, and write what they found to
``FOLDER/GROUP-RANK.pkl``: by job, ``("done", result)`` or ``("failed", error's type, text,
seconds)``.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tessera_cupy import ArraySpec, BlockMask, parallel
from tessera_cupy.parallel import exchange
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


def ended_group(rank: int) -> Any:
    """A group that is destroyed is gone, with its threads, though its plan lives."""

    def threads() -> int:
        names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
        return sum("gloo_runloop" in name for name in names)

    before = threads()
    group = dist.new_group(list(range(dist.get_world_size())))
    q, k, v = tensors(EVEN, rank)
    plan = parallel.make_plan(EVEN.mask(), q, k, v, scheme="ulysses", group=group, timeout=60)
    plan.run(q, k, v)
    parallel.attention(q, k, v, EVEN.mask(), scheme="ring", group=group, timeout=60)
    more = threads()
    dist.barrier()
    dist.destroy_process_group(group)
    del group
    after = threads()
    try:
        plan.run(q, k, v)
    except ValueError as error:
        return before, more, after, str(error)
    return before, more, after, "ran"


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


def other_mask_later(rank: int) -> Any:
    """Rank 1 passes another mask when rank 0 has a plan for its own already."""
    mask = EVEN.mask()
    call(rank, mask=lambda _: mask)
    return call(rank, mask=lambda _: other_mask(mask) if rank == 1 else mask)


BAD: dict[str, Job] = {
    "bad shape on one": on_rank_one(lambda q: q[0], "q"),
    "numpy on one": on_rank_one(lambda v: v.numpy(), "v"),
    "gradient on one": on_rank_one(lambda k: k.clone().requires_grad_(), "k"),
    "other dtype on one": on_rank_one(lambda k: k.double(), "k"),
    "other mask on one": on_rank_one(other_mask, "mask"),
    "other mask on one, later": other_mask_later,
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


#: Cases, and in how many turns they run.
TURNS = (
    (EVEN, (1, 2)),
    (Case("uneven, text", (32, 17), heads=5, kv_heads=5, text=11, layout="BSHD"), (1, 2, 3)),
    (Case("grouped", (33, 31), heads=6, kv_heads=3, batch=2), (1, 2)),
    (Case("bfloat16", (40, 30), heads=7, kv_heads=7, dtype="bfloat16"), (1, 2, 3, 4)),
)


def turns(rank: int) -> Any:
    """By case, whether turns give the bits of one, twice, and again with messages as they are."""
    same = []
    packed = exchange.LEAST_MESSAGE
    for case, counts in TURNS:
        given = tensors(case, rank)
        plan = parallel.make_plan(
            case.mask(), *given, scheme="ulysses", layout=case.layout, text=case.text, timeout=60
        )
        once = plan.run(*given)
        several = [plan.with_turns(count) for count in counts]
        runs = [one.run(*given) for one in (*several, *several)]
        exchange.LEAST_MESSAGE = 0.0
        runs += [one.run(*given) for one in (plan, *several)]
        exchange.LEAST_MESSAGE = packed
        same.append(all(bool((once == out).all()) for out in runs))
    return same


def turns_of_a_deal(rank: int) -> Any:
    """Turns stay with another deal; what cannot be is refused."""
    q, k, v = tensors(EVEN, rank)
    plan = parallel.make_plan(EVEN.mask(), q, k, v, scheme="ulysses", timeout=60).with_turns(2)
    other = plan.with_deal(parallel.Deal(((0, 1), (2, 3))))
    refused = []
    ring = parallel.make_plan(EVEN.mask(), q, k, v, scheme="ring", timeout=60)
    for one, count in ((plan, 3), (plan, 0), (ring, 2)):
        try:
            one.with_turns(count)
        except ValueError as error:
            refused.append(str(error))
    return other.schedule.turns, bool((other.run(q, k, v) == plan.run(q, k, v)).all()), refused


def failing_turn(rank: int) -> Any:
    """Rank 1's attention fails in its second turn of three, while the third one moves."""
    case = TURNS[-1][0]
    given = tensors(case, rank)
    plan = parallel.make_plan(case.mask(), *given, scheme="ulysses", timeout=3).with_turns(3)
    if rank == 1:
        whole, calls = parallel.local.block_sparse_attention, iter(range(3))

        def broken(*given: Any, **more: Any) -> Any:
            if next(calls) == 1:
                raise MemoryError("no room for the tiles")
            return whole(*given, **more)

        parallel.local.block_sparse_attention = broken  # type: ignore[attr-defined]
    return plan.run(*given)


def plan_and_wrong_run(rank: int) -> Any:
    q, k, v = tensors(EVEN, rank)
    plan = parallel.make_plan(EVEN.mask(), q, k, v, scheme="ulysses", timeout=3)
    return plan.run(q[:, :, :1] if rank == 1 else q, k, v)


def killed(scheme: Any, when: int, victim: int, turns: int = 1) -> Job:
    """A rank is killed, before it has sent anything or at a later request."""

    def job(rank: int) -> Any:
        size = dist.get_world_size()
        q = torch.ones(1, 4, 16, DIM)
        mask = BlockMask.from_dense(np.ones((size, size), bool), (16, 16))
        plan = parallel.make_plan(mask, q, scheme=scheme, timeout=2)
        if turns > 1:
            plan = plan.with_turns(turns)
        if rank == victim:
            from tessera_cupy.parallel import transfers

            serve, count = transfers._serve, 0

            def dying(*given: Any) -> Any:
                nonlocal count
                count += 1
                if count > when:
                    os.kill(os.getpid(), signal.SIGKILL)
                return serve(*given)

            transfers._serve = dying
        return plan.run(q, q, q)

    return job


def late(rank: int) -> Any:
    """Rank 0 does not come."""
    if rank == 0:
        time.sleep(3.5)
        return None
    return call(rank, timeout=lambda _: 1.5)


def of_cases(cases: Iterable[Case]) -> dict[str, Job]:
    return {
        f"{case.name}, {scheme}": run_case(case, scheme)
        for case in cases
        for scheme in case.schemes
    }


#: By name of a group, how many ranks it has and what they do; a failure is the end of a group.
GROUPS: dict[str, tuple[int, dict[str, Job]]] = {
    "two": (
        2,
        {
            **of_cases(TWO),
            "auto": auto,
            "keeps heads": keeps_heads,
            "ended group": ended_group,
            "turns": turns,
            "turns of a deal": turns_of_a_deal,
            **BAD,
        },
    ),
    "four": (4, {**of_cases(FOUR), "plan twice": plan_twice, "subgroup": subgroup}),
    "failing": (2, {"": failing_kernel}),
    "failing-turn": (2, {"": failing_turn}),
    "wrong-run": (2, {"": plan_and_wrong_run}),
    "late": (2, {"": late}),
    "killed-ulysses": (4, {"": killed("ulysses", 0, 2)}),
    "killed-back": (3, {"": killed("ulysses", 2, 2)}),
    "killed-turn": (2, {"": killed("ulysses", 3, 1, turns=2)}),
    "killed-ring": (4, {"": killed("ring", 2, 2)}),
    "killed-hybrid": (4, {"": killed((2, 2), 1, 2)}),
    "killed-first": (2, {"": killed("ulysses", 0, 0)}),
}


def run_rank(folder: Path, name: str, rank: int) -> None:
    """What one process does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    found: dict[str, Any] = {}
    for job, work in GROUPS[name][1].items():
        begin = time.monotonic()
        try:
            found[job] = ("done", work(rank))
        except Exception as error:
            seconds = time.monotonic() - begin
            found[job] = ("failed", type(error).__name__, str(error), seconds)
    (folder / f"{name}-{rank}.pkl").write_bytes(pickle.dumps(found))
    if len(found) > 1:
        dist.barrier()
        dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def fork_ranks(folder: Path, name: str) -> None:
    """Run a group to its end."""
    size = GROUPS[name][0]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), WORLD_SIZE=str(size))
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
            try:
                run_rank(folder, name, rank)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


def main() -> None:
    for name in GROUPS:
        begin = time.monotonic()
        fork_ranks(Path(sys.argv[1]), name)
        print(f"{name}: {time.monotonic() - begin:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
