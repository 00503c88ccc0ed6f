"""What the spans of an attempt tell."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from giornata.seeing.spans import NO_STEPS, StepSpans, span
from giornata_denoiser.attempts.attempt import Attempt
from giornata_denoiser.attempts.outcomes import template_use
from giornata_denoiser.engine.protocol import StepReport


@contextmanager
def denoising(attempt: Attempt) -> Iterator[None]:
    """The span of an attempt from its acceptance to its report; its steps are told below."""
    request = attempt.request
    with span(
        "denoise",
        job=request.job.job_id,
        attempt=request.attempt,
        rows=len(request.rows),
        mask_ratio=request.inspection.mask_ratio,
    ) as carrying:
        attempt.traced = carrying.steps()
        try:
            yield
        finally:
            attempt.traced.close()
            attempt.traced = NO_STEPS
            carrying.note(wait_ms=attempt.wait_ms, compute_ms=attempt.compute_ms)
            if attempt.rows:
                carrying.note(template=template_use(request.job, next(iter(attempt.rows.values()))).value)
            if attempt.errors:
                carrying.fail(next(iter(attempt.errors.values())).code)


def tell_step(steps: StepSpans, report: StepReport) -> None:
    """Tell a step that advanced rows of the attempt. Its sample is of the last step that is known to have ended."""
    now, sample = time.perf_counter(), report.sample
    began_ago_s, ended_ago_s = now - report.began_s, now - report.ended_s
    if sample is None:
        steps.add(began_ago_s, ended_ago_s, batch_rows=len(report.advanced))
        return
    steps.add(
        began_ago_s,
        ended_ago_s,
        batch_rows=sample.rows,
        tokens=sample.image_tokens,
        load_wait_ms=sample.waited_ms,
        loaded_bytes=sample.loaded_bytes,
    )
