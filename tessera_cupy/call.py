"""The arrays of a call, checked against the mask and each other: once for arrays that are alike."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tessera_cupy import interop
from tessera_cupy.errors import wrong
from tessera_cupy.masks import BlockMask
from tessera_cupy.output import check_out
from tessera_cupy.request import Request, make_request

if TYPE_CHECKING:
    from tessera_cupy.kernels.arch import Arch
    from tessera_cupy.kernels.launch import Packed

#: Kinds of calls, and addresses of each, that are remembered.
_MOST_CALLS = 512
_MOST_ADDRESSES = 256


@dataclass(frozen=True, eq=False)
class Call:
    """What is known of all calls whose arrays differ in nothing but their addresses.

    Attributes:
        request: sizes, dtype, layout and architecture.
        device: ordinal of the GPU that all arrays are on; None for host memory.
        packed: launches that were packed for arrays at some addresses, for :meth:`remember`.
    """

    request: Request
    device: int | None
    packed: dict[Any, Packed] = field(default_factory=dict)

    def remember(self, key: Any, packed: Packed) -> None:
        """Keep a launch for the next call with the same key."""
        if len(self.packed) >= _MOST_ADDRESSES:
            self.packed.clear()
        self.packed[key] = packed


_calls: dict[Any, Call] = {}


def checked(mask: BlockMask, q: Any, k: Any, v: Any, out: Any, *, layout: str, arch: Arch) -> Call:
    """Check a call's arrays; arrays like those of an earlier call are not looked at again.

    Args:
        mask: the mask that the call applies.
        q: an array.
        k: an array.
        v: an array.
        out: an array, or None.
        layout: axes of all of them.
        arch: architecture to plan for.

    Raises:
        ValueError: shapes, devices or places that do not fit.
        TypeError: dtypes, libraries or a mask that do not.
    """
    key = None
    if isinstance(mask, BlockMask):
        alike = [interop.alike(array) for array in (q, k, v)]
        alike.append(None if out is None else interop.alike(out))
        if None not in alike[:3] and (out is None) == (alike[3] is None):
            key = (mask.shape, mask.batch, mask.heads, *alike, layout, arch)
            found = _calls.get(key)
            if found is not None:
                return found
    call = _check(mask, q, k, v, out, layout, arch)
    if key is not None:
        if len(_calls) >= _MOST_CALLS:
            _calls.clear()
        _calls[key] = call
    return call


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
    if host:
        return Call(request, None)
    device = interop.device_of(q, "q")
    for name, array in (("k", k), ("v", v)):
        other = interop.device_of(array, name)
        if other != device:
            raise ValueError(
                wrong(name, f"q's device {device}", f"device {other}", "move it there")
            )
    return Call(request, device)
