"""The adapters that ship are small, load in diffusers, are what their cards say, and do what they are for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import FluxControlNetModel, FluxFillPipeline
from safetensors import safe_open
from safetensors.torch import load_file

from giornata_lab.model.adapters import __main__ as judging
from giornata_lab.model.adapters import lessons
from giornata_lab.model.adapters.__main__ import NAMES, controlled, edits, fill_pipeline
from giornata_lab.model.fill import PATCH_CHANNELS, Painter
from giornata_lab.model.random.text_encoders import TextEncoders
from giornata_lab.model.scenes import SceneTask, sample
from giornata_lab.model.train import adapters, export, run
from giornata_lab.model.train.run import (
    CurriculumStage,
    StagePlan,
    TrainingCurriculum,
    TrainingStateUnusable,
    digest,
)
from giornata_prepost.loras.normalisation import normalise
from giornata_tools.checkout import TRAINED

LARGEST_BYTES = {lessons.AdapterKind.LORA: 500_000, lessons.AdapterKind.CONTROLNET: 4_000_000}
LORAS = ("outlined", "swapped")
GATES = {"outlined": ("closed_rim", 0.75), "swapped": ("colour_right", 0.9), "outline": ("overlap", 0.85)}
SHORT = {**judging.OPTIONS, "num_inference_steps": 2}


@pytest.fixture(scope="module")
def pipeline() -> FluxFillPipeline:
    return fill_pipeline(TRAINED)


def net_of(one: lessons.AdapterCard) -> FluxControlNetModel:
    net: FluxControlNetModel = FluxControlNetModel.from_pretrained(one.file.parent, dtype=torch.float32)
    return net.eval()


@pytest.mark.parametrize("name", NAMES)
def test_a_file_is_the_one_of_its_card(name: str) -> None:
    one = lessons.read_card(name)
    assert one.file.stat().st_size == one.size_bytes <= LARGEST_BYTES[one.kind]
    assert lessons.sha256_of(one.file) == one.sha256
    with safe_open(one.file, framework="pt") as weights:
        assert {weights.get_slice(key).get_dtype() for key in weights.keys()} == {"F16"}  # noqa: SIM118


def test_they_were_trained_for_the_model_that_ships(pipeline: FluxFillPipeline) -> None:
    text = TextEncoders(
        pipeline.text_encoder, pipeline.tokenizer, pipeline.text_encoder_2, pipeline.tokenizer_2
    )
    assert {lessons.read_card(name).base_digest for name in NAMES} == {
        digest(Painter(pipeline.transformer, text))
    }


@pytest.mark.parametrize("name", LORAS)
def test_a_lora_is_one_that_services_take(name: str, tmp_path: Path) -> None:
    """Prepost's canonical file holds the same factors."""
    one = lessons.read_card(name)
    made = normalise(one.file, tmp_path / "canonical.safetensors", TRAINED, {})
    shipped, canonical = load_file(one.file), load_file(tmp_path / "canonical.safetensors")
    assert (made.rank, made.text_modules) == (adapters.LESSONS[name].rank, 0)
    assert made.modules == len(canonical) // 2 == len(shipped) // 2
    for key, factor in shipped.items():
        path, _, end = key.removeprefix("transformer.").partition(".lora_")
        ours = canonical[f"{path}.{'down' if end.startswith('A') else 'up'}"]
        torch.testing.assert_close(ours.float(), factor.float(), rtol=0, atol=1e-6)


def test_a_controlnet_acts_by_its_scale_and_leaves_the_pipeline_as_it_was() -> None:
    """Two steps of one edit: scale 0 is no ControlNet, and nothing stays when it is over."""
    pipeline, net = fill_pipeline(TRAINED), net_of(lessons.read_card("outline"))
    (scene,) = lessons.held_out(1)
    image = lessons.control_image(scene.asked, len(scene.mask))
    (plain,) = edits(pipeline, [scene], [0], **SHORT)
    with torch.inference_mode():
        with controlled(pipeline, net, [image], scale=0.0):
            (without,) = edits(pipeline, [scene], [0], **SHORT)
        with controlled(pipeline, net, [image]):
            (under,) = edits(pipeline, [scene], [0], **SHORT)
    (after,) = edits(pipeline, [scene], [0], **SHORT)
    assert (plain == without).all()
    assert (plain == after).all()
    assert (plain != under).any()


def test_outlined_learns_rims_and_nothing_else(tmp_path: Path) -> None:
    """A LoRA that is still zero is wrong by rims alone: where a scene gets none, there is nothing to learn."""
    state = adapters.resumed_lora("outlined", StagePlan(tmp_path, 1, 0, torch.device("cpu")))
    rng = np.random.default_rng(3)
    for task in (SceneTask.ADD, SceneTask.REMOVE):
        batch = state.encode([sample(rng, 48, task, 25.0)]).to(torch.device("cpu"))
        plain, rimmed = batch.clean.chunk(2, dim=-1)
        assert plain.shape == (1, 36, PATCH_CHANNELS)
        loss = adapters.outline_loss(state.model, batch)
        assert (float(loss.detach()) > 0.01) == (not plain.equal(rimmed)) == (task is SceneTask.ADD)


@pytest.mark.long
def test_things_keep_to_their_outlines(pipeline: FluxFillPipeline) -> None:
    scenes = lessons.held_out(10)
    with torch.inference_mode():
        assert judging.judge_outline(pipeline, net_of(lessons.read_card("outline")), scenes)["overlap"] >= 0.8
        assert judging.judge_outline(pipeline, None, scenes)["overlap"] < 0.5


@pytest.mark.long
@pytest.mark.parametrize("name", LORAS)
def test_a_lora_does_what_its_card_says(name: str) -> None:
    pipeline, one, every = fill_pipeline(TRAINED), lessons.read_card(name), judging.additions(10)
    judge = {"outlined": judging.judge_outlined, "swapped": judging.judge_swapped}[name]
    figure, _ = GATES[name]
    assert judge(pipeline, every)[figure] < 0.3, "without the LoRA"
    pipeline.load_lora_weights(one.file.parent, weight_name=one.file.name, adapter_name=name)
    assert judge(pipeline, every)[figure] >= one.measured[figure] - 0.15


@pytest.mark.long
def test_recipes_go_on_where_they_stopped_and_end_in_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "FIRST", dict.fromkeys(run.FIRST, 2))

    def small(course: TrainingCurriculum) -> TrainingCurriculum:
        return replace(course, stages=(CurriculumStage(1.01, {64: 1.0}),), rows={64: 2})

    monkeypatch.setattr(adapters, "OUTLINE", small(adapters.OUTLINE))
    shortened = {
        name: replace(lesson, course=small(lesson.course)) for name, lesson in adapters.LESSONS.items()
    }
    monkeypatch.setattr(adapters, "LESSONS", shortened)

    def plan(steps: int) -> StagePlan:
        return StagePlan(tmp_path / "state", steps, 4, torch.device("cpu"))

    with pytest.raises(TrainingStateUnusable, match="train first"):
        export.controlnets(tmp_path / "state", tmp_path)
    for steps in (1, 2):
        adapters.run_control(plan(steps))
        for name in LORAS:
            adapters.run_lora(name, plan(steps))
    export.controlnets(tmp_path / "state", tmp_path)
    export.loras(tmp_path / "state", tmp_path)
    for name in NAMES:
        one = lessons.read_card(name, tmp_path)
        assert (one.steps, one.seed, one.base_digest) == (2, 4, lessons.read_card(name).base_digest)
        place = tmp_path / one.file.relative_to(lessons.FOLDER)
        assert lessons.sha256_of(place) == one.sha256
        changed = load_file(place)
        written = [key for key in changed if ".lora_B." in key or key.startswith("controlnet_blocks")]
        assert any(changed[key].any() for key in written), "it has learnt something"
