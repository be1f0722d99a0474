"""What a sparsifier returns: a mask, and the token order of each head that it is meant for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tessera_cupy.errors import wrong
from tessera_cupy.masks import BlockMask
from tessera_cupy.video import TileSize, inverse


def namespace(array: Any, argument: str) -> Any:
    """The array module, ``numpy`` or ``cupy``, that ``array`` belongs to.

    Raises:
        TypeError: neither a NumPy nor a CuPy array.
    """
    if isinstance(array, np.ndarray):
        return np
    library = type(array).__module__.split(".")[0]
    if library == "cupy":
        import cupy

        return cupy
    fix = "convert with numpy.asarray or cupy.from_dlpack"
    if library == "torch":  # NumPy has no bfloat16 of torch
        fix = f"pass cupy.from_dlpack({argument}) on a GPU, {argument}.float().numpy() on the host"
    raise TypeError(wrong(argument, "a NumPy or CuPy array", type(array).__name__, fix))


@dataclass(frozen=True, eq=False)
class Selection:
    """A mask over tokens that each head first puts in an order of its own.

    Attributes:
        mask: what to compute, over tokens in the heads' orders.
        order: (batch, heads, tokens) int64 on the host, the raster index of the token at
            each place of a head's order.
        tiles: the 3-D tile of each head, in (batch, head) order.

    Example:
        ::

            chosen = spade.select(q, k, grid)
            out = block_sparse_attention(
                chosen.permute(q), chosen.permute(k), chosen.permute(v), chosen.mask
            )
            out = chosen.restore(out)
    """

    mask: BlockMask
    order: NDArray[np.int64]
    tiles: tuple[TileSize, ...]

    def permute(self, x: Any) -> Any:
        """Put ``x`` of shape (batch, heads, tokens, d), in raster order, in the heads' orders."""
        return self._gather(x, self.order)

    def restore(self, x: Any) -> Any:
        """Undo :meth:`permute`: back to raster order."""
        return self._gather(x, inverse(self.order))

    def _gather(self, x: Any, order: NDArray[np.int64]) -> Any:
        xp = namespace(x, "x")
        if x.ndim != 4 or tuple(x.shape[:3]) != order.shape:
            raise ValueError(
                wrong(
                    "x",
                    f"shape (batch, heads, tokens, d) = {(*order.shape, 'd')}",
                    f"shape {tuple(x.shape)}",
                    "pass arrays of the q and k that the selection was made from",
                )
            )
        moved = xp.empty_like(x, order="C")
        places = xp.asarray(order)
        for b, h in np.ndindex(*order.shape[:2]):
            moved[b, h] = x[b, h][places[b, h]]
        return moved
