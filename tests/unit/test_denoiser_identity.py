"""What a template is called, and when a run is worth it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from giornata.requests import EditParameters, Reuse
from giornata_denoiser.config import DenoiserConfig
from giornata_denoiser.reuse.admission import Admission
from giornata_denoiser.reuse.identity import ANYWHERE, SAME, Wanted, picture_id, wanted
from tests.contract.messages import CARD, INSPECTION

CHECKPOINT: Any = SimpleNamespace(
    scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True).config,
    card=CARD,
    family=SimpleNamespace(blocks=6, width=192, dtype=torch.bfloat16),
)


def config(**options: Any) -> DenoiserConfig:
    return DenoiserConfig(model="tiny", **options)


def of(tenant: str = "alice", parameters: EditParameters | None = None, **options: Any) -> Wanted:
    return wanted(config(**options), CHECKPOINT, tenant, INSPECTION, parameters)


def test_a_registration_and_an_edit_of_it_want_the_same() -> None:
    edit = EditParameters(prompt="x", reuse=Reuse.AUTO, num_inference_steps=3, strength=0.5)
    assert of().id == of(parameters=edit).id
    assert of(parameters=edit).tolerance == ANYWHERE


def test_what_a_recording_follows_from_is_in_its_name() -> None:
    strict = EditParameters(prompt="x", reuse=Reuse.STRICT, num_inference_steps=3, strength=1.0)
    names = {
        of().id,
        of("bob").id,
        of(template_bits=8).id,
        of(template_form="hidden").id,
        of(template_levels=3).id,
        of(parameters=strict).id,
    }
    assert len(names) == 5, "three levels over all of the noise are those of three steps"
    assert of(parameters=strict).tolerance == SAME


def test_all_recordings_of_a_picture_begin_alike_and_those_of_others_do_not() -> None:
    strict = EditParameters(prompt="x", reuse=Reuse.STRICT, num_inference_steps=3, strength=1.0)
    mine = picture_id("alice", INSPECTION.template_key)
    assert of().id.startswith(mine)
    assert of(parameters=strict).id.startswith(mine)
    assert not of("bob").id.startswith(mine)


def test_a_budget_of_bytes_drops_noise_levels_and_then_blocks() -> None:
    tokens = (1 << 20) // (2 * 192) * 8  # keys and values of a block and level: 4 MiB in 4 bits
    large = INSPECTION.model_copy(update={"tokens": tokens})
    kept = {
        budget: wanted(config(template_budget_mb=budget), CHECKPOINT, "alice", large)
        for budget in (7 * 6 * 4, 7 * 6 * 4 - 1, 4 * 6 * 4, 4 * 3 * 4, 1)
    }
    assert [(found.grid.steps, found.first_block) for found in kept.values()] == [
        (7, 0),
        (6, 0),
        (4, 0),
        (4, 3),
        (4, 6),
    ]
    assert len({found.id for found in kept.values()}) == 5


@pytest.mark.parametrize("edits", [1, 2])
def test_a_registered_template_is_worth_a_run_at_first_sight(edits: int) -> None:
    admission = Admission(edits)
    assert admission.see("a", registered=True)
    assert [admission.see("b") for _ in range(2)] == [edits == 1, True]
