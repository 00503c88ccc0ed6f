"""What a planned step computes, counted for the cost model and for the router's regressions. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from giornata.planning.costs import StepCosts
from giornata.planning.operations import Amounts, Operations, Shape, Work, mean_amounts, step_work
from giornata.wire.values import Mode
from giornata.wire.workers import StepSample
from giornata_denoiser.engine.running import Running
from giornata_denoiser.engine.weighing import predicted_ms


def work_of(operations: Operations, rows: Iterable[Running], left: Sequence[bool] = ()) -> Work:
    """What a step of `rows` computes, over all blocks; rows of one set of LoRAs are one segment.

    Sequences that have `left` compute the first block alone; see :func:`lasting`.
    """
    rows = tuple(rows)
    work = step_work(operations, *_sequences(operations, rows), left)
    sets = {each.row.adapters.acting(each.row.step) for each in rows}
    return replace(work, segments=float(len(sets - {()})))


def sampled(
    operations: Operations,
    rows: Sequence[Running],
    work: Work,
    costs: StepCosts,
    *,
    missing_bytes: int,
    expected_ms: float,
) -> StepSample:
    """The sample of a step before it is measured."""
    # What each row computes at least, in a step that waits for no load.
    least_ms = [predicted_ms([each.row], costs, operations) - costs.call_ms for each in rows]
    sample = StepSample(
        rows=len(rows),
        sequences=0,
        image_tokens=0,
        text_tokens=0,
        attention_pairs=0,
        blocks=round(work.sequences) * operations.blocks,
        loaded_bytes=missing_bytes,
        assemble_ms=0.0,
        step_ms=0.0,
        predicted_ms=expected_ms,
        reusing_ms=sum(ms for each, ms in zip(rows, least_ms, strict=True) if each.row.masked),
        excess_ms=max(0.0, expected_ms - work.calls * costs.call_ms - sum(least_ms)),
    )
    return _counted(sample, work, mean_amounts(*_sequences(operations, rows)))


def shortened(
    operations: Operations,
    rows: Sequence[Running],
    sample: StepSample,
    costs: StepCosts,
    left: Sequence[Sequence[bool]],
) -> tuple[Work, StepSample]:
    """What the step of a `sample` has computed, of whose rows these sequences `left` behind its first block."""
    gone = [
        own
        for each, of in zip(rows, left, strict=True)
        for own in (*(of or (False,) * len(each.shapes)), *((False,) * len(each.row.joining)))
    ]
    planned, work = work_of(operations, rows), work_of(operations, rows, gone)
    blocks = sum(gone) * (operations.blocks - 1)
    told = sample.model_copy(
        update={
            "predicted_ms": max(0.0, sample.predicted_ms - costs.step_ms(planned) + costs.step_ms(work)),
            "blocks": sample.blocks - blocks,
            "skipped_blocks": sample.skipped_blocks + blocks,
        }
    )
    return work, _counted(told, work, mean_amounts(*_sequences(operations, rows), gone))


def _sequences(operations: Operations, rows: Iterable[Running]) -> tuple[list[Shape], list[tuple[Mode, ...]]]:
    """Shape and modes of every sequence of a step of `rows`."""
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
