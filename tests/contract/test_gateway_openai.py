"""Answers and events held against the types of the installed OpenAI package; the document against the routes."""

from __future__ import annotations

import base64
import json

from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from openai.types import (
    ImageEditCompletedEvent,
    ImageEditPartialImageEvent,
    ImageGenCompletedEvent,
    ImageGenPartialImageEvent,
    ImagesResponse,
)

from giornata.wire.adapters import CONTROL_IMAGES
from giornata.wire.errors import BY_CODE
from giornata.wire.jobs import BlobRef, Encoding, Inspection, Job, JobRecord, JobState, Priority, RowRecord
from giornata.wire.messages import PreviewEvent
from giornata.wire.requests import PROMPTS_FIT, EditParameters, OutputFormat
from giornata.wire.workers import ServiceName, ServiceState, WorkerState
from giornata_gateway.http import server
from giornata_gateway.http.a1111 import A1111_ROUTES
from giornata_gateway.http.responses import frame
from giornata_gateway.http.routes import FOLLOWED, ROUTES, document
from giornata_gateway.jobs.preparation import HEADER
from giornata_gateway.rules.a1111_forms import TextToImage
from giornata_gateway.rules.forms import EditForm, GenerationForm, GenerationJobForm, JobForm
from giornata_gateway.views.catalog import fleet_view
from giornata_gateway.views.jobs import completed_event, images_answer, partial_image_event
from giornata_router.fleet_reports import StepRates, report

BLOB = BlobRef(key="default/x", size_bytes=1, sha256="0" * 64)


@st.composite
def completed_records(draw: st.DrawFn) -> JobRecord:
    rows = tuple(
        RowRecord(index=i, seed=draw(st.integers(0, 2**32 - 1)), image=BLOB)
        for i in range(draw(st.integers(1, 4)))
    )
    parameters = EditParameters(
        prompt="x", model="m", n=len(rows), seed=0, num_inference_steps=draw(st.integers(1, 50)), strength=1.0,
        output_format=draw(st.sampled_from(OutputFormat)),
    )  # fmt: skip
    side, tokens = st.integers(16, 4096), st.integers(1, 4096)
    inspection = Inspection(
        width=1, height=1, has_alpha=draw(st.booleans()), model_width=16, model_height=16, output_width=draw(side),
        output_height=draw(side), tokens=draw(tokens), compute_tokens=draw(tokens), mask_ratio=draw(st.floats(0, 1)),
        template_key="t", prepared=BLOB,
    )  # fmt: skip
    job = Job(
        job_id="job_1", tenant="default", gateway="g", priority=Priority.BATCH, model="m", model_digest="d",
        parameters=parameters, image=BLOB, budget_ms=1, result_ttl_s=1,
    )  # fmt: skip
    encoding = Encoding(text=BLOB, text_tokens=draw(tokens), rows=())
    return JobRecord(job=job, state=JobState.COMPLETED, rows=rows, inspection=inspection, encoding=encoding)


def generation(record: JobRecord) -> JobRecord:
    """The record of a job without image."""
    return record.model_copy(update={"job": record.job.model_copy(update={"image": None})})


@given(completed_records(), st.binary(max_size=50), st.booleans())
def test_every_answer_is_one_that_openais_types_accept(
    record: JobRecord, picture: bytes, linked: bool
) -> None:
    pictures = None if linked else {row.index: picture for row in record.images}
    answer = json.loads(images_answer(record, pictures, "http://x", 5).model_dump_json())
    parsed = ImagesResponse.model_validate(answer, strict=True)
    assert parsed.usage is not None
    assert parsed.usage.total_tokens == parsed.usage.input_tokens + parsed.usage.output_tokens
    assert len(parsed.data or []) == len(record.rows)


@given(completed_records(), st.binary(max_size=50))
def test_every_completed_event_is_one_that_openais_types_accept(record: JobRecord, picture: bytes) -> None:
    event = completed_event(record, record.rows[0], picture, "http://x", 5)
    ImageEditCompletedEvent.model_validate(json.loads(event.model_dump_json(exclude_none=True)), strict=True)
    event = completed_event(generation(record), record.rows[0], picture, "http://x", 5)
    ImageGenCompletedEvent.model_validate(json.loads(event.model_dump_json(exclude_none=True)), strict=True)
    assert event.usage.input_tokens_details.image_tokens == 0


@given(completed_records(), st.binary(max_size=50), st.integers(0, 15))
def test_every_partial_image_is_one_that_openais_types_accept(
    record: JobRecord, image: bytes, number: int
) -> None:
    event = PreviewEvent(
        job_id="job_1", attempt=1, index=0, step=3, steps=9, partial_image_index=number, image=image,
        format=OutputFormat.JPEG, box=(1, 2, 3, 4), size=(5, 6),
    )  # fmt: skip
    told = json.loads(partial_image_event(record, event, 5).model_dump_json())
    parsed = ImageEditPartialImageEvent.model_validate(told, strict=True)
    assert base64.b64decode(parsed.b64_json) == image
    assert (parsed.partial_image_index, parsed.created_at) == (number, 5)
    assert (parsed.output_format, parsed.size, parsed.background) == ("jpeg", "5x6", "opaque"), (
        "those of the preview"
    )
    assert told["media_type"] == "image/jpeg"
    assert told["box"] == [1, 2, 3, 4]
    assert ImageEditPartialImageEvent.model_fields.keys() <= told.keys()
    told = json.loads(partial_image_event(generation(record), event, 5).model_dump_json())
    ImageGenPartialImageEvent.model_validate(told, strict=True)


def test_the_document_has_every_route_and_no_other() -> None:
    paths = document()["paths"]
    documented = {
        (path, method)
        for path, item in paths.items()
        for method in item
        if method in {"get", "post", "put", "delete"}
    }
    app = web.Application()
    app.add_routes(map(server.served, ROUTES))
    served = {
        (route.resource.canonical, route.method.lower()) for route in app.router.routes() if route.resource
    }
    assert documented == {(path, method) for path, method in served if method != "head"}


def test_the_document_is_valid_and_has_every_field_and_code() -> None:
    described = document()
    from openapi_spec_validator import validate  # noqa: PLC0415 - takes a second, of each worker

    validate(described)
    schemas = described["components"]["schemas"]
    for form in (EditForm, JobForm):
        assert set(schemas[form.__name__]["properties"]) == {
            *form.model_fields,
            "image",
            "mask",
            "reference",
            *CONTROL_IMAGES,
        }
        assert schemas[form.__name__]["additionalProperties"] is False
    for told in (GenerationForm, GenerationJobForm):
        assert set(schemas[told.__name__]["properties"]) == {*told.model_fields, "reference", *CONTROL_IMAGES}
        assert schemas[told.__name__]["additionalProperties"] is False
    assert set(described["paths"]["/v1/images/generations"]["post"]["requestBody"]["content"]) == {
        "application/json"
    }
    assert all(f"`{code}`" in described["info"]["description"] for code in BY_CODE)


def test_whatever_takes_a_prompt_says_how_many_bytes_it_may_have_beside_a_negative_one() -> None:
    schemas = document((*ROUTES, *A1111_ROUTES))["components"]["schemas"]
    described = {
        name: [told["properties"][field].get("description", "") for field in ("prompt", "negative_prompt")]
        for name, told in schemas.items()
        if {"prompt", "negative_prompt"} <= told.get("properties", {}).keys()
    }
    forms = (EditForm, JobForm, GenerationForm, GenerationJobForm, TextToImage)
    assert described.keys() >= {form.__name__ for form in forms}
    silent = [name for name, texts in described.items() if not all(PROMPTS_FIT in text for text in texts)]
    assert silent == []


def test_links_lead_to_operations_by_parameters_that_they_have_and_values_that_answers_have() -> None:
    described = document()
    operations = {told["operationId"]: told for item in described["paths"].values() for told in item.values()}
    assert operations.keys() >= FOLLOWED.keys()
    led_to = set()
    for told in operations.values():
        for answer in told["responses"].values():
            for link in answer.get("links", {}).values():
                led_to.add(link["operationId"])
                target = operations[link["operationId"]]
                required = {one["name"] for one in target["parameters"] if one.get("required")}
                [(name, expression)] = link["parameters"].items()
                assert {name} == required
                schema = answer["content"]["application/json"]["schema"]
                for part in expression.removeprefix("$response.body#/").split("/"):
                    schema = (
                        described["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
                        if "$ref" in schema
                        else schema
                    )
                    schema = schema["items"] if part == "0" else schema["properties"][part]
                assert schema["type"] == "string"
    ids = {
        told["operationId"]
        for path, item in described["paths"].items()
        if "{" in path
        for told in item.values()
    }
    assert led_to == ids, "whatever takes an id is led to"


def test_what_takes_an_idempotency_key_says_so_and_what_it_may_answer() -> None:
    keyed = set()
    for path, item in document()["paths"].items():
        for method in {"get", "post", "put", "delete"} & item.keys():
            names = {parameter["name"] for parameter in item[method].get("parameters", [])}
            taken = HEADER in names
            told = "422" in item[method]["responses"]
            assert taken == (told and path != "/v1/masks"), (
                method,
                path,
            )  # where nothing is found, it is no job
            if taken:
                keyed.add((path, method))
                [success] = [told for status, told in item[method]["responses"].items() if status < "300"]
                assert {"Idempotent-Replayed", "RateLimit", "RateLimit-Policy"} == success["headers"].keys()
    routes = ("/v1/images/edits", "/v1/images/generations", "/v1/jobs")
    assert keyed == {(route, "post") for route in routes}


def test_what_changes_something_may_be_refused_to_pages_of_other_sites() -> None:
    for path, item in document()["paths"].items():
        for method in {"get", "post", "put", "delete"} & item.keys():
            refused = "`cross_site`" in item[method]["responses"].get("403", {}).get("description", "")
            assert refused == (method != "get"), (method, path)


def test_the_fleets_stream_leaves_out_nothing_that_the_document_requires() -> None:
    idle = WorkerState(capacity_rows=1, capacity_tokens=1)
    states = [
        ServiceState(
            service=ServiceName.ROUTER, instance="r", host="h", version="1", ready=True, active=False
        ),
        ServiceState(
            service=ServiceName.DENOISER, instance="d", host="h", version="1", ready=True, worker=idle
        ),
    ]
    told = (
        frame("fleet", fleet_view([report(one, StepRates(), 0.0) for one in states]))
        .decode()
        .partition("data: ")[2]
    )
    data, schemas = json.loads(told), document()["components"]["schemas"]
    assert data.keys() < schemas["FleetView"]["properties"].keys(), "nothing is unknown in this test"
    router, denoiser = data["instances"]
    for name, value in (
        ("FleetView", data),
        ("InstanceView", router),
        ("InstanceView", denoiser),
        ("WorkerView", denoiser["worker"]),
    ):
        assert set(schemas[name]["required"]) <= value.keys() <= schemas[name]["properties"].keys()
