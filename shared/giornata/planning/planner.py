"""Which mode each block takes: the exact planner, the paper's greedy one and the constant ones. Pure.

FlashPS (EuroSys '26, section 4.2) decides block by block, by its Algorithm 1, whether to load or to compute. That is
not optimal: a load that pays for its own block can delay every later one. `exact` keeps, for every number of slabs
loaded so far and for both states of the outside tokens' hidden state (at hand or gone), the earliest end of computing;
two plans that agree in these differ in nothing that matters later, so the later one is dropped and no optimum is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from giornata.planning.blocks import Block, Link, Mode, Timeline, timeline

Times = NDArray[np.float64]
"""(slabs + 1,) earliest end of computing in ms by slabs that the row itself has loaded; inf where there is none."""
GONE, LIVE = 0, 1
"""The outside tokens' hidden state."""
MODES: Final = tuple(Mode)


@dataclass(frozen=True)
class Plan:
    """A mode for every block, and what becomes of them."""

    modes: tuple[Mode, ...]
    timeline: Timeline


Planner = Callable[[Sequence[Block], Link], Plan]


def exact(blocks: Sequence[Block], link: Link) -> Plan:
    """The modes with the earliest end; among those, the ones that load least.

    Dynamic programming over (slabs, live), vectorised over slabs: time O(blocks * slabs).
    """
    most = sum(max(block.hidden_slabs, block.kv_slabs) for block in blocks)
    ends = [np.full(most + 1, np.inf), np.full(most + 1, np.inf)]
    ends[GONE][0] = 0.0
    arrival = link.busy_ms + link.slab_ms * np.arange(most + 1)
    others = 0
    choices: list[tuple[NDArray[np.int8], NDArray[np.int8]]] = []
    for block in blocks:
        others += block.others_slabs
        ends, chosen = _advance(block, ends, np.add(arrival, others * link.slab_ms, dtype=np.float64))
        choices.append(chosen)
    modes = _traced(blocks, ends, choices)
    return Plan(modes, timeline(blocks, modes, link))


def _advance(
    block: Block, ends: list[Times], arrival: Times
) -> tuple[list[Times], tuple[NDArray[np.int8], NDArray[np.int8]]]:
    """The states after one block, and for each of them how it was reached: 2 * mode + state before."""
    after = [np.full_like(ends[GONE], np.inf), np.full_like(ends[GONE], np.inf)]
    chosen = (np.zeros(len(arrival), np.int8), np.zeros(len(arrival), np.int8))
    for number, mode in enumerate(MODES):
        target = LIVE if mode is Mode.FULL else GONE
        for before in (GONE, LIVE):
            slabs = block.slabs(mode, live=before == LIVE)
            reached = np.full_like(arrival, np.inf)
            reached[slabs:] = ends[before][: len(arrival) - slabs]
            if slabs or block.others_slabs:
                reached = np.maximum(reached, arrival)
            reached = reached + block.compute_ms(mode, live=before == LIVE)
            better = reached < after[target]
            after[target] = np.where(better, reached, after[target])
            chosen[target][better] = 2 * number + before
    return after, chosen


def _traced(
    blocks: Sequence[Block], ends: list[Times], choices: list[tuple[NDArray[np.int8], NDArray[np.int8]]]
) -> tuple[Mode, ...]:
    """The modes that led to the earliest of `ends`."""
    best = np.minimum(*ends)
    slabs = int(best.argmin())
    state = LIVE if ends[LIVE][slabs] <= ends[GONE][slabs] else GONE
    modes: list[Mode] = []
    for block, chosen in zip(reversed(blocks), reversed(choices), strict=True):
        number, before = divmod(int(chosen[state][slabs]), 2)
        modes.append(MODES[number])
        slabs -= block.slabs(MODES[number], live=before == LIVE)
        state = before
    return tuple(reversed(modes))


def greedy(blocks: Sequence[Block], link: Link) -> Plan:
    """Algorithm 1 of FlashPS, with a third mode: each block takes what ends first, the cache on a tie."""
    modes: list[Mode] = []
    slabs, now, live = 0, 0.0, False
    for block in blocks:
        options = []
        for mode in reversed(MODES):
            needed = block.slabs(mode, live=live) + block.others_slabs
            there = link.busy_ms + (slabs + needed) * link.slab_ms if needed else 0.0
            options.append((max(now, there) + block.compute_ms(mode, live=live), mode, needed))
        now, mode, needed = min(options, key=lambda option: option[0])
        slabs += needed
        live = mode is Mode.FULL
        modes.append(mode)
    return Plan(tuple(modes), timeline(blocks, modes, link))


def always(mode: Mode) -> Planner:
    """Every block the same: `kv` and `hidden` are FlashPS's strawman loading (figure 9), `full` is no reuse."""

    def planner(blocks: Sequence[Block], link: Link) -> Plan:
        modes = (mode,) * len(blocks)
        return Plan(modes, timeline(blocks, modes, link))

    return planner
