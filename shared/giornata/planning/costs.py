"""What a step costs, from what its blocks compute and load; planner, admission and router share this model. Pure.

Linear, as in FlashPS (EuroSys '26, section 4.4), but with attention's pairs and projections of their own, so that one
set of weights serves every mixture of modes, masks and picture sizes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from giornata.planning.blocks import Flags
from giornata.planning.columns import Columns
from giornata.wire.values import Mode

Sizes = NDArray[np.int64]
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
    padding: int = field(default=0, kw_only=True)
    """Of the text tokens, those of which keys and values are kept: they are attended to and not computed."""
    prefix: int = field(default=0, kw_only=True)
    """Tokens beside these that no step computes: they attend among themselves alone, and are attended to."""

    def work(self, mode: Mode) -> Work:
        """What one block computes."""
        keys = self.prefix + self.text + self.image
        own = self.live_text + (self.image if mode is Mode.FULL else self.computed)
        projected = self.image - self.computed if mode is Mode.HIDDEN else 0
        return Work(1.0, own, projected, own * keys)

    @property
    def live_text(self) -> int:
        """Text tokens that are computed."""
        return self.text - self.padding


def step_work(shapes: Iterable[Shape], modes: Iterable[Sequence[Mode]]) -> Work:
    """What a whole step computes; `modes` holds those of every shape's blocks."""
    works = (_of_sequence(shape, tuple(chosen)) for shape, chosen in zip(shapes, modes, strict=True))
    return sum(works, Work())


@lru_cache(maxsize=4096)
def _of_sequence(shape: Shape, modes: tuple[Mode, ...]) -> Work:
    return sum((shape.work(mode) * count for mode, count in Counter(modes).items()), Work())


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


@dataclass(frozen=True, eq=False)
class Loads:
    """Bytes that a row loads for each block, (blocks,) int64; 0 for an entry that is on the device."""

    hidden_bytes: Sizes
    kv_bytes: Sizes
    hidden_kept: Flags
    """(blocks,), as `kv_kept`: whether there is such an entry."""
    kv_kept: Flags

    @classmethod
    def equal(
        cls, blocks: int, hidden_bytes: int = 0, kv_bytes: int = 0, *, hidden_kept: bool = True
    ) -> Loads:
        """Those of so many equal blocks, which keep keys and values."""
        hidden, kv = (np.full(blocks, size, np.int64) for size in (hidden_bytes, kv_bytes))
        return cls(hidden, kv, np.full(blocks, hidden_kept), np.ones(blocks, bool))

    def then(self, later: Loads) -> Loads:
        """Those of this step and of the next one."""
        return Loads(
            np.concatenate((self.hidden_bytes, later.hidden_bytes)),
            np.concatenate((self.kv_bytes, later.kv_bytes)),
            np.concatenate((self.hidden_kept, later.hidden_kept)),
            np.concatenate((self.kv_kept, later.kv_kept)),
        )

    @property
    def largest_bytes(self) -> int:
        """The largest of all."""
        return int(max(self.hidden_bytes.max(initial=0), self.kv_bytes.max(initial=0)))


def slab_unit(loads: Iterable[Loads]) -> float:
    """Bytes of a slab in a plan over these loads."""
    return max((load.largest_bytes for load in loads), default=0) / SLABS


def row_blocks(
    costs: StepCosts, shapes: Sequence[Shape], loads: Loads, unit_bytes: float, blocks: int
) -> Columns:
    """A row's blocks for the planner; a step has so many `blocks`, and `loads` are those of one step or of several.

    Loads are rounded up to whole slabs, of `unit_bytes` each.
    """
    count = len(loads.kv_bytes)
    times = [[costs.block_ms(work)] for work in _of_block(tuple(shapes))]
    full, hidden, kv = np.repeat(np.array(times), count, axis=1)
    slabs = np.ceil(np.array((loads.hidden_bytes, loads.kv_bytes)) / (unit_bytes or 1.0))
    fresh = np.arange(count) % blocks == 0
    return Columns(full, hidden, kv, slabs[0], slabs[1], fresh, loads.hidden_kept, loads.kv_kept)


@lru_cache(maxsize=1024)
def _of_block(shapes: tuple[Shape, ...]) -> tuple[Work, ...]:
    """What a row adds to one block in each mode."""
    return tuple(sum((shape.work(mode) for shape in shapes), Work()) for mode in Mode)


def renewed_every(steps: int, most: int) -> int:
    """Without a template: from one of a row's `steps` that is computed in full to the next, at `most` so many.

    In a short run noise levels are far apart: :data:`RENEWALS` steps are in full at the least. 0 for none but these.
    """
    return min(most, math.ceil(steps / RENEWALS))


def renewed_later(number: int, steps: int, every: int) -> int:
    """By how many steps the `number`-th of some rows that begin together renews later than the first of them.

    So they are computed in full in different steps, and in as many. Later is no worse than earlier; decision record
    0029 has the measurement.
    """
    if every < 1:
        return 0
    last = (math.ceil(steps / every) - 1) * every
    return number % (1 + min((every - 1) // 2, steps - 1 - last))


def worth_reusing(
    costs: StepCosts, shapes: Sequence[Shape], modes: Sequence[Mode], bytes_a_step: float
) -> bool:
    """Whether a row's step with reuse ends earlier than in full, loads behind computing: below the crossover.

    `shapes` and `modes`, of the row's blocks, are those with reuse; `bytes_a_step` are loaded on average.
    """
    whole = [replace(shape, padding=0) for shape in shapes]
    full, masked = (
        costs.step_ms(step_work(of, [chosen] * len(of)))
        for of, chosen in ((whole, (Mode.FULL,) * len(modes)), (shapes, modes))
    )
    return max(masked, costs.load_ms(bytes_a_step)) < full
