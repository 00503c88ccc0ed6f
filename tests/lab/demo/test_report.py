"""What the demo measures, and what it calls a failure."""

from __future__ import annotations

import numpy as np
import pytest

from giornata.wire.values import StageTimes
from giornata_gateway.views.jobs import LoraShare
from giornata_lab.demo.report import (
    ORACLE_LIMIT,
    AdapterReport,
    DemoReport,
    EditReport,
    ServiceReport,
    failings,
    max_abs_diff,
    mean_abs_diff,
)
from giornata_lab.model.adapters.lessons import AdapterKind


def edit(**changes: object) -> EditReport:
    return EditReport(
        name="astronaut",
        job_id="job_1",
        prompt="a star",
        seed=7,
        steps=8,
        width=512,
        height=512,
        mask_ratio=0.11,
        latency_s=1.5,
        stage_ms=StageTimes(prepare=1, queue=2, denoise=3, finish=4),
        outside_mask_max_abs_diff=0.0,
        inside_mask_mean_abs_diff=0.2,
        oracle="FluxFillPipeline",
        oracle_max_abs_diff=1 / 255,
    ).model_copy(update=changes)


def report(*edits: EditReport) -> DemoReport:
    return DemoReport(
        model="tiny-flux-fill",
        edits=edits or (edit(),),
        services={"gateway": ServiceReport(instances=1, version="0.1.0")},
        versions={},
        machine={},
    )


def pictures() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    before = np.full((4, 4, 3), 100, np.uint8)
    after = before.copy()
    after[0, 0] = (90, 100, 102)
    where = np.zeros((4, 4), bool)
    where[0, :2] = True
    return before, after, where


def test_differences_are_in_units_of_the_full_range() -> None:
    before, after, where = pictures()
    assert max_abs_diff(before, after) == 10 / 255
    assert max_abs_diff(before, after, ~where) == 0
    assert mean_abs_diff(before, after, where) == pytest.approx(12 / 6 / 255)


def test_two_steps_of_the_oracle_pass_and_three_fail() -> None:
    dark = np.zeros((1, 1, 3), np.uint8)
    two, three = (max_abs_diff(dark, np.full((1, 1, 3), n, np.uint8)) for n in (2, 3))
    assert two <= ORACLE_LIMIT
    assert failings(report(edit(oracle_max_abs_diff=two))) == []
    (sentence,) = failings(report(edit(oracle_max_abs_diff=three)))
    assert "FluxFillPipeline" in sentence
    assert "3/255" in sentence


def test_every_missed_threshold_is_a_sentence() -> None:
    wrong = edit(outside_mask_max_abs_diff=1 / 255, inside_mask_mean_abs_diff=0.0, oracle_max_abs_diff=0.5)
    sentences = failings(report(edit(), wrong.model_copy(update={"name": "coffee"})))
    assert len(sentences) == 3
    assert "up to 1/255" in sentences[0]
    assert all(sentence.startswith("coffee: ") for sentence in sentences)


def test_words_that_found_another_thing_are_told() -> None:
    words = {"mask_prompt": "the red circle"}
    assert failings(report(edit(**words, mask_overlap=0.5))) == []
    (sentence,) = failings(report(edit(**words, mask_overlap=0.31)))
    assert sentence.startswith('astronaut: "the red circle" found something else')
    assert "0.31" in sentence


def adapter(**changes: object) -> AdapterReport:
    return AdapterReport(
        name="swapped",
        kind=AdapterKind.LORA,
        does="exchanges colours",
        loras=(LoraShare(id="lora_1", scale=1),),
        controlnets=(),
        loras_from=0,
        without=edit(name="swapped", oracle_max_abs_diff=None),
        under=edit(name="swapped", oracle_max_abs_diff=None),
        effect_mean_abs_diff=0.1,
    ).model_copy(update=changes)


def test_edits_with_and_without_an_adapter_are_held_to_the_same_and_it_has_an_effect() -> None:
    shown = report()
    assert failings(shown.model_copy(update={"adapters": (adapter(),)})) == []
    spilt = edit(outside_mask_max_abs_diff=1 / 255)
    wrong = (adapter(without=spilt), adapter(under=spilt), adapter(effect_mean_abs_diff=0.0))
    *outside, idle = failings(shown.model_copy(update={"adapters": wrong}))
    assert len(outside) == 2
    assert all("outside the mask" in sentence for sentence in outside)
    assert idle == "swapped: The LoRA changed nothing inside the mask."
