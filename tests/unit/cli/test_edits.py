"""What is told of an edit: the count of steps, sentences, and what the gateway sends, read back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from giornata.wire.errors import MaskEmpty, QueueFull, from_body
from giornata.wire.jobs import JobRecord, JobState
from giornata.wire.messages import PreviewEvent, StateEvent, StepEvent
from giornata.wire.models import Task
from giornata.wire.requests import OutputFormat
from giornata_gateway.http.jobs import HEARTBEAT
from giornata_gateway.http.responses import frame
from giornata_gateway.views.jobs import (
    ErrorAnswer,
    ToldEvent,
    completed_event,
    error_detail,
    error_event,
    partial_image_event,
    progress_event,
)
from giornata_tools.clients.edits import EditProgress, StepCount, sentence
from giornata_tools.clients.http import (
    CompletedData,
    EventReader,
    FailedEvent,
    PartialImage,
    ServerEvent,
    read_event,
)
from tests.contract.messages import INSPECTION, JOB, ROW

RECORD = JobRecord(job=JOB, state=JobState.COMPLETED, rows=(ROW,), inspection=INSPECTION)


def told(**fields: object) -> EditProgress:
    return EditProgress.model_validate({"job_id": "j", "state": "running", "attempt": 1, **fields})


def test_steps_of_all_pictures_are_counted_and_a_new_attempt_at_one_begins_anew() -> None:
    count = StepCount(2)
    assert (count.state, count.done, count.total) == ("sending", 0, 0)
    count.hear(told(state="queued"))
    assert (count.state, count.total) == ("queued", 0)
    count.hear(told(step=3, steps=4))
    count.hear(told(index=1, step=2, steps=4))
    assert (count.done, count.total) == (5, 8)
    count.hear(told(attempt=2, step=1, steps=4))
    count.hear(told(step=4, steps=4))  # late
    assert (count.done, count.total) == (3, 8), "the other picture's attempt goes on"


def test_a_sentence_ends_with_the_code_and_says_when_to_come_again() -> None:
    assert sentence(MaskEmpty().body()).endswith("there is nothing to edit. [mask_empty]")
    told = sentence(QueueFull("Full.", received="9 jobs", accepted="8", retry_after_s=2).body())
    assert told == "Full. Received: 9 jobs. Accepted: 8. Try again in 2 s. [queue_full]"


def test_a_code_of_a_newer_gateway_is_shown_as_it_is() -> None:
    answer = ErrorAnswer(error=error_detail(MaskEmpty().body())).model_dump_json()
    body = FailedEvent.model_validate_json(answer.replace("mask_empty", "brand_new")).body("7")
    assert sentence(body).endswith("Try again in 7 s. [brand_new]")


def read(
    told: ToldEvent, sequence: int | None = None
) -> EditProgress | PartialImage | CompletedData | FailedEvent | None:
    [event] = EventReader().feed(frame(told.type, told, sequence))
    return read_event(event.kind, event.data)


def test_the_gateways_progress_is_read_back() -> None:
    step = StepEvent(job_id="j", attempt=2, index=1, step=3, steps=8)
    assert read(progress_event(Task.EDIT, step), 5) == told(attempt=2, index=1, step=3, steps=8)
    state = read(progress_event(Task.EDIT, StateEvent(job_id="j", attempt=1, state=JobState.PREPARING)))
    assert state == told(state="preparing")


def test_the_gateways_pictures_are_read_back() -> None:
    event = PreviewEvent(
        job_id="j",
        attempt=1,
        index=1,
        step=2,
        steps=4,
        partial_image_index=0,
        image=b"preview",
        format=OutputFormat.WEBP,
        box=(1, 2, 30, 40),
    )
    partial = read(partial_image_event(RECORD, event, 0))
    assert isinstance(partial, PartialImage)
    assert (partial.index, partial.step, partial.box) == (1, 2, (1, 2, 30, 40))
    assert (partial.partial_image_index, partial.format, partial.image) == (0, "webp", b"preview")
    completed = read(completed_event(RECORD, ROW, b"picture", "", 0))
    assert isinstance(completed, CompletedData)
    assert (completed.index, completed.seed, completed.data) == (ROW.index, ROW.seed, b"picture")
    assert completed.job_id == JOB.job_id
    assert completed.size == f"{INSPECTION.output_width}x{INSPECTION.output_height}"


def test_the_gateways_errors_are_read_back() -> None:
    error = MaskEmpty("No pixel.", field="mask", received="0", accepted="1 or more")
    failed = read(error_event(error, "j", 1))
    assert isinstance(failed, FailedEvent)
    assert failed.index == 1
    assert str(from_body(failed.body())) == str(error)


def test_an_event_of_a_newer_gateway_is_passed_over() -> None:
    assert read_event("image_edit.music", "[]") is None


@given(st.data())
def test_events_are_the_same_however_the_stream_is_cut(data: st.DataObject) -> None:
    told = [
        progress_event(Task.EDIT, StepEvent(job_id="jöb", attempt=1, index=0, step=n, steps=3))
        for n in (1, 2, 3)
    ]
    stream = HEARTBEAT.join(frame(event.type, event, n) for n, event in enumerate(told))
    if data.draw(st.booleans()):
        stream = stream.replace(b"\n", b"\r\n")
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)))))
    reader = EventReader()
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    found = [event for piece in pieces for event in reader.feed(piece)]
    assert [event.kind for event in found] == ["image_edit.progress"] * 3
    assert [read_event(event.kind, event.data) for event in found] == [
        EditProgress.model_validate_json(event.model_dump_json(exclude_none=True)) for event in told
    ]


def test_data_over_several_lines_and_events_without_any() -> None:
    events = EventReader().feed(b"data: a\ndata:b\n\nevent: empty\n\n: comment\n\nid: 4\ndata: c\n\n")
    assert list(events) == [ServerEvent("message", "a\nb"), ServerEvent("message", "c")]
