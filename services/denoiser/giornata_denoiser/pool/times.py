"""What steps of a pool's rows take, as its leader predicts them from what steps have taken."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from giornata.planning.costing import CostModel
from giornata.planning.operations import NetworkOperations, StepWork
from giornata.scheduling.degree_times import DegreeTimes, StepSize
from giornata.scheduling.degrees.pool import PoolRow
from giornata.scheduling.demand import RowShape, StepTimeModel
from giornata.wire.values import BlockMode
from giornata.wire.workers import StepSample
from giornata_denoiser.pool.book import RowStepTimes
from giornata_denoiser.rows.row import Row


class PoolTimes:
    """Times by degree; one thread asks and observes.

    Args:
        model: follows what steps cost, by degree.
        operations: of the network.
        reused: how rows take from templates.
        rows: most rows of a step; `tokens` likewise.
    """

    def __init__(
        self, model: CostModel, operations: NetworkOperations, reused: BlockMode, rows: int, tokens: int
    ) -> None:
        self._model, self._operations, self._reused = model, operations, reused
        self._most = rows, float(tokens)
        self._known: tuple[object, DegreeTimes] | None = None

    def of(self, row: Row) -> RowStepTimes:
        """See :data:`giornata_denoiser.pool.book.TimesOf`."""
        size = step_size(row)
        return RowStepTimes(*self._times().of(size), size)

    def together(self, rows: Sequence[PoolRow], degree: int) -> float | None:
        """See :class:`giornata.scheduling.degrees.pool.SharedStepTime`."""
        return self._times().together(rows, degree)

    def halves(self, sizes: Sequence[Hashable]) -> bool:
        """See :data:`giornata_denoiser.pool.deciding.HalvesOf`."""
        return self._times().halves([size for size in sizes if isinstance(size, StepSize)])

    def observe(self, sample: StepSample) -> None:
        """Take in a step that waited for no load."""
        work = StepWork(
            *(float(sample.calls), float(sample.sequences), sample.linear, sample.attention),
            *(sample.convolution, sample.gathered, sample.low_rank, float(sample.segments), sample.control),
        )
        self._model.observe_step(work, sample.step_ms, degree=sample.degree, halves=sample.halves)

    def _times(self) -> DegreeTimes:
        state = self._model.state
        if self._known is None or self._known[0] is not state:
            pace = StepTimeModel(
                self._model.costs, self._operations, reused=self._reused, ways=self._model.ways
            )
            self._known = state, DegreeTimes(pace, *self._most)
        return self._known[1]


def step_size(row: Row) -> StepSize:
    """What the steps of `row` compute, as far as their time depends on it."""
    shape = row.shapes[0]
    return StepSize.of(
        RowShape(
            row.prompts[0].joint_tokens,
            row.block_tokens,
            row.computed_tokens if row.template is not None or row.renews else row.block_tokens,
            steps=1,
            sequences=len(row.prompts),
            companions=row.companions,
            prefix=max(row.prefix, default=0),
            low_rank=shape.low_rank,
            segments=1 / len(row.prompts) if shape.low_rank else 0.0,
            control=shape.control,
        ),
        reuses=row.template is not None,
        renewed_every=row.renewed_every,
        corrected=row.corrections is not None,
    )
