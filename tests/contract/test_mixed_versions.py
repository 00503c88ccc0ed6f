"""Versions side by side: what a record holds is kept by every version that changes it, whether it knows it or not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path as File
from types import MappingProxyType
from typing import Any, Final

import pytest

from giornata.wire import codec, templates
from giornata.wire.errors import AttemptsExhausted, ErrorBody, Failed, InputLost, JobCancelled, from_body
from giornata.wire.jobs import Assignment, Job, JobRecord, JobState, RowState, TemplateUse
from giornata.wire.messages import SubmitRequest
from giornata.wire.requests import EditParameters
from giornata.wire.templates import TemplateRecord
from giornata.wire.values import ComputeTimes, RecordModel, StageTimes
from giornata_router import job_records
from giornata_router.job_records import JobTimes, StageTimer
from tests.contract.messages import INSPECTION, JOB, MESSAGES, REF, TEMPLATE
from tests.contract.versions import LATER, Path, next_version, parts, sown, unknown

PREVIOUS: Final = {
    name: bytes.fromhex(data)
    for name, data in map(str.split, (File(__file__).parent / "previous.txt").read_text("ascii").splitlines())
}
"""Records and a queued job as the previous version wrote them. Kept as they are while they must be readable."""
TIMES = JobTimes(StageTimes(prepare=1), ComputeTimes(inspect=1), spent_ms=5)
HELD = Assignment(1, "d1", (0,))
RECORD = next(message for message in MESSAGES if isinstance(message, JobRecord))
RUNNING = RECORD.model_copy(
    update={"rows": tuple(row.model_copy(update={"attempt": 1, "worker": "d1"}) for row in RECORD.rows)}
)

Change = Callable[[Any], Any]
CHANGES: Final[dict[str, tuple[Change, Path]]] = {
    "enter": (lambda r: job_records.entered(r, JobState.FINISHING, TIMES), ()),
    "time": (lambda r: job_records.entered(r, JobState.FINISHING, StageTimer(r, 5.0).times()), ()),
    "assign": (
        lambda r: job_records.assigned(
            _free(r), [Assignment(2, "d2", (0,))], r.inspection, r.encoding, TIMES
        ),
        (),
    ),
    "lose": (lambda r: job_records.lost(r, HELD, "it fell silent"), ()),
    "take back": (lambda r: job_records.taken_back(r, HELD), ()),
    "end": (
        lambda r: job_records.ended(
            r, tuple(row.model_copy(update={"image": REF}) for row in RUNNING.rows), TIMES
        ),
        (),
    ),
    "fail": (lambda r: job_records.closed(r, InputLost(), TIMES), ()),
    "cancel": (lambda r: job_records.closed(r, JobCancelled(), TIMES), ()),
    "ask for a cancel": (lambda r: r.model_copy(update={"cancel": True}), ()),
    "report latents": (
        lambda r: r.freed(1, "d1", lambda _: {"latents": REF, "resume": None, "template": TemplateUse.HIT}),
        (),
    ),
    "report an error": (lambda r: r.freed(1, "d1", lambda _: {"error": InputLost().body()}), ()),
    "hand back": (
        lambda r: r.freed(1, "d1", lambda _: {"resume": RowState(step=3, latents=REF)}),
        ("rows", 0, "resume"),
    ),
}
"""What services do to a job's record, and the part that they replace."""
TEMPLATE_CHANGES: Final[dict[str, tuple[Change, Path]]] = {
    "register again": (lambda t: templates.registered_again(t, REF, 5), ("error",)),
    "record": (lambda t: templates.recording(t, "d2", INSPECTION), ("error",)),
    "be ready": (lambda t: templates.ready(t, "d1", "tt", 9), ("error",)),
    "fail": (lambda t: templates.failed(t, "d1", InputLost().body()), ("error",)),
    "renew": (lambda t: templates.renewed(t, 1_700_604_000.0, 604_800), ()),
}


def _free(record: JobRecord) -> JobRecord:
    free = job_records.taken_back(record, HELD)
    assert free is not None
    return free


def changed(record: RecordModel, change: Change) -> RecordModel:
    """What another reader sees after a service has read, changed and written a record."""
    kind = type(record)
    return codec.decode(kind, codec.encode(change(codec.decode(kind, codec.encode(record)))))


def check_kept(before: RecordModel, after: RecordModel, replaced: Path) -> None:
    there = {path for path, _ in parts(after)}
    expected = {
        path: fields
        for path, fields in unknown(before).items()
        if path in there and not (replaced and path[: len(replaced)] == replaced)
    }
    assert len(expected) >= 2
    assert all(expected.values()), "each part has an unknown field"
    found = unknown(after)
    assert {path: found[path] for path in expected} == expected


def _later(path: Path) -> dict[str, object]:
    """Fields that a later version knows, other ones in each part of a record."""
    return {"path_later": str(path), "big_later": 2**64 - 1, "deep_later": [b"x", {"none": None, "pi": 3.14}]}


@pytest.mark.parametrize("name", CHANGES)
def test_every_change_of_a_jobs_record_keeps_what_it_does_not_know(name: str) -> None:
    change, replaced = CHANGES[name]
    record = sown(RUNNING, _later)
    check_kept(record, changed(record, change), replaced)


@pytest.mark.parametrize("name", TEMPLATE_CHANGES)
def test_every_change_of_a_templates_record_keeps_what_it_does_not_know(name: str) -> None:
    change, replaced = TEMPLATE_CHANGES[name]
    record = sown(TEMPLATE, _later)
    check_kept(record, changed(record, change), replaced)


def test_a_job_keeps_what_it_does_not_know_from_the_door_to_its_record() -> None:
    job = sown(JOB, _later)
    assert all(unknown(job).values()), "each part has an unknown field"
    sent = codec.decode(SubmitRequest, codec.encode(SubmitRequest(job=job, remaining_ms=1))).job
    queued = codec.decode(Job, codec.encode(sent))
    record = job_records.accepted(queued)
    assert unknown(codec.decode(JobRecord, codec.encode(record)).job) == unknown(job)
    assert queued == job


@pytest.mark.parametrize("kind", [JobRecord, TemplateRecord])
def test_what_is_unknown_is_equal_only_to_itself_and_the_hash_agrees(kind: type[RecordModel]) -> None:
    plain: Any = RUNNING if kind is JobRecord else TEMPLATE
    added: tuple[Callable[[Path], dict[str, object]], ...] = (
        lambda _: {"x": "a"},
        lambda _: {"x": "b"},
        lambda _: {"x": "a"},
    )
    one, other, again = (sown(plain, fields) for fields in added)
    assert (one == again, one == other, one == plain) == (True, False, False)
    refs = [next(part for _, part in parts(record) if type(part) is type(REF)) for record in (one, again)]
    assert refs[0] == refs[1]
    assert hash(refs[0]) == hash(refs[1])


@pytest.mark.parametrize("kind", [JobRecord, TemplateRecord])
def test_every_part_of_a_record_keeps_unknown_fields(kind: type[RecordModel]) -> None:
    properties = next_version(kind).model_json_schema(mode="serialization")
    reached = [properties, *properties.get("$defs", {}).values()]
    objects = {told["title"]: told for told in reached if told.get("type") == "object"}
    assert {name for name, told in objects.items() if LATER not in told["properties"]} == set()
    assert {name for name, told in objects.items() if told.get("additionalProperties") is not True} == set()


@pytest.mark.parametrize(
    ("kind", "name"), [(JobRecord, n) for n in CHANGES] + [(TemplateRecord, n) for n in TEMPLATE_CHANGES]
)
def test_records_of_the_previous_version_are_read_and_changed(kind: type[RecordModel], name: str) -> None:
    record = codec.decode(kind, PREVIOUS[kind.__name__])
    assert all(not fields for fields in unknown(record).values())
    if isinstance(record, JobRecord):
        change = CHANGES[name][0]
        record = record.model_copy(update={"rows": RUNNING.rows})
    else:
        change = TEMPLATE_CHANGES[name][0]
    after = changed(record, change)
    assert after != record
    assert all(not fields for fields in unknown(after).values())


def test_a_job_that_the_previous_version_queued_is_carried() -> None:
    job = codec.decode(Job, PREVIOUS["Job"])
    assert job_records.accepted(job).rows[0].seed == job.parameters.seed


def test_the_next_version_reads_what_this_one_kept() -> None:
    later = next_version(JobRecord)
    fields = MappingProxyType({LATER: "set"})
    record = codec.decode(later, codec.encode(sown(RUNNING, lambda _: fields)))
    after = codec.decode(
        later, codec.encode(changed(codec.decode(JobRecord, codec.encode(record)), CHANGES["lose"][0]))
    )
    marks = {path: getattr(part, LATER, None) for path, part in parts(after)}
    assert set(marks.values()) == {"set"}
    assert len(marks) > 12


def test_an_error_of_a_newer_version_is_raised_with_what_is_known_of_it() -> None:
    body = codec.decode(ErrorBody, codec.encode(AttemptsExhausted("so").body().model_copy(update={"why": 1})))
    assert isinstance(from_body(body), AttemptsExhausted)
    assert type(from_body(body.model_copy(update={"code": "of_tomorrow"}))) is Failed


def test_parameters_of_a_record_keep_what_a_door_refuses() -> None:
    found = codec.decode(
        Job,
        codec.encode(
            JOB.model_copy(
                update={"parameters": EditParameters.model_validate({"prompt": "x", "mood": "blue"})}
            )
        ),
    )
    assert found.parameters.model_extra == {"mood": "blue"}
