"""What the doors answer: jobs, models, templates, and whether the gateway is ready."""

from __future__ import annotations

import base64

import pytest

from giornata.wire.errors import (
    BadRequest,
    InvalidField,
    JobCancelled,
    ModelNotFound,
    RowPoisoned,
    ServiceUnavailable,
    UnknownField,
)
from giornata.wire.jobs import BlobRef, Encoding, JobRecord, JobState, RowRecord
from giornata.wire.messages import JobEstimate
from giornata.wire.models import ModelCard
from giornata.wire.requests import EditParameters, OutputFormat
from giornata.wire.templates import TemplateRecord
from giornata.wire.workers import ServiceName
from giornata_gateway.fleet import choose_card, find_card
from giornata_gateway.http.requests import check_query, number_of
from giornata_gateway.http.resources import MAX_WAIT_MS
from giornata_gateway.rules.forms import RequestBody, read_template_form
from giornata_gateway.views.catalog import model_list, ready_view
from giornata_gateway.views.jobs import (
    background_of,
    error_detail,
    error_of,
    error_type,
    images_answer,
    job_view,
)
from giornata_gateway.views.resources import TemplateList, page, template_view
from tests.contract.messages import INSPECTION, JOB, TEMPLATE
from tests.fakes.fleet import CARD

BLOB = BlobRef(key="default/x", size_bytes=1, sha256="0" * 64)
SEEN = INSPECTION.model_copy(
    update={"has_alpha": True, "output_width": 128, "output_height": 96, "compute_tokens": 5}
)


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
    job = JOB.model_copy(update={"parameters": parameters})
    encoding = Encoding(text=BLOB, text_tokens=48, rows=())
    return JobRecord(job=job, state=state, attempt=2, rows=rows, inspection=SEEN, encoding=encoding)


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
    return CARD.model_copy(update={"name": name, "digest": name})


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


# Templates at the doors: forms, pages, queries.


def record(number: int) -> TemplateRecord:
    return TEMPLATE.model_copy(update={"template_id": f"template_{number}"})


def test_a_registration_has_an_image_a_model_and_a_size() -> None:
    form = read_template_form(RequestBody((("model", "tiny"), ("size", "128x96")), b"x", None))
    assert (form.model, form.size) == ("tiny", "128x96")
    assert read_template_form(RequestBody((), b"x", None)).size == "auto"
    with pytest.raises(InvalidField, match="its edits bring masks") as refused:
        read_template_form(RequestBody((), b"x", b"mask"))
    assert refused.value.field == "mask"
    with pytest.raises(InvalidField) as refused:
        read_template_form(RequestBody((), b"x", None, control_images=(b"c",)))
    assert refused.value.field == "control_image_0"
    with pytest.raises(UnknownField, match="prompt"):
        read_template_form(RequestBody((("prompt", "x"),), b"x", None))
    with pytest.raises(InvalidField, match="twice"):
        read_template_form(RequestBody((("size", "auto"), ("size", "auto")), b"x", None))
    with pytest.raises(InvalidField) as refused:
        read_template_form(RequestBody((("size", "large"),), b"x", None))
    assert refused.value.field == "size"
    with pytest.raises(InvalidField) as refused:
        _ = RequestBody((), None, None).picture
    assert refused.value.field == "image"


def test_a_template_is_told_without_its_tenant() -> None:
    view = template_view(TEMPLATE).model_dump(mode="json")
    assert (view["id"], view["state"], view["bytes"], view["error"]["code"]) == (
        "template_1", "recording", 512, "row_poisoned",
    )  # fmt: skip
    assert "tenant" not in view
    assert template_view(TEMPLATE.model_copy(update={"error": None})).error is None
    assert RowPoisoned.code == view["error"]["code"]


def listed(records: list[TemplateRecord], after: str | None) -> TemplateList:
    return page(TemplateList, template_view, records, "template_id", limit=2, after=after)


def test_pages_follow_each_other_to_the_end() -> None:
    records = [record(number) for number in range(5)]
    first = listed(records, None)
    assert ([view.id for view in first.data], first.has_more) == (["template_0", "template_1"], True)
    second = listed(records, "template_1")
    assert ([view.id for view in second.data], second.has_more) == (["template_2", "template_3"], True)
    last = listed(records, "template_3")
    assert ([view.id for view in last.data], last.has_more) == (["template_4"], False)
    with pytest.raises(InvalidField, match="after"):
        listed(records, "template_9")


@pytest.mark.parametrize(
    "text", ["", "-1", "x", "101", "1e3", "\u0663", "9" * 40, "1" * 5000, "0" * 5000 + "1", "0000000001"]
)
def test_a_query_takes_whole_numbers_within_limits(text: str) -> None:
    with pytest.raises(InvalidField, match="1 to 100"):
        number_of({"limit": text}, "limit", 20, 100, least=1)
    if len(text) > 9:
        with pytest.raises(InvalidField, match="0 to 60000"):
            number_of({"wait_ms": text}, "wait_ms", 0, MAX_WAIT_MS)


def test_a_query_is_read_by_name() -> None:
    assert number_of({"limit": "7"}, "limit", 20, 100) == 7
    assert number_of({}, "limit", 20, 100) == 20
    check_query(["limit"], "limit", "after")
    with pytest.raises(BadRequest, match="page"):
        check_query(["page"], "limit")
