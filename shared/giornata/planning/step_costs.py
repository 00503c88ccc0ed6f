"""The cost of a step, from what its blocks compute and load; planner, admission and router share this model. Pure.

Linear, as in FlashPS (EuroSys '26, section 4.4), but in operations by kind, so that one set of weights serves every
mixture of modes, masks and picture sizes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import attrgetter, mul
from typing import Final

import numpy as np
from numpy.typing import NDArray

from giornata.planning.block_plans import MODES, BlockCostColumns, Flags
from giornata.planning.operations import (
    COMPUTE,
    NETWORK,
    NetworkOperations,
    SequenceShape,
    StepWork,
    step_work,
)
from giornata.wire.values import BlockMode

Array = NDArray[np.float64]
Sizes = NDArray[np.int64]
LOAD: Final = ("slab", "bytes")
"""Features of one load; `slab` is 1."""
_FEATURES: Final = attrgetter(*COMPUTE)
"""As :attr:`StepWork.features`."""
SLABS: Final = 8
"""In how many slabs the planner counts the largest load of a block: enough to tell loads apart, few enough to plan."""

RENEWALS: Final = 3
"""How often a row without a template computes everything at the least; `docs/results/reuse.md` has the measurements."""


@dataclass(frozen=True)
class StepCosts:
    """Weights of the linear model, by :data:`COMPUTE` and :data:`LOAD`, in milliseconds a unit; none is negative.

    Weights of :data:`NETWORK` alone are completed by :func:`completed`.
    """

    compute: tuple[float, ...]
    load: tuple[float, ...] = (0.0, 0.0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "compute", complete_weights(self.compute))
        if (len(self.compute), len(self.load)) != (len(COMPUTE), len(LOAD)):
            raise ValueError(
                f"received {len(self.compute)} and {len(self.load)} weights, needed are {COMPUTE} and {LOAD}"
            )

    def step_ms(self, work: StepWork) -> float:
        """Time of a step that computes `work` and waits for nothing."""
        spent: float = sum(map(mul, self.compute, _FEATURES(work)))
        return spent

    @property
    def call_ms(self) -> float:
        """Time of one forward beside what it computes."""
        return self.compute[0]

    def rates(self, operations: NetworkOperations) -> Array:
        """(blocks, amounts) milliseconds of each of `SequenceShape.amounts` in a block."""
        return _rates(self.compute, operations)

    def load_ms(self, size_bytes: float) -> float:
        """Time of loading one slab."""
        return self.load[0] + self.load[1] * size_bytes if size_bytes else 0.0


def complete_weights(weights: tuple[float, ...]) -> tuple[float, ...]:
    """Weights by :data:`COMPUTE` from those by :data:`NETWORK`, of a fit to steps without adapters; others as they are.

    A multiplication of factors or ControlNets then costs what one of linear layers does, and another segment nothing.
    """
    if len(weights) != len(NETWORK):
        return weights
    linear = weights[NETWORK.index("linear")]
    return (*weights, linear, 0.0, linear)


@dataclass(frozen=True, eq=False)
class BlockLoads:
    """Bytes that a row loads for each block, (blocks,) int64; 0 for an entry that is on the device."""

    hidden_bytes: Sizes
    kv_bytes: Sizes
    hidden_kept: Flags
    """(blocks,), as `kv_kept`: whether there is such an entry."""
    kv_kept: Flags

    @classmethod
    def equal(
        cls, blocks: int, hidden_bytes: int = 0, kv_bytes: int = 0, *, hidden_kept: bool = True
    ) -> BlockLoads:
        """Return those of so many equal blocks, which keep keys and values."""
        hidden, kv = (np.full(blocks, size, np.int64) for size in (hidden_bytes, kv_bytes))
        return cls(hidden, kv, np.full(blocks, hidden_kept), np.ones(blocks, bool))

    def then(self, later: BlockLoads) -> BlockLoads:
        """Return those of this step and of the next one."""
        return BlockLoads(
            np.concatenate((self.hidden_bytes, later.hidden_bytes)),
            np.concatenate((self.kv_bytes, later.kv_bytes)),
            np.concatenate((self.hidden_kept, later.hidden_kept)),
            np.concatenate((self.kv_kept, later.kv_kept)),
        )

    @property
    def largest_bytes(self) -> int:
        """The largest of all."""
        return int(max(self.hidden_bytes.max(initial=0), self.kv_bytes.max(initial=0)))


def slab_unit(loads: Iterable[BlockLoads]) -> float:
    """Bytes of a slab in a plan over these loads."""
    return max((load.largest_bytes for load in loads), default=0) / SLABS


def row_blocks(
    costs: StepCosts,
    operations: NetworkOperations,
    shapes: Sequence[SequenceShape],
    loads: BlockLoads,
    unit_bytes: float,
) -> BlockCostColumns:
    """A row's blocks for the planner; `loads` are those of one step or of several.

    Loads are rounded up to whole slabs, of `unit_bytes` each.
    """
    count, blocks = len(loads.kv_bytes), operations.blocks
    times = np.tile(_of_blocks(costs.compute, operations, tuple(shapes)), count // blocks)
    full, hidden, kv = (times[MODES.index(mode)] for mode in (BlockMode.FULL, BlockMode.HIDDEN, BlockMode.KV))
    slabs = np.ceil(np.array((loads.hidden_bytes, loads.kv_bytes)) / (unit_bytes or 1.0))
    fresh = np.arange(count) % blocks == 0
    return BlockCostColumns(full, hidden, kv, slabs[0], slabs[1], fresh, loads.hidden_kept, loads.kv_kept)


@lru_cache(maxsize=64)
def _rates(weights: tuple[float, ...], operations: NetworkOperations) -> Array:
    """See :meth:`StepCosts.rates`."""
    of_units: Array = np.einsum("f,bfa->ba", np.array(weights[1:]), operations.by_block)
    return of_units


@lru_cache(maxsize=1024)
def _of_blocks(
    weights: tuple[float, ...], operations: NetworkOperations, shapes: tuple[SequenceShape, ...]
) -> Array:
    """(modes, blocks) milliseconds that a row adds to each block in each of :data:`MODES`."""
    amounts = np.array([[shape.amounts(mode) for mode in MODES] for shape in shapes]).sum(0)
    added: Array = amounts @ _rates(weights, operations).T
    return added


def refresh_interval(steps: int, most: int) -> int:
    """Without a template: from one of a row's `steps` that is computed in full to the next, at `most` so many.

    In a short run noise levels are far apart: :data:`RENEWALS` steps are in full at the least. 0 for none but these.
    """
    return min(most, math.ceil(steps / RENEWALS))


def refresh_offset(number: int, steps: int, every: int) -> int:
    """By how many steps the `number`-th of some rows that begin together renews late: the first one latest.

    So they are computed in full in different steps, and in as many. Later is better than earlier;
    `docs/results/reuse.md` has the measurements.
    """
    if every < 1:
        return 0
    last = (math.ceil(steps / every) - 1) * every
    latest = min((every - 1) // 2, steps - 1 - last)
    return latest - number % (1 + latest)


def worth_reusing(
    costs: StepCosts,
    operations: NetworkOperations,
    shapes: Sequence[SequenceShape],
    modes: Sequence[BlockMode],
    bytes_a_step: float,
) -> bool:
    """Return whether a row's step with reuse ends earlier than in full, loads behind computing: below the crossover.

    `shapes` and `modes`, of the row's blocks, are those with reuse; `bytes_a_step` are loaded on average.
    """
    whole = [replace(shape, padding=0) for shape in shapes]
    full, masked = (
        costs.step_ms(step_work(operations, of, [chosen] * len(of)))
        for of, chosen in ((whole, (BlockMode.FULL,) * len(modes)), (shapes, modes))
    )
    return max(masked, costs.load_ms(bytes_a_step)) < full
