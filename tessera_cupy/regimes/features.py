"""The facts of a request that a profile table decides by."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tessera_cupy.masks import BlockMask
    from tessera_cupy.masks.summary import MaskSummary


class Features(NamedTuple):
    """One request, as a profile table sees it.

    Attributes:
        block_q, block_kv: rows and columns of a logical block in tokens; of the largest
            block where the mask is ragged.
        ragged: whether blocks differ in size by more than a short last one.
        token_bits: whether some blocks are partial, with a mask of their own per token.
        dtype: "float16" or "bfloat16".
        head_dim: elements of one query row.
        layout: "BHSD" or "BSHD".
        heads: batch times query heads.
        tokens: KV length.
        density: kept fraction of the token pairs, 0 to 1.
        run_coverage: fraction of the active blocks in horizontal runs of two or more.
        slices: whether the mask is of key slices, which plans may gather.
    """

    block_q: int
    block_kv: int
    ragged: bool
    token_bits: bool
    dtype: str
    head_dim: int
    layout: str
    heads: int
    tokens: int
    density: float
    run_coverage: float
    slices: bool = False

    @property
    def rows(self) -> int:
        """Heads times tokens: how much there is to do side by side, whatever a row keeps."""
        return self.heads * self.tokens

    @property
    def kept_keys(self) -> int:
        """Keys that a row keeps on average, rounded: how long its list is, on any number of keys.

        >>> features = Features(
        ...     64, 64, False, False, "bfloat16", 128, "BHSD", heads=8, tokens=32760,
        ...     density=0.1, run_coverage=0.8,
        ... )  # fmt: skip
        >>> features.kept_keys
        3276
        """
        return kept_keys(self.density, self.tokens)

    @property
    def numbers(self) -> tuple[float, ...]:
        """The values that regimes are told apart by, as :data:`AXES` of the schema has them."""
        return (
            self.heads,
            self.tokens,
            self.density,
            self.run_coverage,
            self.rows,
            self.kept_keys,
        )

    @classmethod
    def of(
        cls,
        mask: BlockMask,
        *,
        batch: int,
        q_heads: int,
        dtype: str,
        head_dim: int,
        layout: str,
        summary: MaskSummary | None = None,
    ) -> Features:
        """Features of a request that applies ``mask`` to ``batch * q_heads`` heads.

        ``summary`` spares reading a mask that is on a GPU; its density is that of blocks.

        >>> from tessera_cupy.masks import BlockMask
        >>> mask = BlockMask.from_dense([[1, 1], [0, 1]], (64, 64))
        >>> Features.of(
        ...     mask, batch=1, q_heads=2, dtype="float16", head_dim=64, layout="BHSD"
        ... ).density
        0.75
        """
        block_q, block_kv = mask.max_block
        return cls(
            block_q=block_q,
            block_kv=block_kv,
            ragged=mask.ragged,
            token_bits=mask.has_token_bits,
            dtype=dtype,
            head_dim=head_dim,
            layout=layout,
            heads=batch * q_heads,
            tokens=mask.shape[1],
            density=summary.density if summary else mask.density(),
            run_coverage=summary.run_coverage if summary else mask.run_coverage(),
            slices=mask.of_slices,
        )


def kept_keys(density: float, tokens: int) -> int:
    """Keys that a row keeps on average, of so many tokens, rounded."""
    return int(density * tokens + 0.5)
