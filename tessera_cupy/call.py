"""The arrays of a call, checked against the mask and each other: once for arrays that are alike."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tessera_cupy import gpus, interop
from tessera_cupy.errors import wrong
from tessera_cupy.kernels.arch import Arch, get_arch
from tessera_cupy.masks import BlockMask
from tessera_cupy.output import check_out
from tessera_cupy.request import Request, make_request

if TYPE_CHECKING:
    from tessera_cupy.kernels.launch import Packed

#: Architecture that host arrays are planned for, unless ``arch`` says otherwise.
HOST_ARCH = "sm_90a"

#: Kinds of calls, and addresses of each, that are remembered.
_MOST_CALLS = 512
_MOST_ADDRESSES = 256


@dataclass(frozen=True, eq=False)
class Call:
    """What is known of all calls whose arrays differ in nothing but their addresses.

    Attributes:
        request: sizes, dtype, layout and architecture.
        device: ordinal of the GPU that all arrays are on; None for host memory.
        shape, dtype: of the result, as CuPy takes them.
        of_cupy: whether q, k and v are CuPy's.
        packed: launches that were packed for arrays at some addresses, for :meth:`remember`.
    """

    request: Request
    device: int | None
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    of_cupy: bool
    packed: dict[Any, Packed] = field(default_factory=dict)

    def remember(self, key: Any, packed: Packed) -> None:
        """Keep a launch for the next call with the same key."""
        if len(self.packed) >= _MOST_ADDRESSES:
            self.packed.clear()
        self.packed[key] = packed


_calls: dict[Any, Call] = {}
# Equal requests are one object, so that plans can be looked up by its identity.
_requests: dict[Request, Request] = {}
# Place of the device in what interop.alike returns.
_DEVICE = 4


def interned(request: Request) -> Request:
    """The one object for all requests that are equal, by which more is known of them."""
    if len(_requests) >= _MOST_CALLS:
        _requests.clear()
    return _requests.setdefault(request, request)


def checked(
    mask: BlockMask, q: Any, k: Any, v: Any, out: Any, *, layout: str, arch: Arch | None = None
) -> Call:
    """Check a call's arrays; arrays like those of an earlier call are not looked at again.

    Args:
        mask: the mask that the call applies.
        q: an array.
        k: an array.
        v: an array.
        out: an array, or None.
        layout: axes of all of them.
        arch: architecture to plan for; None means that of q's GPU, and :data:`HOST_ARCH` for
            host arrays.

    Raises:
        ValueError: shapes, devices or places that do not fit.
        TypeError: dtypes, libraries or a mask that do not.
    """
    alike = (interop.alike(q), interop.alike(k), interop.alike(v))
    like_out = None if out is None else interop.alike(out)
    if arch is None:
        arch = gpus.arch_of(alike[0][_DEVICE]) if alike[0] is not None else _arch_of(q)
    key = None
    if None not in alike and (out is None or like_out is not None) and isinstance(mask, BlockMask):
        key = (mask.shape, mask.batch, mask.heads, alike, like_out, layout, arch.name)
        found = _calls.get(key)
        if found is not None and found.request.arch is arch:
            return found
    call = _check(mask, q, k, v, out, layout, arch)
    if key is not None:
        if len(_calls) >= _MOST_CALLS:
            _calls.clear()
        _calls[key] = call
    return call


def _arch_of(q: Any) -> Arch:
    if interop.on_host(q):
        return get_arch(HOST_ARCH)
    return gpus.arch_of(interop.device_of(q, "q"))


def _check(mask: BlockMask, q: Any, k: Any, v: Any, out: Any, layout: str, arch: Arch) -> Call:
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
    request = make_request(mask, q, k, v, layout=layout, arch=arch, on_gpu=not host)
    if out is not None:
        check_out(out, q, request, on_gpu=not host)
    request = interned(request)
    result = request.q_shape, interop.numpy_dtype(request.dtype)
    if host:
        return Call(request, None, *result, of_cupy=False)
    device = interop.device_of(q, "q")
    for name, array in (("k", k), ("v", v)):
        other = interop.device_of(array, name)
        if other != device:
            raise ValueError(
                wrong(name, f"q's device {device}", f"device {other}", "move it there")
            )
    of_cupy = all(interop.framework(array) == "cupy" for array in (q, k, v))
    return Call(request, device, *result, of_cupy=of_cupy)
