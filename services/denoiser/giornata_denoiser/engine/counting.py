"""What a planned step computes, counted for the cost model and for the router's regressions. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from giornata.planning.costs import StepCosts
from giornata.planning.operations import Amounts, Operations, Shape, Work, mean_amounts, step_work
from giornata.wire.values import Mode
from giornata.wire.workers import StepSample
from giornata_denoiser.engine.running import Running
from giornata_denoiser.engine.weighing import predicted_ms


def work_of(operations: Operations, rows: Iterable[Running], left: Sequence[bool] = ()) -> Work:
    """What a step of `rows` computes, over all blocks; rows of one set of LoRAs are one segment.

    Sequences that have `left` compute the first block alone; they are in the order of :func:`_sequences`.
    """
    rows = tuple(rows)
    work = step_work(operations, *_sequences(operations, rows), left)
    sets = {each.row.adapters.acting(each.row.step) for each in rows}
    return replace(work, segments=float(len(sets - {()})))


@dataclass(frozen=True, eq=False)
class Counts:
    """The rows of a step as it was planned, by these costs."""

    operations: Operations
    rows: Sequence[Running]
    work: Work
    costs: StepCosts

    def sampled(self, *, missing_bytes: int, planned_ms: float) -> StepSample:
        """The sample of the step before it is measured; loads alone end it after `planned_ms`."""
        operations, work, costs = self.operations, self.work, self.costs
        expected_ms = max(planned_ms, costs.step_ms(work))
        # What each row computes at least, in a step that waits for no load.
        least_ms = [predicted_ms([each.row], costs, operations) - costs.call_ms for each in self.rows]
        sample = StepSample(
            rows=len(self.rows),
            sequences=0,
            image_tokens=0,
            text_tokens=0,
            attention_pairs=0,
            blocks=round(work.sequences) * operations.blocks,
            loaded_bytes=missing_bytes,
            assemble_ms=0.0,
            step_ms=0.0,
            predicted_ms=expected_ms,
            reusing_ms=sum(ms for each, ms in zip(self.rows, least_ms, strict=True) if each.row.masked),
            excess_ms=max(0.0, expected_ms - work.calls * costs.call_ms - sum(least_ms)),
        )
        return _counted(sample, work, mean_amounts(*_sequences(operations, self.rows)))

    def shortened(self, sample: StepSample, left: Sequence[Sequence[bool]]) -> tuple[Work, StepSample]:
        """What the step has computed, of whose rows these sequences `left` behind the first block."""
        operations, costs = self.operations, self.costs
        gone = [
            own
            for each, of in zip(self.rows, left, strict=True)
            for own in (*(of or (False,) * len(each.shapes)), *((False,) * len(each.row.joining)))
        ]
        work = work_of(operations, self.rows, gone)
        blocks = sum(gone) * (operations.blocks - 1)
        saved_ms = costs.step_ms(self.work) - costs.step_ms(work)
        told = sample.model_copy(
            update={
                "predicted_ms": max(0.0, sample.predicted_ms - saved_ms),
                "blocks": sample.blocks - blocks,
                "skipped_blocks": sample.skipped_blocks + blocks,
            }
        )
        return work, _counted(told, work, mean_amounts(*_sequences(operations, self.rows), gone))


def _sequences(operations: Operations, rows: Iterable[Running]) -> tuple[list[Shape], list[tuple[Mode, ...]]]:
    """Shape and modes of every sequence of a step of `rows`, row by row; its prefixes follow a row's own."""
    shapes: list[Shape] = []
    modes: list[tuple[Mode, ...]] = []
    for each in rows:
        shapes += each.shapes
        modes += [each.computed(operations.blocks)] * len(each.shapes)
        shapes += each.row.joining
        modes += [(Mode.FULL,) * operations.blocks] * len(each.row.joining)
    return shapes, modes


def _counted(sample: StepSample, work: Work, amounts: Amounts) -> StepSample:
    """`sample` with what is counted of its step."""
    return sample.model_copy(
        update={
            "sequences": round(work.sequences),
            "image_tokens": round(amounts.image),
            "text_tokens": amounts.text,
            "projected_tokens": round(amounts.projected),
            "attention_pairs": round(amounts.pairs),
            "calls": round(work.calls),
            "linear": work.linear,
            "attention": work.attention,
            "convolution": work.convolution,
            "gathered": work.gathered,
            "low_rank": work.low_rank,
            "segments": round(work.segments),
            "control": work.control,
        }
    )
