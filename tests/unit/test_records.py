"""Records of jobs and templates change by revision: nobody's change is lost, and what is terminal stays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nats.js.api import PubAck
from nats.js.errors import APIError, KeyNotFoundError, KeyWrongLastSequenceError
from nats.js.kv import KeyValue

from giornata.records import MAX_CONFLICTS, Change, JobRecordStore, RecordRevision
from giornata.wire import codec, templates
from giornata.wire.errors import InternalError, JobNotFound, RowPoisoned, TemplateMismatch
from giornata.wire.jobs import JobRecord, JobState
from giornata.wire.requests import EditParameters
from giornata.wire.templates import TemplateRecord, TemplateState, template_id
from tests.contract.messages import CARD, INSPECTION, JOB, REF
from tests.present import present

RECORD = JobRecord(job=JOB)


class Bucket:
    """What of a key-value bucket `JobRecordStore` uses; `meanwhile` is what others do between a read and a write."""

    def __init__(self) -> None:
        self.value = b""
        self.revision = 0
        self.reads = self.writes = 0
        self.lives_s: list[int] = []
        """Lives that revisions were given."""
        self.meanwhile: Callable[[], None] = lambda: None

    async def get(self, key: str) -> KeyValue.Entry:
        self.reads += 1
        if not self.revision:
            raise KeyNotFoundError
        entry = KeyValue.Entry("b", key, self.value, self.revision, None, None, None)
        self.meanwhile()
        return entry

    async def create(self, key: str, value: bytes) -> int:
        if self.revision:
            raise KeyWrongLastSequenceError
        return await self.update(key, value, last=0)

    async def update(self, _key: str, value: bytes, *, last: int) -> int:
        if last != self.revision:
            raise KeyWrongLastSequenceError
        self.put(value)
        return self.revision

    async def publish(self, _subject: str, value: bytes, *, headers: dict[str, str], msg_ttl: int) -> PubAck:
        """As the bucket's stream takes it."""
        try:
            last = int(headers["Nats-Expected-Last-Subject-Sequence"])
            revision = await self.update(_subject, value, last=last)
        except KeyWrongLastSequenceError as error:
            raise APIError(code=400, err_code=10071) from error
        self.lives_s.append(msg_ttl)
        return PubAck(stream="KV_jobs", seq=revision)

    def put(self, value: bytes) -> None:
        self.value, self.revision, self.writes = value, self.revision + 1, self.writes + 1


@pytest.fixture
def bucket() -> Bucket:
    return Bucket()


def kept_in(bucket: Bucket) -> JobRecordStore:
    fakes: tuple[Any, Any] = bucket, bucket  # nothing here lists records, which asks the stream
    return JobRecordStore(
        fakes[0], "jobs", fakes[1], JobRecord, lambda record: record.job.job_id, JobNotFound
    )


@pytest.fixture
async def records(bucket: Bucket) -> JobRecordStore:
    records = kept_in(bucket)
    assert await records.create(RECORD)
    return records


def failure(record: JobRecord) -> JobRecord:
    return record.model_copy(update={"causes": (*record.causes, "the worker fell silent")})


def entering(state: JobState) -> Change[JobRecord]:
    return lambda record: record.model_copy(update={"state": state})


async def test_a_change_that_comes_second_is_applied_to_the_first_ones_result(
    bucket: Bucket, records: JobRecordStore
) -> None:

    def somebody_is_faster() -> None:
        bucket.meanwhile = lambda: None
        bucket.put(codec.encode(RECORD.model_copy(update={"cancel": True})))

    bucket.meanwhile = somebody_is_faster
    changed = await records.change(JOB.job_id, failure)
    assert (changed.cancel, len(changed.causes)) == (True, 1)
    assert await records.get(JOB.job_id) == changed


async def test_a_change_of_the_known_revision_reads_nothing(bucket: Bucket, records: JobRecordStore) -> None:
    known = RecordRevision(RECORD, bucket.revision)
    for causes in (1, 2, 3):
        known = await records.revise(JOB.job_id, failure, known)
        assert (len(known.record.causes), known.revision) == (causes, bucket.revision)
    assert bucket.reads == 0
    assert await records.get(JOB.job_id) == known.record


async def test_a_known_revision_that_is_not_the_present_one_is_read_and_changed(
    bucket: Bucket, records: JobRecordStore
) -> None:
    known = RecordRevision(RECORD, bucket.revision)
    await records.change(JOB.job_id, lambda record: record.model_copy(update={"cancel": True}))
    revised = await records.revise(JOB.job_id, failure, known)
    assert (revised.record.cancel, len(revised.record.causes)) == (True, 1)
    assert await records.read(JOB.job_id) == revised


async def test_what_a_change_leaves_as_it_is_was_read_and_is_not_only_known(
    bucket: Bucket, records: JobRecordStore
) -> None:
    known = RecordRevision(RECORD, bucket.revision)
    await records.change(JOB.job_id, entering(JobState.COMPLETED))
    for change in (entering(JobState.FAILED), lambda record: record, lambda _: None):
        revised = await records.revise(JOB.job_id, change, known)
        assert revised.record.state is JobState.COMPLETED


async def test_endless_conflict_is_an_error(bucket: Bucket, records: JobRecordStore) -> None:
    bucket.meanwhile = lambda: bucket.put(bucket.value)
    with pytest.raises(InternalError, match="too many"):
        await records.change(JOB.job_id, failure)
    assert bucket.writes == 1 + MAX_CONFLICTS


async def test_what_changes_nothing_is_not_written(bucket: Bucket, records: JobRecordStore) -> None:
    assert await records.change(JOB.job_id, lambda _: None) == RECORD
    assert await records.change(JOB.job_id, lambda record: record) == RECORD
    assert bucket.writes == 1


async def test_a_record_is_created_once_and_an_unknown_one_is_named(records: JobRecordStore) -> None:
    assert not await records.create(RECORD)
    with pytest.raises(JobNotFound, match="other"):
        await kept_in(Bucket()).change("other", failure)


@given(st.lists(st.sampled_from(list(JobState)), min_size=1, max_size=6))
async def test_the_first_terminal_state_is_the_last(states: list[JobState]) -> None:
    records = kept_in(Bucket())
    await records.create(RECORD)
    for state in states:
        await records.change(JOB.job_id, entering(state))
    expected = next((state for state in states if state.terminal), states[-1])
    assert (await records.get(JOB.job_id)).state is expected


async def test_an_ended_jobs_record_alone_has_a_life_of_its_own(
    bucket: Bucket, records: JobRecordStore
) -> None:
    await records.change(JOB.job_id, entering(JobState.RUNNING))
    assert bucket.lives_s == []
    await records.change(JOB.job_id, entering(JobState.FAILED))
    assert bucket.lives_s == [JOB.result_ttl_s + records.linger_s]


async def test_who_may_write_no_more_writes_nothing(bucket: Bucket) -> None:
    def ended() -> None:
        raise PermissionError

    records = replace(kept_in(bucket), may_write=ended)
    bucket.put(codec.encode(RECORD))
    for write in (
        records.create(RECORD),
        records.put(RECORD),
        records.change(JOB.job_id, lambda record: record.model_copy(update={"attempt": 9})),
        records.change(JOB.job_id, lambda record: record.model_copy(update={"state": JobState.FAILED})),
    ):
        with pytest.raises(PermissionError):
            await write
    assert bucket.writes == 1


# How the record of a registered template changes, and which edits it is for.


REGISTERED = TemplateRecord(
    template_id="template_1",
    tenant="alice",
    model="tiny",
    model_digest="dd",
    size="128x96",
    image=REF,
    created_s=1000,
    expires_s=2000,
)
FAILURE = RowPoisoned().body()


def test_the_same_picture_is_the_same_template_for_one_tenant_model_and_size() -> None:
    ids = {
        template_id("alice", CARD, "auto", "ab"),
        template_id("bob", CARD, "auto", "ab"),
        template_id("alice", CARD.model_copy(update={"digest": "other"}), "auto", "ab"),
        template_id("alice", CARD, "128x96", "ab"),
        template_id("alice", CARD, "auto", "cd"),
    }
    assert len(ids) == 5
    assert template_id("alice", CARD, "auto", "ab") in ids


def test_a_template_is_recorded_by_one_worker_and_tells_how_that_ends() -> None:
    asked = templates.recording(REGISTERED, "d1", INSPECTION)
    assert (asked.state, asked.worker, asked.width, asked.height) == (TemplateState.RECORDING, "d1", 64, 48)
    assert not asked.state.settled
    done = templates.ready(asked, "d1", "tt", 512)
    assert (done.state.settled, done.size_bytes, done.error) == (True, 512, None)
    lost = present(templates.failed(asked, "d1", FAILURE))
    assert (lost.state, lost.error) == (TemplateState.FAILED, FAILURE)
    assert templates.ready(lost, "d2", "tt", 512).error is None


def test_a_failure_undoes_neither_a_recording_nor_another_workers_try() -> None:
    asked = templates.recording(REGISTERED, "d2", INSPECTION)
    assert templates.failed(asked, "d1", FAILURE) is None
    assert templates.failed(templates.ready(asked, "d2", "tt", 512), "d2", FAILURE) is None


def test_registering_again_renews_and_forgets_a_failure() -> None:
    lost = present(templates.failed(templates.recording(REGISTERED, "d1", INSPECTION), "d1", FAILURE))
    again = templates.registered_again(lost, REF, 9000)
    assert (again.state, again.error, again.expires_s) == (TemplateState.REGISTERED, None, 9000)
    assert again.created_s == REGISTERED.created_s
    done = templates.ready(REGISTERED, "d1", "tt", 512)
    assert templates.registered_again(done, REF, 9000).state is TemplateState.READY


def test_a_use_renews_what_has_lived_a_tenth_of_its_life() -> None:
    assert templates.renewed(REGISTERED, 1000, 1000) is None
    assert templates.renewed(REGISTERED, 1099, 1000) is None
    after = present(templates.renewed(REGISTERED, 1101, 1000))
    assert after.expires_s == 2101


def test_an_edit_has_its_templates_model_and_size() -> None:
    asked = EditParameters(prompt="x")
    assert templates.applied(REGISTERED, asked) == EditParameters(prompt="x", model="tiny", size="128x96")
    same = EditParameters(prompt="x", model="tiny", size="128x96")
    assert templates.applied(REGISTERED, same) == same


@pytest.mark.parametrize(
    ("field", "value", "accepted"),
    [("model", "other", "tiny"), ("size", "256x192", "128x96"), ("padding_mask_crop", 8, "whole picture")],
)
def test_an_edit_that_asks_for_something_else_is_refused_by_name(
    field: str, value: object, accepted: str
) -> None:
    asked = EditParameters.model_validate({"prompt": "x", field: value})
    with pytest.raises(TemplateMismatch, match=accepted) as refused:
        templates.applied(REGISTERED, asked)
    assert (refused.value.field, refused.value.received) == (field, str(value))
