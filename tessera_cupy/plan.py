"""A plan: what one request does, and running it on the host or on a GPU."""

from __future__ import annotations

import math
import struct
from typing import Any

from tessera_cupy import gpus, interop, reference
from tessera_cupy.choice import eligible, not_eligible
from tessera_cupy.errors import PlanNotEligibleError, wrong
from tessera_cupy.explain import explain, summary
from tessera_cupy.kernels import catalog
from tessera_cupy.mapping import Tiles
from tessera_cupy.masks import BlockMask
from tessera_cupy.organization import Tasks
from tessera_cupy.output import check_apart, check_out
from tessera_cupy.prepared import Prepared
from tessera_cupy.request import ArraySpec, make_request


class Plan:
    """How one request is computed: mapping, organization and kernel, and their arrays.

    A plan belongs to one mask, one geometry and one architecture; it may be run any number of
    times, from any thread, on any arrays of that geometry. Made by
    :func:`tessera_cupy.make_plan`.

    Where the mask is over arrays on the GPU that runs it, blocks are uniform, KV is packed, Q is
    retained, split, merged or shared, and the organization is ``longest+split``, the GPU makes
    tiles and tasks too, and the host neither reads the mask nor waits. Elsewhere the host does
    it, once. :meth:`tiles` and :meth:`tasks` are always the host's, and equal to what the GPU
    makes.

    Attributes:
        request: sizes, dtype, layout and architecture.
        mask: the mask.
        spec: the plan's name, taken apart.
        config: the kernel of the catalog that runs it.
        choice: the regime that it came from, and what was passed over.
    """

    def __init__(self, mask: BlockMask, prepared: Prepared) -> None:
        """Use :func:`tessera_cupy.make_plan`."""
        self.mask = mask
        self.request = prepared.request
        self.spec = prepared.spec
        self.config = prepared.config
        self.choice = prepared.choice
        self._prepared = prepared

    def __repr__(self) -> str:
        r = self.request
        sizes = f"{r.batch}x{r.q_heads}x{r.sq}x{r.skv}x{r.head_dim} {r.dtype}"
        return f"Plan({self.spec.name}, {sizes}, {r.arch.name})"

    def tiles(self) -> Tiles:
        """The physical tiles, as NumPy arrays; mapped on the first call."""
        return self._prepared.tiles(self.mask)

    def tasks(self) -> Tasks:
        """The tasks in launch order, as NumPy arrays; organized on the first call."""
        return self._prepared.tasks(self.mask)

    def explain(self) -> str:
        """What the plan does and why, in a few lines of text."""
        return explain(self)

    def summary(self) -> dict[str, Any]:
        """The facts of :meth:`explain` as plain data, ready for JSON."""
        return summary(self)

    def update(self, mask: BlockMask) -> Plan:
        """The same plan for a mask of the same geometry with new contents.

        Raises:
            ValueError: the mask has another shape, or the plan's mapping cannot serve it.
        """
        r = self.request
        full = ArraySpec(r.q_shape, r.dtype)
        keys = ArraySpec(r.kv_shape, r.dtype)
        make_request(mask, full, keys, None, layout=r.layout, arch=r.arch, on_gpu=False)
        config, reason = eligible(self.spec, mask, r)
        if config is None:
            raise not_eligible(self.spec.name, reason, r)
        model = self._prepared.model
        return Plan(mask, Prepared(r, self.spec, config, model, self.choice, mask.version))

    def check(self) -> None:
        """Wait for what GPUs made of the plan so far, captures included, and look for errors.

        Nothing else reports a mask's errors where the plan's name was given by the caller: columns
        out of range and repeated ones are then left out of the attention. Without a run on a GPU
        the mask's contents are checked.

        The lists of fragments have room for every mask of the geometry, up to 64 MiB. In larger
        geometries whose mask the host has not counted (a plan given by name, or a captured graph),
        a mask may need more: the output is then NaN in every element, this method says so, the
        next run has more room, and a later one warns.

        Raises:
            ValueError: the mask is none.
            PlanOverflowError: lists needed more room than they had.
        """
        self._prepared.check(self.mask)

    def run(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        sm_scale: float | None = None,
        out: Any = None,
        return_lse: bool = False,
        stream: Any = None,
    ) -> Any:
        """Compute the attention, with :func:`tessera_cupy.block_sparse_attention`'s arguments.

        A CUDA graph can capture a run once the plan has run on that GPU: the first run copies
        the plan's arrays there and loads its kernels. A captured run reads the plan's arrays at
        each replay, as it does those passed here: keep the plan until the last replay is
        complete. Where the GPU makes the plan from its mask, so does each replay, from what the
        mask's arrays then hold; the memory for it stays with the mask.

        Raises:
            ValueError: arrays of another geometry, device or architecture than the plan's, or a
                capture before the plan's first run on the GPU.
        """
        scale = _scale(sm_scale, self.request.head_dim)
        for name, array in (("q", q), ("k", k), ("v", v)):
            interop.check_no_gradient(name, array)
        host = interop.on_host(q)
        for name, array in (("k", k), ("v", v)):
            if interop.on_host(array) != host:
                places = ("GPU", "host") if host else ("host", "GPU")
                raise ValueError(
                    wrong(
                        name,
                        f"an array in {places[1]} memory, like q",
                        f"one in {places[0]} memory",
                        "move both to one place",
                    )
                )
        made = make_request(
            self.mask,
            q,
            k,
            v,
            layout=self.request.layout,
            arch=self.request.arch,
            on_gpu=not host,
        )
        if made != self.request:
            raise ValueError(
                wrong(
                    "q, k, v",
                    f"the plan's {self.request.differences(made)}",
                    made.differences(self.request),
                    "make a new plan",
                )
            )
        if out is not None:
            check_out(out, q, self.request, on_gpu=not host)
        if host:
            return self._run_on_host(q, k, v, scale, out, return_lse)
        return self._run_on_gpu(q, k, v, scale, out, return_lse, stream)

    def _run_on_host(self, q: Any, k: Any, v: Any, scale: float, out: Any, return_lse: bool) -> Any:
        if out is not None:
            inputs = {n: interop.host_memory(x) for n, x in (("q", q), ("k", k), ("v", v))}
            check_apart(interop.host_memory(out), inputs)
        arrays = [interop.host_array(x) for x in (q, k, v)]
        result, lse = reference.execute(self, *arrays, sm_scale=scale, return_lse=True)
        result = interop.host_result(result, q, self.request.dtype)
        if out is not None:
            out[...] = result
            result = out
        if not return_lse:
            return result
        return result, interop.host_result(lse, q, "float32")

    def _run_on_gpu(
        self, q: Any, k: Any, v: Any, scale: float, out: Any, return_lse: bool, stream: Any
    ) -> Any:
        from tessera_cupy.kernels import launch

        r = self.request
        device = interop.device_of(q, "q")
        for name, array in (("k", k), ("v", v)):
            other = interop.device_of(array, name)
            if other != device:
                raise ValueError(
                    wrong(name, f"q's device {device}", f"device {other}", "move it there")
                )
        if self.mask.device not in (None, device):
            raise ValueError(
                wrong(
                    "mask",
                    f"a mask from the host or from q's device {device}",
                    f"a mask from device {self.mask.device}",
                    "build it on one of these",
                )
            )
        if gpus.arch_of(device) != r.arch:
            raise PlanNotEligibleError(
                wrong(
                    "q",
                    f"an array on a GPU of {r.arch.name}, which the plan is for",
                    f"a GPU of {gpus.arch_of(device).name}",
                    "make a plan for that architecture",
                )
            )
        source = self.mask.source
        operands_of = (q, k, v) if source is None else (q, k, v, source.values.owner)
        with interop.on_stream(stream, operands_of, device):
            given = {n: interop.device_operand(x, n) for n, x in (("q", q), ("k", k), ("v", v))}
            if out is not None:
                inputs = {name: interop.device_memory(operand) for name, operand in given.items()}
                check_apart(interop.device_memory(interop.device_operand(out, "out")), inputs)
            # First of all that allocates: a capture that comes too early is refused here.
            arrays = self._prepared.on_device(self.mask, device)
            operands = {name: interop.aligned(operand) for name, operand in given.items()}
            result = interop.empty(q, r.q_shape, r.dtype) if out is None else out
            lse = interop.empty(q, (r.batch, r.q_heads, r.sq), "float32") if return_lse else None
            launch.attend(
                self.config,
                catalog.merge_for(self.config),
                arrays,
                _tensor(operands["q"], r.layout),
                _tensor(operands["k"], r.layout),
                _tensor(operands["v"], r.layout),
                _tensor(interop.device_operand(result, "out"), r.layout),
                0 if lse is None else interop.device_operand(lse, "out").pointer,
                launch.Geometry(
                    batch=r.batch,
                    q_heads=r.q_heads,
                    kv_heads=r.kv_heads,
                    sq=r.sq,
                    skv=r.skv,
                    head_dim=r.head_dim,
                    dtype=r.dtype,
                    sm_scale=scale,
                    capacity=self._prepared.model.capacity,
                    device=device,
                ),
                [x.owner for name, x in operands.items() if x is not given[name]],
            )
            if out is None:
                result = interop.returned(result, q)
            return (result, interop.returned(lse, q)) if return_lse else result


def _scale(sm_scale: float | None, head_dim: int) -> float:
    if sm_scale is None:
        return 1.0 / math.sqrt(head_dim)
    try:
        # What the kernels compute in, so that float32 and float64 of a number do the same.
        scale = struct.unpack("f", struct.pack("f", sm_scale))[0]
    except (OverflowError, struct.error):
        scale = math.nan
    if not math.isfinite(scale):
        raise ValueError(
            wrong("sm_scale", "a finite float32 number", repr(sm_scale), "pass a float")
        )
    return float(scale)


def _tensor(operand: interop.Operand, layout: str) -> Any:
    from tessera_cupy.kernels.launch import Tensor

    batch, first, second, _ = operand.strides
    head, row = (first, second) if layout == "BHSD" else (second, first)
    return Tensor(operand.pointer, (batch, head, row))
