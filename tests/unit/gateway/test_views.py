from __future__ import annotations

import base64

import pytest

from giornata.families import Family
from giornata.wire.errors import InvalidField, JobCancelled, ModelNotFound, RowPoisoned, ServiceUnavailable
from giornata.wire.jobs import BlobRef, Encoding, Inspection, Job, JobRecord, JobState, Priority, RowRecord
from giornata.wire.messages import JobEstimate
from giornata.wire.models import ModelCard
from giornata.wire.requests import EditParameters, OutputFormat
from giornata.wire.workers import ServiceName
from giornata_gateway.views.catalog import choose_card, find_card, model_list, ready_view
from giornata_gateway.views.jobs import (
    background_of,
    error_detail,
    error_of,
    error_type,
    images_answer,
    job_view,
)

BLOB = BlobRef(key="default/x", size_bytes=1, sha256="0" * 64)
INSPECTION = Inspection(
    width=64, height=48, has_alpha=True, model_width=64, model_height=48, output_width=128, output_height=96,
    tokens=12, compute_tokens=5, mask_ratio=0.4, template_key="t", prepared=BLOB,
)  # fmt: skip


def record_of(
    state: JobState, rows: tuple[RowRecord, ...], output_format: OutputFormat = OutputFormat.PNG
) -> JobRecord:
    parameters = EditParameters(
        prompt="x",
        model="tiny",
        n=max(1, len(rows)),
        seed=1,
        num_inference_steps=8,
        strength=0.5,
        output_format=output_format,
    )
    job = Job(
        job_id="job_1", tenant="default", gateway="g", priority=Priority.BATCH, model="tiny", model_digest="d",
        parameters=parameters, image=BLOB, budget_ms=1000, result_ttl_s=60,
    )  # fmt: skip
    encoding = Encoding(text=BLOB, text_tokens=48, rows=())
    return JobRecord(job=job, state=state, attempt=2, rows=rows, inspection=INSPECTION, encoding=encoding)


def test_an_answer_has_the_completed_pictures_and_the_errors_of_the_others() -> None:
    rows = (RowRecord(index=0, seed=1, error=RowPoisoned().body()), RowRecord(index=1, seed=2, image=BLOB))
    answer = images_answer(record_of(JobState.COMPLETED, rows), {1: b"abc"}, "http://x", 5)
    assert [base64.b64decode(item.b64_json or "") for item in answer.data] == [b"abc"]
    assert (answer.size, answer.giornata.seeds, answer.giornata.steps) == ("128x96", [2], 4)
    assert [(error.index, error.error.code) for error in answer.giornata.errors] == [(0, "row_poisoned")]
    assert (answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.total_tokens) == (60, 10, 70)
    linked = images_answer(record_of(JobState.COMPLETED, rows), None, "http://x", 5)
    assert linked.data[0].url == "http://x/v1/jobs/job_1/image?index=1"


def test_alpha_is_told_where_the_format_keeps_it() -> None:
    rows = (RowRecord(index=0, seed=1),)
    assert background_of(record_of(JobState.COMPLETED, rows)) == "transparent"
    assert background_of(record_of(JobState.COMPLETED, rows, OutputFormat.JPEG)) == "opaque"


def test_why_a_job_has_no_picture() -> None:
    assert error_of(record_of(JobState.COMPLETED, ())) is None
    assert isinstance(error_of(record_of(JobState.CANCELLED, ())), JobCancelled)
    failed = record_of(JobState.FAILED, ()).model_copy(update={"error": RowPoisoned().body()})
    assert isinstance(error_of(failed), RowPoisoned)


def test_error_classes_are_openais() -> None:
    assert [error_type(status) for status in (400, 401, 413, 429, 500, 504)] == [
        "invalid_request_error", "authentication_error", "invalid_request_error", "rate_limit_error",
        "server_error", "server_error",
    ]  # fmt: skip
    detail = error_detail(InvalidField("m", field="n", received=3, accepted="1").body(), "job_1")
    assert (detail.param, detail.received, detail.accepted, detail.job_id) == ("n", "3", "1", "job_1")


def test_steps_are_those_that_the_router_tells_and_the_slowest_picture_counts() -> None:
    rows = (
        RowRecord(index=0, seed=1, attempt=2),
        RowRecord(index=1, seed=2, attempt=3),
        RowRecord(index=2, seed=3, attempt=2, latents=BLOB),
    )
    running, forecast = record_of(JobState.RUNNING, rows), JobEstimate(steps=((0, 3),))
    view = job_view(running, "http://x", forecast)
    assert ([picture.step for picture in view.pictures], view.step, view.steps) == ([3, 0, 4], 0, 4)
    assert (view.queue_position, view.predicted_finish_s) == (None, None)
    unknown = job_view(running, "http://x")
    assert [unknown.step, *(picture.step for picture in unknown.pictures)] == [None] * 4
    waiting = job_view(record_of(JobState.QUEUED, rows), "http://x", forecast)
    assert (waiting.step, waiting.usage) == (None, None)


def card_of(name: str) -> ModelCard:
    return ModelCard(
        name=name, family=Family.FLUX_FILL, digest=name, vae_scale_factor=8, latent_channels=16, max_text_tokens=48,
        takes_guidance=False, takes_true_cfg=False, default_steps=4, default_guidance_scale=1, default_strength=1,
    )  # fmt: skip


def test_the_model_is_the_only_one_or_the_one_named() -> None:
    one, two = card_of("one"), card_of("two")
    assert choose_card({"one": one}, None, []) is one
    assert choose_card({"one": one, "two": two}, "two", []) is two
    with pytest.raises(InvalidField, match="one, two"):
        choose_card({"one": one, "two": two}, None, [])
    with pytest.raises(ModelNotFound, match="Accepted: one"):
        choose_card({"one": one}, "three", [])
    with pytest.raises(ServiceUnavailable, match="denoiser"):
        choose_card({}, "one", [ServiceName.DENOISER])


def test_an_alias_stands_for_a_model_unless_one_of_its_name_is_served() -> None:
    one, two = card_of("one"), card_of("two")
    aliases = {"gpt-image-1": "one", "two": "one", "gone": "away"}
    assert find_card("gpt-image-1", {"one": one, "two": two}, aliases) is one
    assert find_card("two", {"one": one, "two": two}, aliases) is two
    assert choose_card({"one": one, "two": two}, "gpt-image-1", [], aliases=aliases) is one
    with pytest.raises(ModelNotFound) as missed:
        find_card("gpt-image-2", {"one": one, "two": two}, aliases)
    assert missed.value.message == (
        "No running worker serves this model. Served: one, two, gpt-image-1 (stands for one). "
        "The closest is gpt-image-1."
    )
    assert missed.value.accepted == "one, two, gpt-image-1 (stands for one)"
    with pytest.raises(ModelNotFound, match="this model, which stands for away"):
        find_card("gone", {"one": one}, aliases)
    told = model_list({"one": one, "two": two}, {}, aliases=aliases)
    assert {model.id: model.aliases for model in told.data} == {"one": ["gpt-image-1"], "two": []}


def test_readiness_names_what_is_missing() -> None:
    assert ready_view({"one": card_of("one")}, [], draining=False).ready
    assert ready_view({}, [ServiceName.ROUTER], draining=True).missing == ["router", "gateway"]
    assert ready_view({}, [], draining=False).missing == ["denoiser"]


def test_readiness_names_streams_that_are_nearly_full() -> None:
    view = ready_view({"one": card_of("one")}, [], ("s80",), draining=False)
    assert (view.ready, view.nearly_full) == (True, ["s80"])
