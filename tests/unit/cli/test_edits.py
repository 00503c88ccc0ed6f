"""What is told of an edit: the count of steps, sentences, what the gateway sends; and where pictures go."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, Group
from rich.text import Text

from giornata.wire.errors import ErrorBody, MaskEmpty, QueueFull, from_body
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
from giornata_tools.cli.edit import EditDelivery, format_of, picture_files, preview_file
from giornata_tools.clients import http
from giornata_tools.clients.edits import (
    EditOutcome,
    EditProgress,
    PaintedPicture,
    PictureFailure,
    Preview,
    StepCount,
    sentence,
)
from giornata_tools.clients.http import (
    CompletedData,
    EventReader,
    FailedEvent,
    PartialImage,
    ServerEvent,
    read_event,
)
from giornata_tools.terminal import show, table
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


# Where pictures go, by what was typed after ``-o``.


@pytest.mark.parametrize(
    ("out", "chosen", "expected"),
    [
        ("a.png", None, OutputFormat.PNG),
        ("a.JPG", None, OutputFormat.JPEG),
        ("some.folder/a.jpeg", None, OutputFormat.JPEG),
        ("a.webp", None, OutputFormat.WEBP),
        ("a.png", OutputFormat.WEBP, OutputFormat.WEBP),
        ("a.tiff", OutputFormat.PNG, OutputFormat.PNG),
        ("-", None, OutputFormat.PNG),
        ("-", OutputFormat.JPEG, OutputFormat.JPEG),
    ],
)
def test_the_format_follows_the_suffix_unless_chosen(
    out: str, chosen: OutputFormat | None, expected: OutputFormat
) -> None:
    assert format_of(out, chosen) is expected


@pytest.mark.parametrize("out", ["a.gif", "a", "a.", ".png", "folder.png/a"])
def test_a_suffix_that_says_nothing_is_refused_by_name(out: str) -> None:
    with pytest.raises(ValueError, match=r"\.png, \.jpg, \.jpeg, \.webp"):
        format_of(out, None)


def test_several_pictures_are_numbered() -> None:
    assert picture_files("to/a.b.png", 1) == ["to/a.b.png"]
    assert picture_files("to/a.b.png", 3) == ["to/a.b-0.png", "to/a.b-1.png", "to/a.b-2.png"]
    assert picture_files("-", 1) == ["-"]
    with pytest.raises(ValueError, match="one picture, not 2"):
        picture_files("-", 2)


FULL = "/dev/full"
"""A device on which every write fails for want of space."""
PICTURES = tuple(
    PaintedPicture(index=index, seed=7 + index, data=b"picture %d" % index) for index in range(3)
)


def preview_of(index: int, data: bytes) -> Preview:
    return Preview(index=index, partial_image_index=0, step=1, box=(0, 0, 8, 8), format="webp", image=data)


def test_a_preview_lies_beside_its_picture() -> None:
    assert preview_file("to/a-1.png", preview_of(0, b"")) == "to/a-1-preview-0.webp"


@pytest.fixture
def written(tmp_path: Path) -> tuple[str, ...]:
    """The middle one cannot be written."""
    return (str(tmp_path / "e-0.png"), FULL, str(tmp_path / "e-2.png"))


def test_a_picture_that_cannot_be_written_costs_no_other(
    written: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    status = EditDelivery(written).finished(EditOutcome("job_1", "8x8", PICTURES), 1.0)
    assert status == 1
    assert [Path(written[index]).read_bytes() for index in (0, 2)] == [b"picture 0", b"picture 2"]
    *lines, error, kept = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in lines] == [written[0], written[2]]
    assert error == "Error: /dev/full cannot be written: No space left on device. [output_not_written]"
    assert "/v1/jobs/job_1/image" in kept


def test_the_report_as_json_tells_which_file_is_missing_and_why(
    written: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    poisoned = PictureFailure("Not finite.", "row_poisoned", 3)
    assert (
        EditDelivery(written, as_json=True).finished(EditOutcome("job_1", "8x8", PICTURES, (poisoned,)), 1.0)
        == 1
    )
    report = json.loads(capsys.readouterr().out)
    assert report["job_id"] == "job_1"
    assert [picture["file"] for picture in report["pictures"]] == [written[0], written[2]]
    assert [(e["code"], e["index"]) for e in report["errors"]] == [
        ("row_poisoned", 3),
        ("output_not_written", 1),
    ]


def test_a_preview_that_cannot_be_written_costs_no_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "e-preview-0.webp").mkdir()
    report = EditDelivery((str(tmp_path / "e.png"),), as_json=True)
    report.preview(preview_of(0, b"preview"))
    assert report.finished(EditOutcome("job_1", "8x8", PICTURES[:1]), 1.0) == 1
    assert (tmp_path / "e.png").read_bytes() == b"picture 0"
    captured = capsys.readouterr()
    told = json.loads(captured.out)
    assert (told["previews"], len(told["pictures"]), told["errors"][0]["code"]) == (
        [],
        1,
        "output_not_written",
    )
    assert "/v1/jobs" not in captured.err  # every picture is here


def test_a_preview_that_another_attempt_writes_is_not_missing(tmp_path: Path) -> None:
    blocked = tmp_path / "e-preview-0.webp"
    blocked.mkdir()
    report = EditDelivery((str(tmp_path / "e.png"),), quiet=True)
    report.preview(preview_of(0, b"first"))
    blocked.rmdir()
    report.preview(preview_of(0, b"second"))
    assert report.finished(EditOutcome("job_1", "8x8", PICTURES[:1]), 1.0) == 0
    assert blocked.read_bytes() == b"second"
    assert report.previews.keys() == {str(blocked)}


def test_a_preview_whose_successor_cannot_be_written_is_missing(tmp_path: Path) -> None:
    file = tmp_path / "e-preview-0.webp"
    report = EditDelivery((str(tmp_path / "e.png"),), quiet=True)
    report.preview(preview_of(0, b"first"))
    file.unlink()
    file.mkdir()
    report.preview(preview_of(0, b"second"))
    assert report.finished(EditOutcome("job_1", "8x8", PICTURES[:1]), 1.0) == 1
    assert not report.previews


ID = "lora_" + "0" * 32


def shown(width: int, *, terminal: bool) -> str:
    lines = table("id", "MB", "error", numbers={"MB"}, prose={"error"})
    lines.add_row(ID, "1.5", "a long sentence " * 10 + "[end]")
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=terminal, color_system=None, markup=False)
    show(Group(lines, Text()), Text("The end."), console=console)
    return out.getvalue()


@pytest.mark.parametrize("width", [1, 20, 40, 60, 80, 200])
@pytest.mark.parametrize("terminal", [True, False])
def test_an_id_is_whole_at_every_width(width: int, terminal: bool) -> None:
    text = shown(width, terminal=terminal)
    assert ID in text
    assert "[end]" in text, "the gateway's words are no markup"


def test_where_no_terminal_reads_a_row_is_a_line() -> None:
    lines = shown(20, terminal=False).splitlines()
    assert lines[0].split() == ["id", "MB", "error"]
    assert lines[1].startswith(ID)
    assert lines[1].rstrip().endswith("[end]")


EVIL: Final = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202ehat"


def test_an_error_is_told_without_escapes() -> None:
    told = sentence(ErrorBody(code="invalid_field", message=EVIL, received=EVIL, accepted=EVIL))
    assert told.isprintable()
    assert told.count("owned") == 3


@pytest.mark.parametrize("nested", [EVIL, [EVIL], {"name": [{"inner": EVIL}]}])
def test_answers_of_a_gateway_hold_no_escapes(nested: object) -> None:
    told = http._object(json.dumps({"value": nested, "n": 1, "lines": "a\nb", "none": None}))
    assert str(told["value"]).isprintable()
    assert (told["n"], told["lines"], told["none"]) == (1, "a\nb", None)
