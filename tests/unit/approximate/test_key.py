"""Rows have one key exactly where all that their latents depend on is equal, but for prompt and seed."""

from __future__ import annotations

import pytest

from giornata.approximate.key import key_of
from giornata.wire.adapters import ControlUse, LoraUse
from giornata.wire.jobs import BlobRef, Inspection, Job
from giornata.wire.requests import Approximate, Reuse
from giornata.wire.samplers import Sampler
from giornata.wire.step_caches import StepCache
from giornata.wire.values import CellMap
from tests.contract.messages import INSPECTION as GIVEN
from tests.contract.messages import JOB as OTHER

INSPECTION = GIVEN.model_copy(update={"mask_whole": False})
LORA = LoraUse(lora_id="lora_1", sha256="aa", size_bytes=4, rank=1, modules=1, scale=1.0)
CONTROL = ControlUse(model="c", digest="cc", image=0, scale=1.0)
IMAGE = BlobRef(key="c", size_bytes=1, sha256="01")


def edit(**parameters: object) -> Job:
    """An edit that asks for the cache."""
    asked = OTHER.parameters.model_copy(
        update={
            "approximate": Approximate.AUTO,
            "reuse": Reuse.AUTO,
            "step_cache": StepCache.OFF,
            **parameters,
        }
    )
    return OTHER.model_copy(
        update={"parameters": asked, "loras": (LORA,), "controls": (CONTROL,), "control_images": (IMAGE,)}
    )


def of(job: Job, **fields: object) -> Job:
    return job.model_copy(update=fields)


def inspected(**fields: object) -> Inspection:
    return INSPECTION.model_copy(update=fields)


@pytest.mark.parametrize(
    "other",
    [
        edit(prompt="something else"),
        edit(seed=8),
        edit(n=3),
        edit(approximate=Approximate.DEADLINE),
        of(edit(), job_id="job_2"),
        of(edit(), image=IMAGE),
        of(edit(), budget_ms=5),
    ],
)
def test_prompt_seed_and_what_no_latent_depends_on_are_not_in_it(other: Job) -> None:
    assert key_of(other, INSPECTION) == key_of(edit(), INSPECTION) is not None


@pytest.mark.parametrize(
    ("job", "inspection"),
    [
        pytest.param(of(edit(), tenant="another"), INSPECTION, id="tenant"),
        pytest.param(of(edit(), model_digest="ee"), INSPECTION, id="model"),
        pytest.param(of(edit(), loras=()), INSPECTION, id="no adapter"),
        pytest.param(of(edit(), loras=(LORA.model_copy(update={"sha256": "ab"}),)), INSPECTION, id="adapter"),
        pytest.param(of(edit(), loras=(LORA.model_copy(update={"scale": 0.5}),)), INSPECTION, id="its scale"),
        pytest.param(of(edit(), controls=()), INSPECTION, id="no ControlNet"),
        pytest.param(
            of(edit(), controls=(CONTROL.model_copy(update={"scale": 0.5}),)), INSPECTION, id="its weight"
        ),
        pytest.param(
            of(edit(), control_images=(IMAGE.model_copy(update={"sha256": "02"}),)), INSPECTION, id="image"
        ),
        pytest.param(of(edit(), references=(IMAGE,)), INSPECTION, id="reference"),
        pytest.param(edit(num_inference_steps=5), INSPECTION, id="steps"),
        pytest.param(edit(strength=0.5), INSPECTION, id="strength"),
        pytest.param(edit(step_cache=StepCache.TAYLORSEER), INSPECTION, id="step cache"),
        pytest.param(
            edit(step_cache=StepCache.TAYLORSEER, step_cache_interval=2), INSPECTION, id="its interval"
        ),
        pytest.param(edit(guidance_scale=2.0), INSPECTION, id="guidance"),
        pytest.param(edit(negative_prompt="grey"), INSPECTION, id="negative prompt"),
        pytest.param(edit(sampler=Sampler.DDIM), INSPECTION, id="sampler"),
        pytest.param(edit(reuse=Reuse.OFF), INSPECTION, id="reuse"),
        pytest.param(edit(), inspected(template_key="uu"), id="a pixel of the picture"),
        pytest.param(edit(), inspected(mask_key="nn"), id="a pixel of the mask"),
        pytest.param(edit(), inspected(model_width=80), id="size"),
        pytest.param(
            edit(), inspected(compute_set={1: CellMap(height=3, width=4, bits=b"\xef\xe0")}), id="halo"
        ),
    ],
)
def test_everything_else_is(job: Job, inspection: Inspection) -> None:
    assert key_of(job, inspection) not in (None, key_of(edit(), INSPECTION))


@pytest.mark.parametrize(
    "job",
    [
        edit(approximate=Approximate.OFF),
        edit(sampler=Sampler.UNIPC),
        of(edit(), loras=(LORA.model_copy(update={"joins_within": 0.3}),)),
    ],
)
def test_jobs_that_do_not_ask_or_whose_latents_are_no_states_have_none(job: Job) -> None:
    assert key_of(job, INSPECTION) is None


def test_an_edit_whose_mask_was_not_told_has_none() -> None:
    assert key_of(edit(), inspected(mask_key="")) is None


def alone(job: Job) -> Job:
    return of(job, loras=(), controls=(), control_images=())


def generation() -> Job:
    return of(alone(edit(reuse=Reuse.OFF)), image=None, template_id=None)


def test_under_a_mask_that_covers_all_neither_picture_nor_mask_count() -> None:
    whole = inspected(mask_whole=True)
    other = inspected(mask_whole=True, mask_key="nn", template_key="uu", compute_set=None)
    made = inspected(mask_key="", template_key="", compute_set=None)
    assert (
        key_of(alone(edit()), whole) == key_of(alone(edit()), other) == key_of(generation(), made) is not None
    )


@pytest.mark.parametrize(
    ("job", "inspection"),
    [
        (alone(edit(strength=0.5)), inspected(mask_whole=True)),
        (alone(edit()), inspected(mask_whole=True, companion_tokens=12)),
        (
            of(edit(), loras=(), controls=(CONTROL.model_copy(update={"image": None}),)),
            inspected(mask_whole=True),
        ),
    ],
    ids=["the picture is noised in part", "the network sees it", "a ControlNet sees it"],
)
def test_where_the_picture_matters_it_counts_under_such_a_mask_too(job: Job, inspection: Inspection) -> None:
    other = inspection.model_copy(update={"template_key": "uu"})
    assert key_of(job, inspection) != key_of(job, other)


def test_a_key_is_the_same_in_every_process_and_version() -> None:
    key = key_of(alone(edit()), INSPECTION)
    assert key == "e8ffc8aced62062dcdae9d9a044482842e4fbdd7c0ea6005426a6529c32d5ae8"
