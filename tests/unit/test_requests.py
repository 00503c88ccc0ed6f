"""The parameters of an edit: defaults, limits, what fits together, and what a model takes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from giornata.families import Family
from giornata.wire import codec, subjects
from giornata.wire.adapters import MAX_CONTROLNETS, AskedLora, LoraWait
from giornata.wire.errors import GiornataError, InvalidField, UnknownField
from giornata.wire.jobs import BlobRef
from giornata.wire.models import DISCRETE_TIME, Guidance, ModelCard, Sampler, Task
from giornata.wire.requests import (
    MAX_REFERENCES,
    MAX_SEED,
    PROMPT_BYTES,
    EditParameters,
    GenerationParameters,
    OutputFormat,
    Reuse,
    asked,
    evaluations_of,
)
from giornata.wire.resolution import cfg_scale, fields_of, guided_by, resolve
from giornata_router.config import RouterConfig
from tests.contract.messages import JOB
from tests.fakes.fleet import CARD

INPAINT = CARD.model_copy(
    update={
        "family": Family.FLUX_INPAINT,
        "takes_true_cfg": True,
        "default_strength": 0.6,
        "default_steps": 28,
    }
)


def refusal(**fields: object) -> GiornataError:
    with pytest.raises(GiornataError) as caught:
        asked(EditParameters, {"prompt": "x", **fields})
    return caught.value


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": "  \n"}, "prompt"),
        ({"prompt": "x" * 32_001}, "prompt"),
        ({"n": "0"}, "n"),
        ({"n": 11}, "n"),
        ({"size": "0x512"}, "size"),
        ({"size": "big"}, "size"),
        ({"output_format": "tiff"}, "output_format"),
        ({"output_format": "jpeg", "output_compression": 101}, "output_compression"),
        ({"num_inference_steps": 0}, "num_inference_steps"),
        ({"num_inference_steps": 1000}, "num_inference_steps"),
        ({"guidance_scale": "nan"}, "guidance_scale"),
        ({"guidance_scale": -1}, "guidance_scale"),
        ({"strength": 0}, "strength"),
        ({"strength": 1.01}, "strength"),
        ({"seed": -1}, "seed"),
        ({"seed": MAX_SEED + 1}, "seed"),
        ({"mask_mode": "red"}, "mask_mode"),
        ({"grow_mask": -1}, "grow_mask"),
        ({"mask_blur": "inf"}, "mask_blur"),
        ({"model": "../etc/passwd"}, "model"),
        ({"user": "u" * 257}, "user"),
        ({"output_compression": 50}, "output_compression"),
        ({"output_compression": 50, "output_format": "png"}, "output_compression"),
        ({"negative_prompt": "blurry", "true_cfg_scale": 1}, "negative_prompt"),
        ({"negative_prompt": "blurry", "true_cfg_scale": 0}, "true_cfg_scale"),
        ({"true_cfg_scale": 1.5}, "negative_prompt"),
        ({"mask_prompt": "hat", "auto_edit": True, "reuse": "strict"}, "reuse"),
    ],
)
def test_a_value_out_of_range_or_without_effect_is_refused_by_name(
    fields: dict[str, object], named: str
) -> None:
    error = refusal(**fields)
    assert isinstance(error, InvalidField)
    assert error.field == named
    assert named in error.message


def test_all_mistakes_are_in_one_sentence() -> None:
    message = refusal(n=0, strength=2, size="big").message
    assert all(name in message for name in ("n:", "strength:", "size:"))


@pytest.mark.parametrize(
    ("fields", "field", "size_bytes"),
    [
        ({"prompt": "🎩" * 9_001}, "prompt", 36_004),
        ({"prompt": "🎩" * 32_000}, "prompt", 128_000),
        ({"prompt": "x" * 32_000, "negative_prompt": "é" * 2_001}, "negative_prompt", 36_002),
        ({"negative_prompt": "é" * 18_000}, "negative_prompt", 36_001),
    ],
)
def test_prompts_of_more_bytes_than_a_queue_has_room_for_are_refused(
    fields: dict[str, object], field: str, size_bytes: int
) -> None:
    error = refusal(**fields)
    assert (error.code, error.field) == ("invalid_field", field)
    assert f"have {size_bytes} bytes in UTF-8" in error.message
    assert f"at most {PROMPT_BYTES} are accepted" in str(error.accepted)


@pytest.mark.parametrize(("prompt", "negative"), [("x" * 32_000, "é" * 2_000), ("🎩" * 9_000, "")])
def test_the_jobs_with_the_longest_prompts_that_one_tenant_may_queue_fit_their_stream(
    prompt: str, negative: str
) -> None:
    ref = BlobRef(key="k" * 160, size_bytes=1 << 24, sha256="f" * 64)
    parameters = asked(EditParameters, {"prompt": prompt, "negative_prompt": negative, "user": "u" * 256})
    job = JOB.model_copy(
        update={
            "parameters": parameters,
            **dict.fromkeys(("image", "mask"), ref),
            "references": (ref,) * MAX_REFERENCES,
            "control_images": (ref,) * MAX_CONTROLNETS,
        }
    )
    options = RouterConfig.model_fields
    limits = 2 * options["queue_limit"].default
    envelope = 400  # JetStream's own, with the subject and the header
    size_bytes = len(codec.encode(job)) + envelope
    jobs = round(RouterConfig.tenant_share * limits)
    assert jobs * size_bytes <= subjects.limits(subjects.STORE_BYTES)[subjects.JOBS]


def test_fields_that_have_an_effect_together_are_accepted() -> None:
    EditParameters(prompt="x", output_format=OutputFormat.JPEG, output_compression=50)
    EditParameters(prompt="x", negative_prompt="blurry", true_cfg_scale=4)
    EditParameters(prompt="x", mask_prompt="hat", auto_edit=True, reuse=Reuse.AUTO)
    EditParameters(prompt="x", loras=(AskedLora(id=f"lora_{0:032}"),), lora_join=0.5)


def test_unknown_fields_are_refused_by_name_and_adapters_by_theirs() -> None:
    unknown = refusal(colour="teal", tint="rose")
    assert isinstance(unknown, UnknownField)
    assert unknown.message == "Unknown field: colour, tint."
    assert unknown.accepted == ", ".join(EditParameters.model_fields)
    assert refusal(guidance_rescale=0.7).code == "unknown_field"
    for alias in ("lora", "adapters", "lora_scale"):
        named = refusal(**{alias: "x"})
        assert (named.code, named.field) == ("unknown_field", alias)
        assert "loras: [{" in str(named.accepted)
    control = refusal(controlnet="x")
    assert (control.code, control.field) == ("unknown_field", "controlnet")
    assert control.accepted == 'controlnets: [{"model": "…", "image": 0}]'


LORA = f"lora_{'0' * 32}"


@pytest.mark.parametrize(
    ("loras", "field", "told"),
    [
        (["x"], "loras.0", "valid dictionary"),
        ({"id": LORA}, "loras", "valid tuple"),
        ([{"scale": 1}], "loras.0.id", "required"),
        ([{"id": "../../etc/passwd"}], "loras.0.id", "match pattern"),
        ([{"id": LORA, "scale": 4.5}], "loras.0.scale", "less than or equal to 4"),
        ([{"id": LORA, "scale": float("nan")}], "loras.0.scale", "finite"),
        ([{"id": LORA, "weight": 1}], "loras.0.weight", "not permitted"),
        ([{"id": LORA}, {"id": LORA, "scale": 0.5}], "loras", f"names {LORA} twice"),
        ([{"id": f"lora_{n:032x}"} for n in range(5)], "loras", "at most 4"),
    ],
)
def test_loras_that_are_not_accepted_are_named(loras: object, field: str, told: str) -> None:
    error = refusal(loras=loras)
    assert isinstance(error, InvalidField)
    assert error.field == field
    assert told in error.message


def test_loras_have_a_scale_of_one_and_their_order_is_kept() -> None:
    names = [f"lora_{n:032x}" for n in (3, 1, 2)]
    made = EditParameters.model_validate({"prompt": "x", "loras": [{"id": name} for name in names]})
    assert [(lora.id, lora.scale) for lora in made.loras] == [(name, 1.0) for name in names]
    assert made.lora_wait is LoraWait.EXACT


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "needs loras"),
        ({"loras": [], "lora_wait": "exact"}, "needs loras"),
        ({"loras": [{"id": LORA}], "lora_wait": "bounded"}, "lora_wait=bounded"),
    ],
)
def test_a_share_after_which_nothing_joins_is_refused(given: dict[str, object], told: str) -> None:
    error = refusal(**given, lora_join=0.5)
    assert isinstance(error, InvalidField)
    assert (error.field, str(error.received)) == ("lora_join", "0.5")
    assert told in error.message


@pytest.mark.parametrize("share", [-0.1, 1.0, float("nan"), "early"])
def test_a_share_lies_between_the_first_and_the_last_step(share: object) -> None:
    error = refusal(loras=[{"id": LORA}], lora_join=share)
    assert isinstance(error, InvalidField)
    assert error.field == "lora_join"


@pytest.mark.parametrize("kind", [EditParameters, GenerationParameters])
@pytest.mark.parametrize("value", ["off", "auto", "deadline", None])
def test_a_field_that_was_removed_is_named_with_what_holds_now(kind: type[BaseModel], value: object) -> None:
    with pytest.raises(UnknownField, match="own seed's noise") as told:
        asked(kind, {"prompt": "x", "approximate": value})
    assert (told.value.field, told.value.accepted) == ("approximate", "leave approximate out")
    with pytest.raises(UnknownField, match="step_cache_threshold was removed"):
        asked(kind, {"prompt": "x", "step_cache": "first-block", "step_cache_threshold": value})


def test_what_a_model_does_not_take_is_refused() -> None:
    plain = CARD.model_copy(update={"takes_guidance": False})
    with pytest.raises(InvalidField, match="guidance"):
        resolve(EditParameters(prompt="x", guidance_scale=3.0), plain, 1)
    with pytest.raises(InvalidField, match="negative prompt"):
        resolve(EditParameters(prompt="x", negative_prompt="y", true_cfg_scale=2.0), CARD, 1)
    with pytest.raises(InvalidField, match="classifier-free"):
        resolve(EditParameters(prompt="x", true_cfg_scale=1.0), CARD, 1)


def guided(above: float | None, **told: object) -> ModelCard:
    return CARD.model_copy(update={"guided_above": above, "default_guidance_scale": 5.0, **told})


SD, Z_IMAGE = guided(1.0, name="sd"), guided(0.0, name="z", default_guidance_scale=0.0)
QWEN = CARD.model_copy(
    update={"takes_guidance": False, "takes_true_cfg": True, "default_true_cfg_scale": 4.0}
)
DISTILLED = CARD.model_copy(update={"name": "klein", "takes_guidance": False})


def test_a_card_tells_what_guidance_scale_means() -> None:
    meanings = [card.guidance for card in (CARD, SD, Z_IMAGE, QWEN, DISTILLED)]
    assert meanings == [
        Guidance.EMBEDDED, Guidance.CLASSIFIER_FREE, Guidance.CLASSIFIER_FREE, Guidance.NONE, Guidance.NONE
    ]  # fmt: skip
    assert [card.takes_negative_prompt for card in (CARD, SD, QWEN, DISTILLED)] == [False, True, True, False]
    assert (CARD.embedded_guidance_scale, SD.embedded_guidance_scale) == (30.0, 0.0)


@pytest.mark.parametrize(
    ("card", "asked", "scale"),
    [
        (CARD, {}, None),
        (INPAINT, {}, None),
        (INPAINT, {"negative_prompt": "y", "true_cfg_scale": 2.0}, 2.0),
        (SD, {}, 5.0),
        (SD, {"guidance_scale": 1.0}, None),
        (SD, {"guidance_scale": 1.01, "negative_prompt": ""}, 1.01),
        (Z_IMAGE, {}, None),
        (Z_IMAGE, {"guidance_scale": 0.5}, 0.5),
        (QWEN, {}, None),
        (QWEN, {"negative_prompt": "y"}, 4.0),
        (QWEN, {"negative_prompt": "y", "true_cfg_scale": 1.5}, 1.5),
        (DISTILLED, {}, None),
    ],
)
def test_the_unguided_half_has_a_scale_where_it_is_computed(
    card: ModelCard, asked: dict[str, object], scale: float | None
) -> None:
    resolved = resolve(EditParameters.model_validate({"prompt": "x", **asked}), card, 1)
    assert cfg_scale(resolved, card) == scale
    assert resolve(resolved, card, 2) == resolved


def test_a_job_of_an_older_gateway_is_guided_by_its_true_cfg_scale() -> None:
    asked = EditParameters(prompt="x", negative_prompt="y", true_cfg_scale=4.0)
    job = JOB.model_copy(update={"parameters": asked})
    assert guided_by(job) == 4.0
    assert guided_by(job.model_copy(update={"cfg_scale": 2.0})) == 2.0
    assert guided_by(JOB) is None


@pytest.mark.parametrize(
    ("card", "asked"),
    [
        (INPAINT, {}),
        (SD, {"guidance_scale": 1.0}),
        (SD, {"guidance_scale": 0.0}),
        (Z_IMAGE, {}),
    ],
)
def test_a_negative_prompt_that_nothing_reads_is_refused(card: ModelCard, asked: dict[str, object]) -> None:
    with pytest.raises(InvalidField, match="reads a negative prompt with") as caught:
        resolve(EditParameters.model_validate({"prompt": "x", "negative_prompt": "y", **asked}), card, 1)
    assert caught.value.field == "negative_prompt"


def test_a_refusal_names_the_models_that_take_the_field() -> None:
    with pytest.raises(InvalidField) as caught:
        resolve(EditParameters(prompt="x", guidance_scale=3.0), DISTILLED, 1, (Z_IMAGE, SD, DISTILLED))
    assert caught.value.accepted == "leave guidance_scale out; models that take it: sd, z"
    with pytest.raises(InvalidField) as caught:
        resolve(EditParameters(prompt="x", guidance_scale=3.0), DISTILLED, 1, (DISTILLED,))
    assert caught.value.accepted == "leave guidance_scale out"
    with pytest.raises(InvalidField, match="true classifier-free"):
        resolve(EditParameters(prompt="x", negative_prompt="y", true_cfg_scale=2.0), SD, 1)


EVERY: dict[str, object] = {"guidance_scale": 3.0, "negative_prompt": "y", "true_cfg_scale": 2.0}
"""Fields that some models refuse."""


@pytest.mark.parametrize("card", [CARD, SD, Z_IMAGE, QWEN, DISTILLED, INPAINT])
def test_the_catalogue_tells_the_fields_that_are_not_refused(card: ModelCard) -> None:
    taken = fields_of(card, controlled=False, masked=False)[Task.EDIT]
    assert {"image", "mask", "template_id", "prompt", "strength", "sampler"} <= set(taken)
    for field, value in EVERY.items():
        given = {field: value} | ({"negative_prompt": "y"} if field == "true_cfg_scale" else {})
        parameters = EditParameters.model_construct(**{"prompt": "x", **given})  # type: ignore[arg-type]  # a test's own table
        try:
            resolve(parameters, card, 1)
            refused = None
        except InvalidField as error:
            refused = error.field if "takes no" in error.message else None
        assert (refused in given) == (not set(given) <= set(taken)), (card.name, field)


def test_a_model_that_generates_tells_the_fields_of_both_tasks() -> None:
    assert {"controlnets", "control_image_0"}.isdisjoint(
        fields_of(SD, controlled=False, masked=False)[Task.EDIT]
    )
    assert {"controlnets", "control_image_0"} <= set(fields_of(SD, controlled=True, masked=False)[Task.EDIT])
    assert fields_of(SD, controlled=False, masked=False).keys() == {Task.EDIT}
    both = fields_of(guided(1.0, tasks=(Task.EDIT, Task.GENERATE)), controlled=True, masked=False)
    assert "negative_prompt" in both[Task.GENERATE]
    assert {"image", "mask", "template_id", "strength", "reuse"}.isdisjoint(both[Task.GENERATE])
    assert "true_cfg_scale" not in both[Task.GENERATE] + both[Task.EDIT]
    masked = {served: fields_of(SD, controlled=False, masked=served)[Task.EDIT] for served in (False, True)}
    assert "mask_prompt" in masked[True]
    assert "mask_prompt" not in masked[False]
    assert resolve(EditParameters(prompt="x", background="transparent"), SD, 1).model == "sd", (
        "of generations alone"
    )


def test_strength_skips_steps_as_diffusers_does() -> None:
    for steps, strength, computed in (
        (28, 0.6, 17),
        (28, 1.0, 28),
        (4, 0.01, 1),
        (50, 0.5, 25),
        (3, 0.34, 2),
    ):
        asked = EditParameters(prompt="x", strength=strength, num_inference_steps=steps)
        assert evaluations_of(resolve(asked, INPAINT, 1)) == computed


DISCRETE = CARD.model_copy(
    update={
        "name": "sd",
        "samplers": DISCRETE_TIME,
        "default_sampler": Sampler.DPMPP_2M,
        "keeps_whole_steps": True,
    }
)


@pytest.mark.parametrize(
    ("sampler", "steps", "strength", "computed"),
    [
        (None, 12, 0.6, 7),
        (Sampler.HEUN, 8, 1.0, 15),
        (Sampler.HEUN, 8, 0.5, 7),
        (Sampler.PNDM, 12, 1.0, 13),
        (Sampler.PNDM, 1, 1.0, 1),
        (Sampler.LCM, 4, 0.9, 3),
    ],
)
def test_steps_are_evaluations(sampler: Sampler | None, steps: int, strength: float, computed: int) -> None:
    asked = EditParameters(prompt="x", sampler=sampler, num_inference_steps=steps, strength=strength)
    resolved = resolve(asked, DISCRETE, 1)
    assert resolved.sampler is (sampler or Sampler.DPMPP_2M)
    assert evaluations_of(resolved, keeps_whole_steps=True) == computed


def test_a_sampler_of_another_family_is_refused_with_the_models_that_take_it() -> None:
    asked = EditParameters(prompt="x", sampler=Sampler.HEUN)
    with pytest.raises(InvalidField, match="does not take the sampler heun") as refused:
        resolve(asked, INPAINT, 1, served=(INPAINT, DISCRETE))
    told = refused.value
    assert (told.field, told.received) == ("sampler", "heun")
    assert told.accepted == "euler; models that take it: sd"


def test_an_unknown_sampler_is_refused_with_those_there_are() -> None:
    error = refusal(sampler="magic")
    assert isinstance(error, InvalidField)
    assert (error.field, error.received) == ("sampler", "magic")
    assert "'dpmpp_2m'" in str(error.accepted)


@given(
    steps=st.one_of(st.none(), st.integers(1, 200)),
    strength=st.one_of(st.none(), st.floats(0.01, 1)),
    seed=st.one_of(st.none(), st.integers(0, MAX_SEED)),
    guidance=st.one_of(st.none(), st.floats(0, 100)),
)
def test_resolving_fills_in_what_is_missing_and_changes_nothing_else(
    steps: int | None, strength: float | None, seed: int | None, guidance: float | None
) -> None:
    asked = EditParameters(
        prompt="x", num_inference_steps=steps, strength=strength, seed=seed, guidance_scale=guidance
    )
    resolved = resolve(asked, INPAINT, seed=5)
    assert resolved.num_inference_steps == (28 if steps is None else steps)
    assert resolved.strength == (0.6 if strength is None else strength)
    assert resolved.seed == (5 if seed is None else seed)
    assert resolved.guidance_scale == (30.0 if guidance is None else guidance)
    assert resolved.sampler is Sampler.EULER
    assert 1 <= evaluations_of(resolved) <= resolved.num_inference_steps
    assert resolve(resolved, INPAINT, seed=6) == resolved


def test_the_seed_after_the_last_one_is_the_first() -> None:
    """torch takes as many, and ComfyUI draws from as many."""
    job = JOB.model_copy(update={"parameters": EditParameters(prompt="a hat", seed=MAX_SEED - 1, n=3)})
    assert job.seeds == (MAX_SEED - 1, MAX_SEED, 0)
    without = job.model_copy(update={"parameters": EditParameters(prompt="a hat", n=3)})
    assert without.seeds == (0, 1, 2)
    assert torch.Generator().manual_seed(MAX_SEED).initial_seed() == MAX_SEED
