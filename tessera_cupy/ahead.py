"""Plans made before it is known that they are wanted: while a mask's numbers come to the host.

A table chooses by a mask's density and runs, which the GPU counts and the host waits for; after
that the GPU would stand still while the host launches what makes the plan. So the plan that was
last chosen for a geometry is made at once, behind the counting. If the numbers then choose it, and
its lists have room, the attention alone is left to launch. If not, it is dropped, and the right
one is made: what is chosen never depends on it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tessera_cupy.kernels import device_build
from tessera_cupy.kernels.builders import TileBuild
from tessera_cupy.kernels.device_build import MaskState
from tessera_cupy.kernels.launch import DevicePlan
from tessera_cupy.kernels.room import lists_room
from tessera_cupy.known import Key, Known

#: A guess keeps its room until a mask has less than one part in so many of what it is for.
SPARE = 4
#: Bytes of lists that a guess gets at least, or those of every mask of the geometry.
LEAST_BYTES = 1 << 20


class Guess(NamedTuple):
    """What was chosen last for the masks of a key.

    Attributes:
        known: the plan.
        sizes: how the GPU makes it.
        room: fragments that its lists get.
        most: active blocks of a mask whose lists are known to fit in the room.
        sure: whether it was chosen twice in a row, or once and for the first time.
    """

    known: Known
    sizes: TileBuild
    room: int
    most: int
    sure: bool


class Made(NamedTuple):
    """A plan that the GPU makes of a mask, by a guess."""

    guess: Guess
    plan: DevicePlan


_guesses: dict[Key, Guess] = {}
_MOST_GUESSES = 256


def make(key: Key, state: MaskState, stream: Any) -> Made | None:
    """Launch what makes the plan that was last chosen; None where there is none to trust.

    Args:
        key: of the request and its mask.
        state: what the GPU makes of the mask, on the same stream.
        stream: CuPy's current stream, which is not capturing.
    """
    guess = _guesses.get(key)
    if guess is None or not guess.sure:
        return None
    arch = guess.known.request.arch.name
    try:
        plan = device_build.build(
            state.source, guess.sizes, arch, stream, state=state, room=guess.room
        )
    except MemoryError:  # the mask itself may need less
        return None
    return Made(guess, plan)


def settle(
    key: Key, made: Made | None, known: Known, sizes: TileBuild | None, nnz: int
) -> DevicePlan | None:
    """The plan that was made ahead, if it is the one that was chosen, and has room.

    Args:
        key: as of :func:`make`.
        made: what that returned.
        known: what was chosen then.
        sizes: how the GPU makes it; None where the host does.
        nnz: active blocks of the mask.
    """
    guess = _guesses.get(key) if made is None else made.guess
    if sizes is None:
        if guess is not None:
            _guesses.pop(key, None)
        return None
    same = fits = False
    if guess is not None and guess.known.spec is known.spec:
        same = True
        fits = nnz <= guess.most or sizes.fragments_of(nnz) <= guess.room
    if guess is not None and fits and guess.sure and SPARE * nnz >= guess.most:
        if nnz > guess.most:
            _guesses[key] = guess._replace(most=nnz)
    else:
        if len(_guesses) >= _MOST_GUESSES:
            _guesses.clear()
        least = LEAST_BYTES // sizes.fragment_bytes
        room = max(lists_room(sizes, nnz), min(sizes.most_fragments, least))
        _guesses[key] = Guess(known, sizes, room, nnz, sure=same or guess is None)
    return made.plan if made is not None and fits else None
