"""What a denoiser knows of its steps: an instance's word is checked before anything is done about it."""

from __future__ import annotations

import pytest
import torch

from giornata.control.link.client import ControlStepHandle, ControlStepTable
from giornata.control.link.messages import ControlFailed
from giornata.frames import MalformedFrame
from giornata.wire.controlnets import Dtype, ResidualsRequest

SLAB_BYTES = 1 << 16
CANCELS: list[int] = []
"""Steps of which the instance is asked to let go."""


def asked(samples: int = 2) -> ResidualsRequest:
    sizes = (4,) * (samples + 1)
    return ResidualsRequest(
        number=0,
        row="r",
        step=0,
        level=0.5,
        whole=True,
        latents_dtype=Dtype.FLOAT32,
        dtype=Dtype.FLOAT32,
        offsets=(0,) * (samples + 1),
        tokens=sizes,
        channels=sizes,
    )


def entered(samples: int = 2) -> tuple[ControlStepTable, ControlStepHandle]:
    steps = ControlStepTable(torch.zeros(SLAB_BYTES, dtype=torch.uint8), 0.0, CANCELS.append)
    CANCELS.clear()
    return steps, steps.enter(asked(samples))


def free_bytes(steps: ControlStepTable) -> int:
    return SLAB_BYTES - sum(end - start for start, end in steps._places._taken)


@pytest.mark.parametrize(("number", "index"), [(0, 2), (0, 3), (0, 1 << 40), (1, 0), (1 << 40, 0)])
def test_a_sample_that_no_step_has_is_refused_before_it_is_taken_in(number: int, index: int) -> None:
    steps, step = entered()
    with pytest.raises(MalformedFrame):
        steps.expected(number, index)
    assert steps.expected(0, 1) is step


def test_a_sample_comes_once_and_none_after_the_last() -> None:
    steps, step = entered()
    steps.came(step, 1)
    after_one = step.under_way
    with pytest.raises(MalformedFrame):
        steps.expected(0, 1)
    steps.came(steps.expected(0, 0), 0)
    assert (after_one, step.under_way) == (True, False)
    with pytest.raises(MalformedFrame):
        steps.expected(0, 0)


def test_a_step_that_failed_gets_no_more_samples_and_keeps_what_came() -> None:
    steps, step = entered()
    steps.came(step, 0)
    steps.failed(0, "code", "message")
    with pytest.raises(MalformedFrame):
        steps.expected(0, 1)
    with pytest.raises(MalformedFrame):
        steps.failed(0, "code", "again")
    step.sample(0, 0.0)
    with pytest.raises(ControlFailed):
        step.sample(1, 0.0)


def test_a_place_is_free_once_nobody_writes_to_it() -> None:
    steps, step = entered()
    step.release()
    step.release()
    assert CANCELS == [0], "the instance is asked once"
    assert free_bytes(steps) < SLAB_BYTES
    assert steps.expected(0, 0) is step, "it may be on its way"
    steps.cancelled(0)
    assert free_bytes(steps) == SLAB_BYTES
    with pytest.raises(MalformedFrame):
        steps.cancelled(0)
    step = steps.enter(asked(1))
    steps.came(steps.expected(1, 0), 0)
    with pytest.raises(MalformedFrame):
        steps.cancelled(1)
    step.release()
    assert CANCELS == [0], "it had ended"
    assert free_bytes(steps) == SLAB_BYTES
