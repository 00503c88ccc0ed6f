"""The track of a row, and whom its refusal names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from giornata.wire.errors import InvalidField
from giornata.wire.models import Task
from giornata.wire.requests import EditParameters, Quality
from giornata_denoiser.attempts.inputs import track_of
from giornata_denoiser.families.sampling.flow_matching import FlowMatching, shifted_by_size
from tests.fakes.fleet import CARD
from tests.fakes.tiny_flux import SCHEDULER

TURBO: Any = SimpleNamespace(
    card=CARD.model_copy(update={"default_steps": 2}),
    family=SimpleNamespace(schedule=FlowMatching(SCHEDULER | {"shift_terminal": 0.02}, shifted_by_size)),
)


@pytest.mark.parametrize(
    ("quality", "steps", "strength", "field", "received"),
    [
        ("low", 1, 1.0, "quality", "low, which is 1 steps"),
        ("auto", 1, 1.0, "num_inference_steps", "1"),
        ("high", 1, 1.0, "num_inference_steps", "1"),
        ("low", 1, 1e-20, "quality", "low, which is 1 steps"),
        ("medium", 2, 1e-20, "strength", "1e-20"),
    ],
)
def test_a_quality_whose_steps_do_not_fit_is_named(
    quality: Quality, steps: int, strength: float, field: str, received: str
) -> None:
    parameters = EditParameters(prompt="x", quality=quality, num_inference_steps=steps, strength=strength)
    with pytest.raises(InvalidField) as refused:
        track_of(parameters, TURBO, Task.EDIT, 12)
    assert (refused.value.field, refused.value.received) == (field, received)
    if field == "quality":
        assert refused.value.accepted == "at least 2 steps, by another quality or num_inference_steps"
