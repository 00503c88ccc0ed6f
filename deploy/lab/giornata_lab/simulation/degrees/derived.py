"""Step times of Flux.1-dev on several H100s, derived and not measured.

The constants are those with which the formula gives xDiT's published compiled times at 1024² (4.30, 2.68 and 1.63 s for
28 steps on one, two and four). With 50 steps the least degrees within 1.5 times the limits are those that TetriServe's
baseline takes for each resolution.
"""

from __future__ import annotations

from typing import Final

TEXT: Final = 512
"""Tokens of a prompt."""
FIXED_S: Final = 5e-3
"""Time of a step that no degree shortens."""
LINEAR: Final = 12.9e9
"""Operations of a token, two for each multiplication of the linear layers."""
PAIR: Final = 7.0e5
"""Operations of a pair of tokens in all attentions."""
RATE: Final = 548e12
"""Operations a second of one device that has many tokens."""
HALF_RATE_TOKENS: Final = 150
"""Tokens of a device at which it reaches half of that."""
BLOCKS: Final = 57
CALLS_S: Final = 100e-6
"""Time of a block's collectives, beside that of their bytes."""
TOKEN_BYTES: Final = 24576
"""That a token sends in a block: query, key, value and what is attended, in 16 bits."""
LINK: Final = 350e9
"""Bytes a second from device to device."""
EAGER_S: Final = 8e-3
EAGER: Final = 1.1
"""What an engine that is not compiled adds to a step of several devices, and by which factor all steps take longer."""


def step_s(degree: int, tokens: float, computed: float | None = None) -> float:
    """Seconds of one row's step on so many H100s, compiled.

    Args:
        degree: devices that share it.
        tokens: of its picture.
        computed: those of the picture that it computes; default all.
    """
    own, every = TEXT + (tokens if computed is None else computed), TEXT + tokens
    return batch_s(degree, own, LINEAR * own + PAIR * own * every)


def batch_s(degree: int, own: float, operations: float) -> float:
    """Seconds of a step that computes `own` tokens, all rows' text among them, in so many `operations`."""
    share = own / degree
    rate = RATE * share / (share + HALF_RATE_TOKENS)
    moved = TOKEN_BYTES * share * (degree - 1) / degree / LINK
    return FIXED_S + operations / degree / rate + (BLOCKS * (CALLS_S + moved) if degree > 1 else 0.0)


def eager_s(degree: int, tokens: float, computed: float | None = None) -> float:
    """:func:`step_s` of an engine that is not compiled: the machine ``h100-eager``."""
    return EAGER * (step_s(degree, tokens, computed) + (EAGER_S if degree > 1 else 0.0))
