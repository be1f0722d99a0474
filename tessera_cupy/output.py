"""What may be passed as ``out=``: an array like q that can be written, apart from what is read."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tessera_cupy import interop
from tessera_cupy.errors import wrong
from tessera_cupy.request import Request


def check_out(out: Any, q: Any, request: Request, *, on_gpu: bool) -> None:
    """Refuse an output that is not like q or that cannot be written; nothing is touched.

    Args:
        out: what the caller gave.
        q: the queries, whose library, shape, dtype and device it must have.
        request: shape and dtype, checked already.
        on_gpu: whether q is in GPU memory.

    Raises:
        TypeError: an array of another library, or one that only reads.
        ValueError: another shape, dtype or place, a read-only array, elements that share memory
            with each other, or rows that the kernels cannot store 16 bytes at a time.
    """
    _check_library(interop.framework(out), interop.framework(q))
    got = (tuple(out.shape), interop.dtype_name(out))
    expected = (request.q_shape, request.dtype)
    if got != expected:
        raise ValueError(wrong("out", f"shape and dtype {expected}", got, "allocate it like q"))
    if not on_gpu:
        _check_on_host(out)
        check_elements(interop.host_memory(out))
        return
    target, source = interop.device_operand(out, "out"), interop.device_operand(q, "q")
    if target.device != source.device:
        raise ValueError(
            wrong("out", f"q's device {source.device}", f"device {target.device}", "move it there")
        )
    if 0 not in request.q_shape and not interop.is_aligned(target):
        raise ValueError(
            wrong(
                "out",
                "a contiguous head dim and 16-byte aligned rows",
                f"strides {target.strides} elements at address {target.pointer:#x}",
                "leave it out, or allocate it like q",
            )
        )
    check_elements(interop.device_memory(target))


def check_apart(out: NDArray[Any], inputs: dict[str, NDArray[Any]]) -> None:
    """Refuse to write where other tasks still read.

    A task writes the rows whose Q it has read, so that the output may be q itself. Anywhere else
    in q it would write rows that another task has yet to read, as anywhere in k and v.

    Args:
        out: where the output lies, by :func:`interop.device_memory` or ``host_memory``.
        inputs: the same of ``"q"``, ``"k"`` and ``"v"``; q has the output's shape.

    Raises:
        ValueError: the output shares memory with k or v, or with q at another place.
    """
    for name, array in inputs.items():
        if name == "q" and _place(out) == _place(array):
            continue
        if np.shares_memory(out, array):
            expected = "memory of its own, or exactly q's" if name == "q" else "memory of its own"
            raise ValueError(wrong("out", expected, f"memory that {name} uses", "allocate another"))


def _place(array: NDArray[Any]) -> tuple[int, list[int]]:
    """Address and the strides that are used, which tell arrays of one shape apart."""
    used = [step for step, n in zip(array.strides, array.shape, strict=True) if n > 1]
    return array.__array_interface__["data"][0], used


def check_elements(out: NDArray[Any]) -> None:
    """Refuse elements that share memory: each would be written several times."""
    for axis in range(out.ndim):
        # Two elements that first differ on this axis are as far apart wherever they start.
        before = (slice(0, 1),) * axis
        if np.shares_memory(out[(*before, slice(0, 1))], out[(*before, slice(1, None))]):
            raise ValueError(
                wrong(
                    "out",
                    "elements that each have memory of their own",
                    f"elements that share it, with strides of {out.strides} bytes",
                    "allocate it like q; an expanded or broadcast array can only be read",
                )
            )


def _check_library(kind: str, wanted: str) -> None:
    if kind == "jax":
        raise TypeError(
            wrong(
                "out",
                "an array that can be written",
                "a JAX array, which never changes",
                "leave it out and use the result",
            )
        )
    if kind != wanted:
        raise TypeError(
            wrong(
                "out",
                f"an array of q's library, {wanted}",
                f"one of {kind}",
                "allocate it like q, or leave it out",
            )
        )
    if kind == "dlpack":
        raise TypeError(
            wrong(
                "out",
                "an array of CuPy, torch or NumPy, as q",
                "one that can only be read, through DLPack",
                "leave it out, or pass all arrays as CuPy's",
            )
        )


def _check_on_host(out: Any) -> None:
    if not interop.on_host(out):
        raise ValueError(
            wrong("out", "an array in host memory, as q", "one on a GPU", "allocate it like q")
        )
    if interop.framework(out) == "numpy" and not out.flags.writeable:
        raise ValueError(
            wrong(
                "out",
                "an array that can be written",
                "a read-only NumPy array",
                "allocate it like q, for example with numpy.empty_like(q)",
            )
        )
