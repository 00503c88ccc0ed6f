"""The audit finds what it is there to find, and nothing in a run that went well."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata.wire import subjects
from giornata.wire.errors import AttemptsExhausted, InputLost
from giornata.wire.jobs import JobState
from giornata.wire.messages import DoneEvent
from giornata.wire.values import StageTimes
from giornata.wire.workers import ServiceName
from giornata_lab.rehearsals.chaos.audit import GROWTH_MIB, AuditedSystem, violations
from giornata_lab.rehearsals.chaos.faults import Fault, Inflicted, Kind
from giornata_lab.rehearsals.chaos.load import ChaosEdit, Outcome, edits
from giornata_lab.rehearsals.chaos.look import Blob, OutcomeRecord, ProcessUsage, Streams

EDITS = edits(0, 3)
JOB = EDITS[0].job_id
RECORDS = subjects.bucket_stream(subjects.RECORDS)
QUARANTINE = subjects.bucket_stream(subjects.QUARANTINE)


def record(state: JobState = JobState.COMPLETED, code: str | None = None) -> OutcomeRecord:
    pictures = 1 if state is JobState.COMPLETED else 0
    return OutcomeRecord(revision=5, state=state, code=code, attempt=1, pictures=pictures)


def outcome(edit: ChaosEdit) -> Outcome:
    return Outcome(
        edit,
        accepted=True,
        tries=1,
        job_ids={edit.job_id},
        record=record(),
        ends=["image_edit.completed"],
    )


def done(state: JobState = JobState.COMPLETED) -> DoneEvent:
    return DoneEvent(job_id=JOB, state=state, stage_ms=StageTimes())


def used(*rss_mib: float, descriptors: int = 20) -> tuple[ProcessUsage, ...]:
    return tuple(ProcessUsage("gateway-1", 7, rss, descriptors, 4) for rss in rss_mib)


def streams(**messages: int) -> Streams:
    empty = dict.fromkeys(
        (subjects.JOBS, subjects.EVENTS, QUARANTINE, subjects.bucket_stream(subjects.LEASES)), 0
    )
    return Streams(
        {**empty, RECORDS: len(EDITS), **messages},
        {subjects.EVENTS: 0},
        1.0,
        {"giornata.event.g.j.done": 1},
        0,
    )


def seen() -> AuditedSystem:
    """A run in which all went well."""
    return AuditedSystem(
        outcomes=[outcome(edit) for edit in EDITS],
        finally_={edit.job_id: record() for edit in EDITS},
        done={JOB: [done(), done()]},
        faults=[Inflicted(Fault(Kind.RESTART, ServiceName.ROUTER), ["router-1"], 3, [0], 1.0)],
        restarts=["router-1"],
        streams=streams(),
        blobs=[
            Blob(f"default/{JOB}/image", 30.0, 100),
            Blob(f"{JOB}/latents-0", 9, 9),
            Blob("shared-prepost-1-empty-text", 9999, 9),
        ],
        usage={7: used(50, 80, 90)},
        ttl_s=60,
        budget_s=60,
    )


def first(run: AuditedSystem, change: Callable[[Outcome], object]) -> AuditedSystem:
    """`run` with its first edit changed."""
    change(run.outcomes[0])
    return run


def test_a_run_that_went_well_is_not_blamed() -> None:
    assert violations(seen()) == []


def test_a_job_that_lost_all_its_workers_may_fail_for_good() -> None:
    failed = record(JobState.FAILED, AttemptsExhausted.code)
    run = seen()
    run.outcomes[0].record = failed
    run.outcomes[0].ends = ["error"]
    run = replace(run, finally_={**run.finally_, JOB: failed}, done={}, streams=streams(**{QUARANTINE: 1}))
    assert violations(run) == []
    assert any("quarantine" in sentence for sentence in violations(replace(run, streams=streams())))


@pytest.mark.parametrize(
    ("run", "what"),
    [
        (lambda: replace(seen(), broken="no router"), "not recovered: no router"),
        (lambda: first(seen(), lambda o: setattr(o, "gave_up", "its end")), "gave up waiting for its end"),
        (lambda: first(seen(), lambda o: o.job_ids.add("job_other")), "accepted as job_other too"),
        (lambda: first(seen(), lambda o: o.unexpected.append("submission: 500")), "submission: 500"),
        (lambda: first(seen(), lambda o: o.flaws.append("no picture")), "no picture"),
        (lambda: first(seen(), lambda o: o.ends.append("image_edit.completed")), "its stream ended with"),
        (lambda: replace(seen(), finally_={**seen().finally_, JOB: None}), "record is gone"),
        (
            lambda: replace(seen(), finally_={**seen().finally_, JOB: record(JobState.RUNNING)}),
            "still running",
        ),
        (
            lambda: replace(seen(), finally_={**seen().finally_, JOB: replace(record(), revision=6)}),
            "ended twice",
        ),
        (
            lambda: replace(
                seen(), finally_={**seen().finally_, JOB: record(JobState.FAILED, InputLost.code)}
            ),
            "failed by input_lost",
        ),
        (lambda: replace(seen(), done={JOB: [done(), done(JobState.FAILED)]}), "events told"),
        (
            lambda: replace(
                seen(),
                faults=[Inflicted(Fault(Kind.RESTART, ServiceName.ROUTER), ["router-1"], 3, [-9], 1.0)],
            ),
            "router-1 did not drain",
        ),
        (lambda: replace(seen(), restarts=["router-1", "router-2"]), "router-2 ended 1 times by itself"),
        (lambda: replace(seen(), streams=streams(**{subjects.JOBS: 2})), "still has 2 jobs"),
        (lambda: replace(seen(), streams=streams(**{RECORDS: 4})), "4 job records for 3 accepted"),
        (
            lambda: replace(seen(), streams=replace(streams(), consumers={subjects.EVENTS: 1})),
            "consumers of events",
        ),
        (
            lambda: replace(seen(), streams=replace(streams(), ends={"giornata.event.g.j.done": 2})),
            "kept more than once, such as giornata.event.g.j.done",
        ),
        (lambda: replace(seen(), blobs=[Blob("default/job_x/image", 9, 9)]), "belong to no edit"),
        (lambda: replace(seen(), blobs=[Blob("job_x/latents-0", 9, 9)]), "belong to no edit"),
        (lambda: replace(seen(), blobs=[Blob("shared-prepost-1-empty-text", -1, 9)]), "kept for ever"),
        (lambda: replace(seen(), blobs=[Blob(f"default/{JOB}/image", -1, 9)]), "kept for ever"),
        (lambda: replace(seen(), blobs=[Blob(f"default/{JOB}/image", 9999, 9)]), "kept for longer"),
        (lambda: replace(seen(), usage={7: used(50, 80, 81 + GROWTH_MIB)}), "gateway-1 has grown"),
        (
            lambda: replace(seen(), usage={7: (*used(50, 50), *used(50, descriptors=99))}),
            "99 open files",
        ),
        (lambda: replace(seen(), left=["12 (sleeping): nats-server"]), "outlived the stack"),
        (lambda: replace(seen(), obituaries=["router-1 was ended by SIGKILL."]), "Not ended in order"),
        (lambda: replace(seen(), logs={"router-1": "x [error] job_run_failed job=1"}), "say job_run_failed"),
    ],
)
def test_every_broken_promise_is_said(run: Callable[[], AuditedSystem], what: str) -> None:
    assert any(what in sentence for sentence in violations(run()))


def lost(worker: str) -> OutcomeRecord:
    return replace(record(), causes=(f"attempt 1 on {worker}: the worker fell silent",))


@pytest.mark.parametrize(
    ("fault", "excused"),
    [
        (Fault(Kind.FREEZE, ServiceName.DENOISER, lasts_s=5), True),
        (Fault(Kind.FREEZE, ServiceName.ROUTER, lasts_s=5), False),
        (Fault(Kind.RESTART, ServiceName.DENOISER), False),
    ],
)
def test_only_a_disturbed_worker_excuses_the_loss_of_its_attempts(fault: Fault, *, excused: bool) -> None:
    run = seen()
    run.outcomes[0].record = lost("denoiser-1")
    run = replace(
        run,
        finally_={**run.finally_, JOB: lost("denoiser-1")},
        faults=[*run.faults, Inflicted(fault, ["denoiser-1"], 3, [], 1.0)],
    )
    assert (violations(run) == []) == excused
    other = replace(run, finally_={**run.finally_, JOB: lost("denoiser-2")})
    assert any("without cause: attempt 1 on denoiser-2" in sentence for sentence in violations(other))


@given(st.sets(st.sampled_from([edit.number for edit in EDITS])))
def test_an_edit_that_was_not_accepted_leaves_no_record(refused: set[int]) -> None:
    run = seen()
    for one in run.outcomes:
        one.accepted = one.edit.number not in refused
    assert len(violations(run)) == bool(refused)
    left = replace(run, streams=streams(**{RECORDS: len(EDITS) - len(refused)}))
    assert violations(left) == []


@pytest.mark.parametrize("name", ["valkey-server", "nats-server"])
def test_a_server_may_grow_by_what_it_holds(name: str) -> None:
    run = seen()
    grown = tuple(replace(one, name=name) for one in used(50, 50, 60 + GROWTH_MIB))
    assert any("has grown" in sentence for sentence in violations(replace(run, usage={7: grown})))
    held = replace(
        run,
        usage={7: grown},
        streams=replace(streams(), events_mib=10.0),
        blobs=[Blob(f"default/{JOB}/image", 9, 10 << 20)],
    )
    assert violations(held) == []


def test_a_process_that_has_not_lived_long_is_not_judged() -> None:
    assert violations(replace(seen(), usage={7: used(50, 900)})) == []
