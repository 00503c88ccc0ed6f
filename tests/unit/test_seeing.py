"""What is seen of a process: spans where tracing is on, and lines of the log, which hold no secret."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanContext

from giornata import tracing
from giornata.logs import escape_controls, without_secrets
from giornata.otlp import add_ids
from giornata.tracing import NO_SPAN, NO_STEPS, STEPS, SpanAttributes, TraceSpanKind, attribute
from giornata.wire import subjects
from giornata.wire.errors import InternalError, MaskEmpty
from tests.fakes.spans import telling
from tests.present import present

SAMPLED = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
UNSAMPLED = {"traceparent": SAMPLED["traceparent"][:-1] + "0"}


@pytest.fixture
def told() -> Iterator[InMemorySpanExporter]:
    """Tracing is on, and this is where spans go."""
    with telling() as exporter:
        yield exporter


def context(one: ReadableSpan) -> SpanContext:
    return present(one.get_span_context())


def named(told: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {one.name: one for one in told.get_finished_spans()}


def test_off_there_is_one_span_and_one_place_for_steps_and_no_header() -> None:
    assert tracing.span("a", root=True, job="j") is NO_SPAN
    with tracing.span("a", root=True) as one:
        assert one.steps() is NO_STEPS
        assert tracing.headers() is None
        assert tracing.traceparent() is None


def test_the_page_names_all_that_may_be_told() -> None:
    page = (Path(__file__).parents[2] / "docs" / "seeing.md").read_text(encoding="utf-8")
    told = {attribute(name).removeprefix("giornata.") for name in SpanAttributes.__annotations__}
    assert sorted(name for name in told if f"`{name}`" not in page) == []


def test_a_span_needs_one_around_it_unless_a_trace_begins_there(told: InMemorySpanExporter) -> None:
    assert tracing.span("alone") is NO_SPAN
    with tracing.span("door", root=True), tracing.span("inside"):
        pass
    found = named(told)
    assert found["inside"].parent == found["door"].context


def test_a_span_goes_on_with_the_trace_that_a_message_brings(told: InMemorySpanExporter) -> None:
    with tracing.span("answer", TraceSpanKind.ANSWERS, parent={"TraceParent": SAMPLED["traceparent"]}):
        carried = tracing.headers()
    assert present(carried)["traceparent"].split("-")[1] == SAMPLED["traceparent"].split("-")[1]
    assert named(told)["answer"].parent is not None


def test_a_trace_that_is_not_sampled_is_not_told_and_travels_on(told: InMemorySpanExporter) -> None:
    with tracing.span("door", root=True, parent=UNSAMPLED):
        carried = tracing.headers()
        assert tracing.span("inside") is NO_SPAN
    assert carried is not None
    assert carried["traceparent"].startswith(UNSAMPLED["traceparent"][:36])
    assert carried["traceparent"].endswith("-00")
    assert named(told) == {}


@pytest.mark.parametrize("header", ["", "x", "00-0-0-01", "ff-" + "0" * 32 + "-" + "0" * 16 + "-01"])
def test_a_header_that_is_none_begins_a_trace_of_its_own(told: InMemorySpanExporter, header: str) -> None:
    with tracing.span("door", root=True, parent={"traceparent": header}):
        pass
    assert named(told)["door"].parent is None


def test_no_parent_means_none_though_a_span_is_present(told: InMemorySpanExporter) -> None:
    with tracing.span("door", root=True), tracing.span("job", root=True, parent=tracing.below(None)):
        pass
    assert named(told)["job"].parent is None


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_the_share_decides_for_traces_that_begin_here_alone(share: float) -> None:
    with telling(share) as exporter:
        with tracing.span("own", root=True):
            pass
        with tracing.span("brought", root=True, parent=SAMPLED):
            pass
    assert {one.name for one in exporter.get_finished_spans()} == {"brought"} | ({"own"} if share else set())


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (MaskEmpty(received="secret"), "mask_empty"),
        (InternalError("secret"), "internal_error"),
        (ValueError("secret"), "ValueError"),
        (asyncio.CancelledError(), "cancelled"),
    ],
)
def test_an_error_is_told_by_its_code_and_never_by_its_text(
    told: InMemorySpanExporter, error: BaseException, code: str
) -> None:
    with pytest.raises(type(error)), tracing.span("door", root=True):
        raise error
    [one] = told.get_finished_spans()
    assert one.attributes == {"error.type": code}
    assert not one.status.is_ok
    assert "secret" not in one.to_json()


def test_what_was_asked_wrongly_is_no_failure_of_what_answers(told: InMemorySpanExporter) -> None:
    with pytest.raises(MaskEmpty), tracing.span("door", TraceSpanKind.ANSWERS, root=True):
        raise MaskEmpty
    [one] = told.get_finished_spans()
    assert one.attributes == {"error.type": "mask_empty"}
    assert one.status.status_code.name == "UNSET"


def test_a_second_attempt_links_to_the_first(told: InMemorySpanExporter) -> None:
    with tracing.span("job", root=True):
        with tracing.span("first") as first:
            pass
        with tracing.span("second", links=[first.traceparent or "", ""]):
            pass
    found = named(told)
    [link] = found["second"].links
    assert link.context.span_id == context(found["first"]).span_id


def test_steps_are_told_one_by_one_and_beyond_the_limit_together(told: InMemorySpanExporter) -> None:
    with tracing.span("denoise", root=True) as denoise:
        steps = denoise.steps()
        for index in range(STEPS + 7):
            steps.add(10.0 - index / 100, 9.99 - index / 100, batch_rows=2)
        steps.close()
    alone = [one for one in told.get_finished_spans() if one.name == "step"]
    together = named(told)["steps"]
    assert len(alone) == STEPS
    assert together.attributes == {"giornata.steps": 7}
    assert (present(together.end_time) - present(together.start_time)) / 1e9 == pytest.approx(0.07, abs=0.01)


def test_a_span_may_have_begun_before_it_was_known(told: InMemorySpanExporter) -> None:
    with tracing.span("job", root=True, began_ago_s=2.0):
        tracing.past("queue", 2.0)
    for one in told.get_finished_spans():
        assert (present(one.end_time) - present(one.start_time)) / 1e9 > 1.9


def test_a_line_of_the_log_names_the_trace_around_it(told: InMemorySpanExporter) -> None:
    assert add_ids(None, "info", {"event": "x"}) == {"event": "x"}
    with tracing.span("door", root=True):
        line = add_ids(None, "info", {"event": "x"})
    [one] = told.get_finished_spans()
    assert line["trace_id"] == f"{context(one).trace_id:032x}"
    assert line["span_id"] == f"{context(one).span_id:016x}"


def test_a_subjects_kind_has_no_ids() -> None:
    kinds = {
        subjects.EDIT: "edit",
        subjects.prepost("inspect", "tiny"): "prepost inspect",
        subjects.prepost_at("p1", "inspect"): "prepost inspect",
        subjects.worker("w1", "run"): "worker run",
    }
    assert {subject: subjects.kind_of(subject) for subject in kinds} == kinds


# Lines of the log: no secret, no escape of a stranger's, and nothing that leaves by another way.


KEY: Final = "gio_" + "k" * 43
PROGRAM: Final = """
import logging, sys, structlog
from giornata.logs import configure_logs
configure_logs("info", sys.argv[1], "gateway-1")
log = structlog.get_logger()
evil = "\\x1b]0;owned\\x07\\x1b[2J\\r\\nforged\\x9b1m\\u202e"
log.info("edit", user=evil, nested={"prompt": evil}, key=KEY)
try:
    raise ValueError(evil + KEY)
except ValueError as error:
    log.error("failed", exc_info=error)
logging.getLogger("aiohttp.server").error("Error handling %s", "Authorization : Bearer " + KEY + "x" * 100_000)
logging.getLogger("nats").info("not told")
log.debug("not told")
""".replace("KEY", repr(KEY))


@cache
def lines_of(form: str) -> list[str]:
    """What a process with hostile values writes to its log."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, form], capture_output=True, check=True)
    assert done.stdout == b""
    return done.stderr.decode().split("\n")[:-1]


@pytest.mark.parametrize("form", ["console", "json"])
def test_a_line_holds_no_secret_and_no_control_character(form: str) -> None:
    lines = lines_of(form)
    for line in lines:
        assert KEY not in line
        assert line.isprintable(), ascii(line)
        assert len(line) < 2000
    assert not [line for line in lines if line.startswith("forged")], "a value begins no line"
    assert sum("owned" in line for line in lines) >= 2, "it is shown, not left out"
    assert "not told" not in "".join(lines)
    [library] = [line for line in lines if "library_message" in line]
    assert "aiohttp.server" in library
    assert "Authorization : Bearer ***" in library


def test_json_keeps_a_value_as_it_is() -> None:
    told = json.loads(lines_of("json")[0])
    assert told["user"] == "\x1b]0;owned\x07\x1b[2J\r\nforged\x9b1m\u202e"
    assert told["key"] == "***"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"key {KEY}.", "key ***."),
        (f"Authorization: Basic {'QWxh' * 8}", "Authorization: Basic ***"),
        ("bearer abcdefghijklmnopqrstuvwxyz", "bearer ***"),
        (
            "redis://:pass@host:6379/0 and nats://user:pass@host",
            "redis://***@host:6379/0 and nats://***@host",
        ),
        ("whsec_QUJD/+=", "***"),
        ("the bearer of a letter, on a basic level", "the bearer of a letter, on a basic level"),
        ("a@b.c, https://host/path?x=a@b", "a@b.c, https://host/path?x=a@b"),
    ],
)
def test_secrets(text: str, shown: str) -> None:
    assert without_secrets(text) == shown


def test_visible() -> None:
    assert (
        escape_controls("é\n\x00\x7f\x85\u2028 日本\U0001f600") == "é\\n\\x00\\x7f\\x85\\u2028 日本\U0001f600"
    )
    assert escape_controls("a\n\tb\x1b", "\n\t") == "a\n\tb\\x1b"
