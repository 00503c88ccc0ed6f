"""What a template is called, and when a run is worth it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from giornata.scheduling.placement import TemplateRunPolicy
from giornata.wire.jobs import picture_id
from giornata.wire.models import BlockSpec, Sampler
from giornata.wire.requests import EditParameters, Reuse
from giornata_denoiser.choices import EXACT, CacheForm
from giornata_denoiser.config import DenoiserConfig
from giornata_denoiser.families.sampling import DiscreteTime, FlowMatching, shifted_by_size
from giornata_denoiser.rows.template import FILE_BYTES, CachedBlock, CachedTemplate, Entry, store
from giornata_denoiser.templates import store as template_store
from giornata_denoiser.templates.runs import (
    ANYWHERE,
    LEVELS,
    LEVELS_TOGETHER,
    SAME,
    TemplateRunSpec,
    levels_of,
    takes_from_recordings,
    wanted_recording,
)
from tests.configs import configured
from tests.contract.messages import CARD, INSPECTION

SPEC = BlockSpec(
    heads=4,
    parts=dict.fromkeys(("key", "value", "hidden"), 192),
    linear=12.0 * 192**2,
    outside=2.0 * 192**2,
    pair=2.0 * 192,
)
CHECKPOINT: Any = SimpleNamespace(
    card=CARD,
    family=SimpleNamespace(
        schedule=FlowMatching(
            FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True).config, shifted_by_size
        ),
        specs=(SPEC,) * 6,
        depth=6,
        dtype=torch.bfloat16,
        network=SimpleNamespace(companions=lambda *_: 0, blends=True),
    ),
)

TOKENS = ((2 << 20) - 2 * 4 * 192 - FILE_BYTES) // 96
LARGE = INSPECTION.model_copy(update={"tokens": TOKENS})
"""Keys and values of a block and level are 4 MiB in 4 bits."""


def config(**options: Any) -> DenoiserConfig:
    return configured(DenoiserConfig, model="tiny", **options)


def of(tenant: str = "alice", parameters: EditParameters | None = None, **options: Any) -> TemplateRunSpec:
    return wanted_recording(config(**options), CHECKPOINT, tenant, INSPECTION, parameters)


def test_a_registration_and_an_edit_of_it_want_the_same() -> None:
    edit = EditParameters(prompt="x", reuse=Reuse.AUTO, num_inference_steps=3, strength=0.5)
    assert of().recording_id == of(parameters=edit).recording_id
    assert of(parameters=edit).tolerance == ANYWHERE


def test_what_a_recording_follows_from_is_in_its_name() -> None:
    strict = EditParameters(prompt="x", reuse=Reuse.STRICT, num_inference_steps=3, strength=1.0)
    names = {
        of().recording_id,
        of("bob").recording_id,
        of(template_bits=8).recording_id,
        of(template_form="hidden").recording_id,
        of(template_levels=3).recording_id,
        of(parameters=strict).recording_id,
    }
    assert len(names) == 5, "three levels over all of the noise are those of three steps"
    assert of(parameters=strict).tolerance == SAME


def test_networks_whose_blocks_are_taken_together_record_more_levels() -> None:
    of_unet: Any = SimpleNamespace(specs=(SPEC.model_copy(update={"together": True}),))
    default, few = config(), config(template_levels=3)
    assert [levels_of(default, CHECKPOINT.family), levels_of(default, of_unet)] == [LEVELS, LEVELS_TOGETHER]
    assert [levels_of(few, CHECKPOINT.family), levels_of(few, of_unet)] == [3, 3]


def test_all_recordings_of_a_picture_begin_alike_and_those_of_others_do_not() -> None:
    strict = EditParameters(prompt="x", reuse=Reuse.STRICT, num_inference_steps=3, strength=1.0)
    mine = picture_id("alice", INSPECTION.template_key)
    assert of().recording_id.startswith(mine)
    assert of(parameters=strict).recording_id.startswith(mine)
    assert not of("bob").recording_id.startswith(mine)


def test_a_budget_of_bytes_drops_noise_levels_and_then_blocks() -> None:
    kept = {
        budget: wanted_recording(
            config(template_levels=7, template_memory_mb=budget), CHECKPOINT, "alice", LARGE
        )
        for budget in (7 * 6 * 4, 7 * 6 * 4 - 1, 4 * 6 * 4, 4 * 3 * 4, 1)
    }
    assert [(found.track.steps, found.first_block) for found in kept.values()] == [
        (7, 0),
        (6, 0),
        (4, 0),
        (4, 3),
        (4, 6),
    ]
    assert len({found.recording_id for found in kept.values()}) == 5


def test_a_template_is_no_larger_than_the_largest_tier() -> None:
    def kept(parameters: EditParameters | None = None, **options: Any) -> tuple[int, int]:
        found = wanted_recording(config(template_levels=7, **options), CHECKPOINT, "alice", LARGE, parameters)
        return found.track.steps, found.first_block

    whole = 7 * 6 * 4
    assert kept(template_memory_mb=whole) == (7, 0)
    assert kept(template_memory_mb=4 * 6 * 4) == (4, 0)
    assert kept(template_memory_mb=4 * 6 * 4, cache_disk_mb=whole) == (4, 0), "there is no folder"
    assert kept(template_memory_mb=1, template_folder=Path("x"), cache_disk_mb=whole) == (7, 0)
    assert kept(template_memory_mb=0) == (4, 6)


def test_an_edit_that_is_strict_keeps_its_levels_and_drops_blocks() -> None:
    strict = EditParameters(prompt="x", reuse=Reuse.STRICT, num_inference_steps=12, strength=1.0)
    found = wanted_recording(config(template_memory_mb=12 * 2 * 4), CHECKPOINT, "alice", LARGE, strict)
    assert (found.track.steps, found.first_block) == (12, 4)
    short = strict.model_copy(update={"strength": 0.5})
    found = wanted_recording(config(template_memory_mb=12 * 2 * 4), CHECKPOINT, "alice", LARGE, short)
    assert (found.track.steps, found.first_block) == (6, 2)


def test_one_recording_serves_every_sampler_and_a_strict_edit_has_its_own_samplers_levels() -> None:
    schedule = DiscreteTime({"_class_name": "LCMScheduler", "beta_schedule": "scaled_linear"})
    family = SimpleNamespace(**{**vars(CHECKPOINT.family), "schedule": schedule})
    timed: Any = SimpleNamespace(card=CARD, family=family)

    def found(**fields: Any) -> TemplateRunSpec:
        asked = EditParameters(prompt="x", num_inference_steps=8, strength=1.0, **fields)
        return wanted_recording(config(template_levels=7), timed, "alice", INSPECTION, asked)

    reused = [found(sampler=sampler) for sampler in (None, Sampler.HEUN, Sampler.EULER_ANCESTRAL)]
    assert len({each.recording_id for each in reused}) == 1
    assert (reused[0].track.steps, any(reused[0].track.draws)) == (7, False)
    strict = found(sampler=Sampler.HEUN, reuse=Reuse.STRICT)
    assert strict.track.steps == 15
    assert found(reuse=Reuse.STRICT).track.draws[0], "the checkpoint's own sampler draws"


@pytest.mark.parametrize(
    ("form", "bits", "blends"),
    [*zip([*CacheForm] * 2, (0, 4, 8, 4), (True, False, False, True), strict=False)],
)
def test_a_recording_is_as_large_as_was_reckoned_with_its_file(
    tmp_path: Path, form: CacheForm, bits: int, *, blends: bool
) -> None:
    """Where a network does not blend, with the pictures in the run's latents."""
    inspection = INSPECTION.model_copy(update={"tokens": 64})
    network = SimpleNamespace(companions=lambda *_: 0, blends=blends, conditioning={"image_latents": 64})
    family = SimpleNamespace(**{**vars(CHECKPOINT.family), "network": network})
    checkpoint: Any = SimpleNamespace(card=CARD, family=family)
    options: dict[str, Any] = {"template_form": form, "template_bits": bits, "template_levels": 200}
    found = wanted_recording(config(template_memory_mb=1, **options), checkpoint, "alice", inspection)
    data = torch.zeros(64, 192, dtype=torch.bfloat16)

    def kept() -> CachedBlock:
        if form is CacheForm.KV:
            return CachedBlock(key=store(data, bits), value=store(data, bits))
        return CachedBlock(hidden=store(data, bits))

    def blocks() -> tuple[CachedBlock, ...]:
        first, *others = *[CachedBlock()] * found.first_block, *(kept() for _ in range(6 - found.first_block))
        picture = store(torch.zeros(64, 64, dtype=torch.bfloat16), EXACT)
        return first if blends else replace(first, picture=picture), *others

    entries = tuple(Entry(level, blocks()) for level in found.track.levels[:-1].tolist())
    template_store.write_recording(CachedTemplate(found.recording_id, (8, 8), entries), tmp_path / "f")
    assert 0.7 * (1 << 20) < (tmp_path / "f").stat().st_size <= 1 << 20


@pytest.mark.parametrize("edits", [1, 2])
def test_a_registered_template_is_worth_a_run_at_first_sight(edits: int) -> None:
    admission = TemplateRunPolicy(edits)
    assert admission.see("a", registered=True)
    assert [admission.see("b") for _ in range(2)] == [edits == 1, True]


def test_a_picture_that_an_earlier_edit_serves_is_recorded_later() -> None:
    admission = TemplateRunPolicy()
    assert [admission.see("a", served=number > 0) for number in range(4)] == [False, False, False, True]
    assert admission.see("b", registered=True, served=True)
    assert [admission.see("c", served=served) for served in (False, False)] == [False, True]


@pytest.mark.parametrize("default", [Sampler.PNDM, Sampler.DDIM])
def test_a_unet_takes_by_samplers_that_keep_the_picture_alone(default: Sampler) -> None:
    unet: Any = SimpleNamespace(
        specs=(SPEC.model_copy(update={"together": True}),), schedule=SimpleNamespace(default_sampler=default)
    )

    def asked(**parameters: Any) -> bool:
        return takes_from_recordings(EditParameters.model_validate({"prompt": "x", **parameters}), unet)

    assert asked(reuse=Reuse.AUTO) is (default is Sampler.DDIM)
    assert asked(reuse=Reuse.AUTO, sampler=Sampler.UNIPC)
    assert not asked(reuse=Reuse.AUTO, sampler=Sampler.EULER_ANCESTRAL)
    assert asked(reuse=Reuse.STRICT, sampler=Sampler.EULER_ANCESTRAL)
    assert not asked(reuse=Reuse.OFF, sampler=Sampler.DDIM)
