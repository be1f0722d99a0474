"""What there is to choose from: small grids of models, block sizes of rules, mappings in words."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from tessera_cupy.bench.rules import RULES, find
from tessera_cupy.errors import wrong
from tessera_cupy.video import MODELS, VideoGrid, VideoModel

#: Query rows and key columns of a block.
BlockSize = tuple[int, int]

# Grids are cut to about so many tokens, along each axis to a multiple of the cubes of rules.
_TOKENS, _MULTIPLE = 2400, 4

#: Block sizes of the rules that are told one; the first is where controls begin.
_BLOCK_SIZES: Mapping[str, tuple[BlockSize, ...]] = MappingProxyType(
    {
        "spade": ((64, 64), (128, 128), (64, 32), (32, 32), (32, 16), (16, 16)),
        "radial": ((32, 32), (64, 64), (128, 128)),
        "window": ((64, 64), (128, 128), (32, 32)),
        "dilated": ((64, 64), (128, 128), (32, 32)),
        "global-local": ((64, 64), (128, 128), (32, 32)),
    }
)

#: Each side of a mapping in one sentence.
SENTENCES: Mapping[str, str] = MappingProxyType(
    {
        "retain": "A tile takes one block as it is; what the block does not fill stays empty.",
        "merge": "A tile joins neighbouring blocks, wanted or not, and masks the unwanted ones "
        "before the softmax.",
        "split": "A block that is larger than the tile becomes several tiles or steps.",
        "pack": "A step is filled with the next wanted blocks of the row, from anywhere among the "
        "keys; only at the end of the row's list may columns be computed in vain.",
        "share": "A tile joins query blocks that load each key once for all of them, and each part "
        "of its rows skips the steps in which it wants nothing.",
        "regroup": "As share, but it joins query blocks with alike lists from anywhere in place of "
        "neighbours.",
        "gather": "As pack, but it collects single keys in place of blocks.",
    }
)


def model_of(name: str) -> VideoModel:
    """The model of a name in :data:`tessera_cupy.video.MODELS`.

    Raises:
        ValueError: there is none.
    """
    if name not in MODELS:
        raise ValueError(wrong("model", f"one of {', '.join(MODELS)}", repr(name), "pick one"))
    return MODELS[name]


def small_grid(model: str) -> VideoGrid:
    """A grid of some 2,000 to 3,000 tokens of about the proportions of a model's, without text.

    Each axis is divided by the same number, and rounded to a multiple of 4.

    Raises:
        ValueError: there is no such model.

    >>> str(small_grid("wan-14b-81f-720p")), small_grid("wan-14b-81f-720p").tokens
    ('8x16x24', 3072)
    """
    grid = model_of(model).grid
    shrink = (grid.video_tokens / _TOKENS) ** (1 / 3)
    axes = (
        max(_MULTIPLE, _MULTIPLE * round(n / shrink / _MULTIPLE)) for n in (grid.t, grid.h, grid.w)
    )
    return VideoGrid(*axes)


def block_sizes(rule: str) -> tuple[BlockSize, ...]:
    """The block sizes that a rule can be given; none where it has its own.

    Raises:
        ValueError: there is no such rule.

    >>> block_sizes("spade")[:2], block_sizes("vsa")
    (((64, 64), (128, 128)), ())
    """
    return _BLOCK_SIZES.get(find(rule).name, ())


def block_parameter(rule: str, block_size: BlockSize | None) -> dict[str, BlockSize | int]:
    """A block size as the parameter of a rule's ``select``; none where it is None.

    Raises:
        ValueError: the rule takes no such size.

    >>> block_parameter("radial", (64, 64)), block_parameter("vsa", None)
    ({'block': 64}, {})
    """
    if block_size is None:
        return {}
    known = block_sizes(rule)
    if block_size not in known:
        names = ", ".join(f"{q}x{kv}" for q, kv in known)
        raise ValueError(
            wrong(
                "block_size",
                f"one of {names}" if known else f"None, as {rule} has blocks of its own",
                "x".join(map(str, block_size)),
                "leave it out",
            )
        )
    return {"block": block_size[0]} if rule == "radial" else {"block_size": block_size}


def rule_title(rule: str) -> str:
    """A rule's name as in text."""
    return RULES[rule].title
