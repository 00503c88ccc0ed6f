"""What a step costs, from what its blocks compute and load; planner, admission and router share this model. Pure.

Linear, as in FlashPS (EuroSys '26, section 4.4), but with attention's pairs and projections of their own, so that one
set of weights serves every mixture of modes, masks and picture sizes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from giornata.planning.blocks import Block
from giornata.wire.values import Mode

COMPUTE: Final = ("step", "sequences", "tokens", "projected", "pairs")
"""Features of a step's computing, in the order of :attr:`Work.features`; `step` is 1."""
LOAD: Final = ("slab", "bytes")
"""Features of one load; `slab` is 1."""
SLABS: Final = 8
"""In how many slabs the planner counts the largest load of a block: enough to tell loads apart, few enough to plan."""

RENEWALS: Final = 3
"""How often a row without a template computes everything at the least; decision record 0029 has the measurements."""


@dataclass(frozen=True)
class Work:
    """What is computed, summed over sequences, and over blocks for a whole step."""

    sequences: float = 0.0
    tokens: float = 0.0
    """Text and image tokens whose queries, feed-forward and residuals are computed."""
    projected: float = 0.0
    """Tokens whose keys and values alone are projected, from a hidden state."""
    pairs: float = 0.0
    """Queries times keys."""

    def __add__(self, other: Work) -> Work:
        return Work(
            self.sequences + other.sequences,
            self.tokens + other.tokens,
            self.projected + other.projected,
            self.pairs + other.pairs,
        )

    def __mul__(self, times: float) -> Work:
        return Work(self.sequences * times, self.tokens * times, self.projected * times, self.pairs * times)

    @property
    def features(self) -> tuple[float, ...]:
        """The features of one step, in the order of :data:`COMPUTE`."""
        return 1.0, self.sequences, self.tokens, self.projected, self.pairs


@dataclass(frozen=True, slots=True)
class Shape:
    """The tokens of one sequence."""

    text: int
    image: int
    computed: int
    """Image tokens of the compute set, or all."""

    def work(self, mode: Mode) -> Work:
        """What one block computes."""
        keys = self.text + self.image
        own = keys if mode is Mode.FULL else self.text + self.computed
        projected = self.image - self.computed if mode is Mode.HIDDEN else 0
        return Work(1.0, own, projected, own * keys)


def step_work(shapes: Iterable[Shape], modes: Iterable[Sequence[Mode]]) -> Work:
    """What a whole step computes; `modes` holds those of every shape's blocks."""
    works = (
        shape.work(mode) * count
        for shape, chosen in zip(shapes, modes, strict=True)
        for mode, count in Counter(chosen).items()
    )
    return sum(works, Work())


@dataclass(frozen=True)
class StepCosts:
    """Weights of the linear model, by :data:`COMPUTE` and :data:`LOAD`, in milliseconds a unit; none is negative."""

    compute: tuple[float, ...]
    load: tuple[float, ...] = (0.0, 0.0)

    def __post_init__(self) -> None:
        if (len(self.compute), len(self.load)) != (len(COMPUTE), len(LOAD)):
            raise ValueError(
                f"received {len(self.compute)} and {len(self.load)} weights, needed are {COMPUTE} and {LOAD}"
            )

    def step_ms(self, work: Work) -> float:
        """Time of a step that computes `work` in all of its blocks together and waits for nothing."""
        step, sequences, tokens, projected, pairs = self.compute
        return (
            step
            + sequences * work.sequences
            + tokens * work.tokens
            + projected * work.projected
            + pairs * work.pairs
        )

    def block_ms(self, work: Work) -> float:
        """Time that a sequence adds to one block."""
        return self.step_ms(work) - self.compute[0]

    def load_ms(self, size_bytes: float) -> float:
        """Time of loading one slab."""
        return self.load[0] + self.load[1] * size_bytes if size_bytes else 0.0


@dataclass(frozen=True)
class Loads:
    """Bytes that a row loads for one block; 0 for an entry that is on the device."""

    hidden_bytes: int = 0
    kv_bytes: int = 0
    hidden_kept: bool = True
    kv_kept: bool = True


def slab_unit(loads: Iterable[Loads]) -> float:
    """Bytes of a slab in a plan over these loads."""
    return max((max(load.hidden_bytes, load.kv_bytes) for load in loads), default=0) / SLABS


def row_blocks(
    costs: StepCosts, shapes: Sequence[Shape], loads: Sequence[Loads], unit_bytes: float, blocks: int
) -> tuple[Block, ...]:
    """A row's blocks for the planner; a step has so many `blocks`, and `loads` are those of one step or of several.

    Loads are rounded up to whole slabs, of `unit_bytes` each.
    """

    def slabs(size_bytes: int) -> int:
        return math.ceil(size_bytes / unit_bytes) if size_bytes else 0

    full, hidden, kv = (sum(costs.block_ms(shape.work(mode)) for shape in shapes) for mode in Mode)
    return tuple(
        Block(
            full,
            hidden,
            kv,
            slabs(load.hidden_bytes),
            slabs(load.kv_bytes),
            fresh=index % blocks == 0,
            hidden_kept=load.hidden_kept,
            kv_kept=load.kv_kept,
        )
        for index, load in enumerate(loads)
    )


def renewed_every(steps: int, most: int) -> int:
    """Without a template: from one of a row's `steps` that is computed in full to the next, at `most` so many.

    In a short run noise levels are far apart: :data:`RENEWALS` steps are in full at the least. 0 for none but these.
    """
    return min(most, math.ceil(steps / RENEWALS))


def worth_reusing(
    costs: StepCosts, shapes: Sequence[Shape], modes: Sequence[Mode], bytes_a_step: float
) -> bool:
    """Whether a row's step with reuse ends earlier than in full, loads behind computing: below the crossover.

    `modes` are those of the row's blocks with reuse, and `bytes_a_step` are loaded on average.
    """
    full, masked = (
        costs.step_ms(step_work(shapes, [chosen] * len(shapes)))
        for chosen in ((Mode.FULL,) * len(modes), modes)
    )
    return max(masked, costs.load_ms(bytes_a_step)) < full
