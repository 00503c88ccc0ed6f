"""What a planned step computes, counted for the cost model and for the router's regressions. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from giornata.planning.costs import StepCosts
from giornata.planning.operations import (
    NetworkOperations,
    SequenceShape,
    StepWork,
    counted,
    mean_amounts,
    step_work,
)
from giornata.wire.values import BlockMode
from giornata.wire.workers import StepSample
from giornata_denoiser.engine.running import RunningRow
from giornata_denoiser.engine.weighing import predicted_ms


def work_of(operations: NetworkOperations, rows: Iterable[RunningRow]) -> StepWork:
    """What a step of `rows` computes, over all blocks; rows of one set of LoRAs are one segment."""
    rows = tuple(rows)
    work = step_work(operations, *_sequences(operations, rows))
    sets = {each.row.adapters.acting(each.row.step) for each in rows}
    return replace(work, segments=float(len(sets - {()})))


def sampled(
    operations: NetworkOperations,
    rows: Sequence[RunningRow],
    work: StepWork,
    costs: StepCosts,
    *,
    missing_bytes: int,
    planned_ms: float,
) -> StepSample:
    """The sample of a step of `rows` before it is measured; loads alone end it after `planned_ms`."""
    expected_ms = max(planned_ms, costs.step_ms(work))
    # What each row computes at least, in a step that waits for no load.
    least_ms = [predicted_ms([each.row], costs, operations) - costs.call_ms for each in rows]
    return StepSample(
        rows=len(rows),
        **counted(work, mean_amounts(*_sequences(operations, rows))),
        blocks=round(work.sequences) * operations.blocks,
        loaded_bytes=missing_bytes,
        assemble_ms=0.0,
        step_ms=0.0,
        predicted_ms=expected_ms,
        reusing_ms=sum(ms for each, ms in zip(rows, least_ms, strict=True) if each.row.masked),
        excess_ms=max(0.0, expected_ms - work.calls * costs.call_ms - sum(least_ms)),
    )


def _sequences(
    operations: NetworkOperations, rows: Iterable[RunningRow]
) -> tuple[list[SequenceShape], list[tuple[BlockMode, ...]]]:
    """Shape and modes of every sequence of a step of `rows`, row by row; its prefixes follow a row's own."""
    shapes: list[SequenceShape] = []
    modes: list[tuple[BlockMode, ...]] = []
    for each in rows:
        shapes += each.shapes
        modes += [each.computed(operations.blocks)] * len(each.shapes)
        shapes += each.row.joining
        modes += [(BlockMode.FULL,) * operations.blocks] * len(each.row.joining)
    return shapes, modes
