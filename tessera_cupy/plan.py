"""A plan: what one request does, and running it on the host or on a GPU."""

from __future__ import annotations

import math
import struct
from typing import Any

from tessera_cupy import gpus, interop, reference
from tessera_cupy.call import Call, checked
from tessera_cupy.choice import eligible
from tessera_cupy.errors import PlanNotEligibleError, wrong
from tessera_cupy.explain import explain, summary
from tessera_cupy.kernels import launch
from tessera_cupy.mapping import Tiles
from tessera_cupy.masks import BlockMask, KeySlices
from tessera_cupy.masks.key_slices import block_mask
from tessera_cupy.organization import Tasks
from tessera_cupy.output import check_apart
from tessera_cupy.prepared import Prepared
from tessera_cupy.profile import Profile, Stages, median
from tessera_cupy.request import ArraySpec, make_request
from tessera_cupy.timeline import Timeline, measure

_SIZES = ("batch", "q_heads", "kv_heads", "sq", "skv", "head_dim")


class Plan:
    """How one request is computed: mapping, organization and kernel, and their arrays.

    A plan belongs to one mask, one geometry and one architecture; it may be run any number of
    times, from any thread, on any arrays of that geometry. Made by
    :func:`tessera_cupy.make_plan`.

    Where the mask is over arrays on the GPU that runs it, KV is packed or, of key slices, gathered,
    Q is retained, split, merged or shared, and the organization is ``longest+split``, the GPU makes
    tiles and tasks too, and the host neither reads the mask nor waits. Elsewhere the host does it,
    once. :meth:`tiles` and :meth:`tasks` are always the host's, and equal to what the GPU makes,
    which besides numbers tiles without rows (of absent query blocks), that have no tasks, and has
    other places in ``rows`` for gathered keys.

    Attributes:
        request: sizes, dtype, layout and architecture.
        mask: the mask.
        spec: the plan's name, taken apart.
        config: the kernel of the catalog that runs it.
        choice: the regime that it came from, and what was passed over.
        model: the GPU that the tasks are organized for.
    """

    def __init__(self, mask: BlockMask, prepared: Prepared) -> None:
        """Use :func:`tessera_cupy.make_plan`."""
        self.mask = mask
        self.request = prepared.request
        self.spec = prepared.spec
        self.config = prepared.config
        self.choice = prepared.choice
        self.model = prepared.model
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

    def update(self, mask: BlockMask | KeySlices) -> Plan:
        """The same plan for a mask of the same geometry with new contents.

        Raises:
            ValueError: the mask has another shape.
            PlanNotEligibleError: (a ValueError) the plan's mapping cannot serve it, or no kernel
                with its tiles reads token bits, which the mask has and the plan's has not.
        """
        mask = block_mask(mask)
        r = self.request
        full = ArraySpec(r.q_shape, r.dtype)
        keys = ArraySpec(r.kv_shape, r.dtype)
        make_request(mask, full, keys, None, layout=r.layout, arch=r.arch, on_gpu=False)
        config, reason = eligible(self.spec, mask, r)
        if config is None:
            expected = f"one that the plan, {self.spec.name}, can serve"
            fix = "make a plan for this mask with make_plan"
            raise PlanNotEligibleError(
                wrong("mask", expected, f"one that it cannot: {reason}", fix)
            )
        model = self.model
        return Plan(mask, Prepared(r, self.spec, config, model, self.choice, mask.version))

    def check(self) -> None:
        """Wait for what GPUs made of the plan so far, captures included, and look for errors.

        Nothing else reports a mask's errors where the plan's name was given by the caller: columns
        out of range and repeated ones are then left out of the attention. Without a run on a GPU
        the mask's contents are checked.

        The lists of fragments have room for every mask of the geometry, up to 256 MiB. In larger
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
        call = self._checked(q, k, v, out)
        return self.run_checked(call, q, k, v, sm_scale, out, return_lse, stream)

    def profile(self, q: Any, k: Any, v: Any, *, runs: int = 7) -> Profile:
        """Where the time of a request with this plan goes, on the current stream of q's framework.

        Waits for the GPU. Each run makes the plan anew and computes the attention.

        Args:
            q: an array on a GPU, as for :meth:`run`.
            k: the same.
            v: the same.
            runs: how many runs the medians are of.

        Returns:
            Milliseconds of each part; as text a table of them.

        Raises:
            ValueError: arrays in host memory, or as in :meth:`run`; a stream that is capturing.
        """
        r = self.request
        call, device = self._checked_on_gpu(q, k, v)
        prepared, scale = self._prepared, checked_scale(None, r.head_dim)
        with interop.on_stream(None, (q, k, v), device):
            launch.refuse_capture()
            import cupy

            plan = prepared.on_device(self.mask, device)
            result = interop.empty(q, r.q_shape, r.dtype)
            packed, copies = self.pack(q, k, v, result, scale, plan.slot_log2, call, None)
            made_there = prepared.makes(self.mask, device)
            times = []
            for _ in range(1 + runs):
                # Keeps the GPU busy while the host queues what is timed.
                launch.attend(packed, plan, 0, copies)
                stages = Stages(cupy.cuda.get_current_stream())
                if made_there:
                    plan = prepared.make(self.mask, device, stages.mark)
                launch.attend(packed, plan, 0, copies, stages.mark)
                times.append(stages.ms())
            host = {} if made_there else prepared.host_ms(self.mask)
        return median(times[1:], on_gpu=made_there, select=prepared.select_ms, **host)

    def timeline(self, q: Any, k: Any, v: Any, *, runs: int = 7) -> Timeline:
        """When and where each task of the attention runs, on the current stream of q's framework.

        Waits for the GPU. Kernels that keep time of their tasks run in place of the usual ones:
        they compute the same, and are compiled when they are first asked for, in seconds. The times
        are those of the run of the median length.

        Args:
            q: an array on a GPU, as for :meth:`run`.
            k: the same.
            v: the same.
            runs: how many runs there are.

        Returns:
            The multiprocessor, begin, end and work of each task; how even the load was.

        Raises:
            ValueError: arrays in host memory, or as in :meth:`run`; no runs; a stream that is
                capturing.
            KernelMissingError: ``TESSERA_NO_JIT`` forbids compiling such a kernel.
        """
        r = self.request
        if runs < 1:
            raise ValueError(wrong("runs", "at least 1", runs, "leave it out for 7"))
        call, device = self._checked_on_gpu(q, k, v)
        scale = checked_scale(None, r.head_dim)
        with interop.on_stream(None, (q, k, v), device):
            launch.refuse_capture()
            plan = self._prepared.on_device(self.mask, device)
            result = interop.empty(q, r.q_shape, r.dtype)
            packed, copies = self.pack(q, k, v, result, scale, plan.slot_log2, call, None)
            gpu, sms = gpus.name_of(device), gpus.multiprocessors(device)
            return measure(packed, plan, copies, runs=runs, gpu=gpu, sms=sms)

    def run_checked(
        self,
        call: Call,
        q: Any,
        k: Any,
        v: Any,
        sm_scale: float | None,
        out: Any,
        return_lse: bool,
        stream: Any,
    ) -> Any:
        """:meth:`run` for arrays that were checked, and that are of the plan's request."""
        scale = checked_scale(sm_scale, self.request.head_dim)
        if call.device is None:
            return self._run_on_host(q, k, v, scale, out, return_lse)
        return self._run_on_gpu(call, q, k, v, scale, out, return_lse, stream)

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
        self,
        call: Call,
        q: Any,
        k: Any,
        v: Any,
        scale: float,
        out: Any,
        return_lse: bool,
        stream: Any,
    ) -> Any:
        device = call.device
        assert device is not None
        self._check_device(device)
        source = self.mask.source
        if stream is None and call.of_cupy and (source is None or _of_cupy(source.arrays[0])):
            import cupy

            if cupy.cuda.runtime.getDevice() == device:
                # All goes with CuPy's current stream, which is the device's already.
                return self._launch(call, device, q, k, v, scale, out, return_lse)
        arrays = (q, k, v) if source is None else (q, k, v, source.arrays[0])
        with interop.on_stream(stream, arrays, device):
            return self._launch(call, device, q, k, v, scale, out, return_lse)

    def _launch(
        self,
        call: Call,
        device: int,
        q: Any,
        k: Any,
        v: Any,
        scale: float,
        out: Any,
        return_lse: bool,
    ) -> Any:
        """Run on the current stream."""
        r = self.request
        # First of all that allocates: a capture that comes too early is refused here.
        plan = self._prepared.on_device(self.mask, device)
        result = _empty(call, q, call.shape, r.dtype) if out is None else out
        addresses: tuple[int | None, ...]
        if call.of_cupy:
            addresses = (q.data.ptr, k.data.ptr, v.data.ptr, result.data.ptr)
        else:
            addresses = tuple([interop.address(array) for array in (q, k, v, result)])
        # The kernel by its identity, which is quicker than its name: the launch keeps it.
        key = (addresses, plan.slot_log2, id(self.config), scale)
        packed = call.packed.get(key)
        copies: list[Any] = []
        if packed is None:
            packed, copies = self.pack(q, k, v, result, scale, plan.slot_log2, call, out)
            if None not in addresses and not copies:
                call.remember(key, packed)
        lse, at = None, 0
        if return_lse:
            lse = _empty(call, q, (r.batch, r.q_heads, r.sq), "float32")
            at = interop.device_operand(lse, "out").pointer
        launch.attend(packed, plan, at, copies)
        if out is None and not call.of_cupy:
            result = interop.returned(result, q)
        return (result, interop.returned(lse, q)) if return_lse else result

    def _checked(self, q: Any, k: Any, v: Any, out: Any) -> Call:
        """The call with these arrays; those of another geometry are refused."""
        r = self.request
        try:
            call = checked(self.mask, q, k, v, out, layout=r.layout, arch=r.arch)
        except ValueError:
            # Heads that fit neither each other nor the mask may just not be the plan's.
            for name, array, planned in (("q", q, r.q_shape), ("k", k, r.kv_shape)):
                _check_heads(name, tuple(getattr(array, "shape", ())), planned, r.layout.index("H"))
            raise
        if call.request is not r and call.request != r:
            raise ValueError(
                wrong(
                    "q, k, v",
                    f"the plan's {r.differences(call.request)}",
                    call.request.differences(r),
                    "make a new plan",
                )
            )
        return call

    def _checked_on_gpu(self, q: Any, k: Any, v: Any) -> tuple[Call, int]:
        """The call with these arrays and their GPU; those in host memory are refused."""
        call = self._checked(q, k, v, None)
        if call.device is None:
            raise ValueError(
                wrong("q", "an array on a GPU", "one in host memory", "copy it to the GPU")
            )
        self._check_device(call.device)
        return call, call.device

    def _check_device(self, device: int) -> None:
        """Refuse a GPU that is not the mask's or not of the plan's architecture."""
        if self.mask.device not in (None, device):
            raise ValueError(
                wrong(
                    "mask",
                    f"a mask from the host or from q's device {device}",
                    f"a mask from device {self.mask.device}",
                    "build it on one of these",
                )
            )
        arch, found = self.request.arch, gpus.arch_of(device)
        if found is not arch and found != arch:
            raise PlanNotEligibleError(
                wrong(
                    "q",
                    f"an array on a GPU of {arch.name}, which the plan is for",
                    f"a GPU of {found.name}",
                    "make a plan for that architecture",
                )
            )

    def pack(
        self,
        q: Any,
        k: Any,
        v: Any,
        result: Any,
        scale: float,
        slot_log2: int,
        call: Call,
        out: Any,
    ) -> tuple[launch.Packed, list[Any]]:
        """The launch for these arrays, and the copies that it reads in place of some of them."""
        r = self.request
        assert call.device is not None
        given = {n: interop.device_operand(x, n) for n, x in (("q", q), ("k", k), ("v", v))}
        target = interop.device_operand(result, "out")
        if out is not None:
            inputs = {name: interop.device_memory(operand) for name, operand in given.items()}
            check_apart(interop.device_memory(target), inputs)
        operands = {name: interop.aligned(operand) for name, operand in given.items()}
        tensors = {name: _tensor(operand, r.layout) for name, operand in operands.items()}
        if self.config.gather:
            for name in ("k", "v"):
                _check_reach(name, r.skv, tensors[name].strides[2])
        packed = launch.pack(
            self.config,
            tensors["q"],
            tensors["k"],
            tensors["v"],
            _tensor(target, r.layout),
            launch.Geometry(
                **{name: getattr(r, name) for name in _SIZES},
                dtype=r.dtype,
                sm_scale=scale,
                capacity=self.model.capacity,
                device=call.device,
            ),
            slot_log2,
        )
        return packed, [x.owner for name, x in operands.items() if x is not given[name]]


def checked_scale(sm_scale: float | None, head_dim: int) -> float:
    """The factor on the scores as a float32 number, ``1 / sqrt(head_dim)`` for None.

    Raises:
        ValueError: it is no finite float32 number.
    """
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


def _check_heads(name: str, shape: tuple[int, ...], planned: tuple[int, ...], axis: int) -> None:
    """Refuse a shape that differs from the plan's in nothing but the number of heads."""
    if len(shape) != 4 or shape[axis] == planned[axis]:
        return
    if shape[:axis] + shape[axis + 1 :] == planned[:axis] + planned[axis + 1 :]:
        expected, got = f"the plan's {planned[axis]} heads", f"{shape[axis]} heads"
        raise ValueError(wrong(name, expected, got, "make a new plan"))


def _of_cupy(array: Any) -> bool:
    return interop.framework(array) == "cupy"


def _empty(call: Call, q: Any, shape: tuple[int, ...], dtype: str) -> Any:
    """A new array like q, on the current device."""
    if not call.of_cupy:
        return interop.empty(q, shape, dtype)
    import cupy

    return cupy.empty(shape, call.dtype if dtype == call.request.dtype else dtype)


def _check_reach(name: str, rows: int, stride: int) -> None:
    """Refuse a head whose rows the gathering kernels' 32-bit offsets do not reach."""
    reach = 2 * rows * stride  # bytes; elements have two
    if reach >= 2**32:
        raise ValueError(
            wrong(
                name,
                "rows of a head within 4 GiB, where single keys are gathered",
                f"{rows} rows, {2 * stride} bytes apart",
                'pass BHSD arrays with layout="BHSD"',
            )
        )


def _tensor(operand: interop.Operand, layout: str) -> launch.Tensor:
    batch, first, second, _ = operand.strides
    head, row = (first, second) if layout == "BHSD" else (second, first)
    return launch.Tensor(operand.pointer, (batch, head, row))
