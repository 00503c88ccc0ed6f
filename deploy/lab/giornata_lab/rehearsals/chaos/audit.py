"""What must not be after a run, however it was disturbed. Pure: values in, sentences out; none means all is well."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from giornata.blobs.redis import CONNECTIONS
from giornata.wire import subjects
from giornata.wire.jobs import TAKE_OVER_S, JobState
from giornata.wire.messages import DoneEvent
from giornata.wire.workers import ServiceName
from giornata_lab.rehearsals.chaos.faults import Inflicted, Kind
from giornata_lab.rehearsals.chaos.load import Outcome
from giornata_lab.rehearsals.chaos.look import Blob, OutcomeRecord, ProcessUsage, Streams
from giornata_tools.launcher.plan import NATS, VALKEY

EXCUSED: Final = frozenset({"attempts_exhausted", "deadline_exceeded"})
"""Errors by which a disturbed job may end: it lost every worker, or its time went by. All others blame the edit, or are
nobody's."""
GROWTH_MIB: Final = 64.0
"""What a process, with its children, may gain from its first work until the end; caches fill meanwhile."""
HELD: Final = 2.0
"""Memory for a byte that a server holds."""
DESCRIPTORS: Final = 32
"""Likewise; connections come and go."""
POOLS: Final = 8
"""Processes that keep connections to the blob store: two each of gateway, router, prepost and denoiser."""
SAMPLES: Final = 3
"""A process that was not seen so often has not lived long enough to leak."""
SHARED: Final = "shared-"
"""Before the names of blobs that are of no job."""
LOSING: Final = frozenset({Kind.KILL, Kind.FREEZE})
"""Faults of a worker with which its attempts may be lost."""
WORKER: Final = re.compile(r"attempt \d+ on (\S+):")
"""The worker in one of a record's causes."""
SURPRISES: Final = re.compile(
    r"nats_refused|answer_refused|job_run_failed|job_not_carried|handler_failed|service_failed|never retrieved|"
    r"was never awaited|call_off_failed|preview_lost"
)
"""Log events that no fault excuses."""


@dataclass(frozen=True)
class AuditedSystem:
    """All that a run has left behind."""

    outcomes: Sequence[Outcome]
    finally_: Mapping[str, OutcomeRecord | None]
    """Records by job, after everything was quiet."""
    done: Mapping[str, Sequence[DoneEvent]]
    """Ends that were told, by job, as often as they were heard."""
    faults: Sequence[Inflicted]
    streams: Streams
    blobs: Sequence[Blob]
    usage: Mapping[int, Sequence[ProcessUsage]]
    """What processes took, by process id, in the order of time; the last one at the end."""
    ttl_s: float
    """How long results are kept."""
    budget_s: float
    """Budget of a job, from its acceptance on."""
    logs: Mapping[str, str] = field(default_factory=dict)
    """By process."""
    restarts: Sequence[str] = ()
    """Names of processes that ended and got a successor."""
    left: Sequence[str] = ()
    """Processes that outlived the stack."""
    obituaries: Sequence[str] = ()
    """What the stack told of processes that did not end in order."""
    broken: str | None = None
    """Why the stack has not become whole again."""


def violations(seen: AuditedSystem) -> list[str]:
    """Every broken promise, as a sentence."""
    return [
        *([f"The stack has not recovered: {seen.broken}"] if seen.broken else []),
        *(sentence for outcome in seen.outcomes for sentence in _of_edit(outcome, seen)),
        *_of_losses(seen),
        *_of_ends(seen.faults, seen.restarts),
        *_of_streams(seen),
        *_of_blobs(seen),
        *_of_processes(seen),
        *_of_logs(seen.logs),
    ]


def _of_edit(outcome: Outcome, seen: AuditedSystem) -> Iterator[str]:
    """Accepted once, ended once, in a result or a clear error, for everybody who looks."""
    job = outcome.edit.job_id
    name = f"Edit {outcome.edit.number} ({outcome.edit.door}, {job})"
    if outcome.gave_up:
        yield f"{name}: its client gave up waiting for {outcome.gave_up}; asked again for {dict(outcome.again)}."
    yield from (f"{name}: {answer}." for answer in outcome.unexpected)
    if strange := outcome.job_ids - {job}:
        yield f"{name}: it was accepted as {', '.join(sorted(strange))} too."
    if not outcome.accepted:
        return
    first, last = outcome.record, seen.finally_.get(job)
    if last is None:
        yield f"{name}: its record is gone."
        return
    if not last.state.terminal:
        yield f"{name}: it was accepted, and is still {last.state}."
        return
    if first is not None and first != last:
        yield f"{name}: it ended twice: {first}, then {last}."
    if last.state is JobState.CANCELLED or (last.state is JobState.FAILED and last.code not in EXCUSED):
        yield f"{name}: it ended as {last.state} by {last.code}."
    yield from (f"{name}: {flaw}." for flaw in outcome.flaws)
    told = {(event.state, event.error.code if event.error else None) for event in seen.done.get(job, ())}
    if told - {(last.state, last.code)}:
        yield f"{name}: its record says {last.state}, and events told {sorted(told)}."
    if outcome.ends and len(outcome.ends) != max(1, last.pictures):
        yield f"{name}: its stream ended with {outcome.ends}, where it has {last.pictures} pictures."


def _of_losses(seen: AuditedSystem) -> Iterator[str]:
    """An attempt is lost only with a worker that was killed or frozen."""
    guilty = {
        name
        for one in seen.faults
        if one.fault.target is ServiceName.DENOISER and one.fault.kind in LOSING
        for name in one.victims
    }
    for job, record in seen.finally_.items():
        for cause in record.causes if record else ():
            if guilty.isdisjoint(WORKER.findall(cause)):
                yield f"Job {job} has lost an attempt without cause: {cause}"


def _of_ends(faults: Sequence[Inflicted], restarts: Sequence[str]) -> Iterator[str]:
    """Return who was told to drain has done so, and nobody has ended who was not made to."""
    ended = [name for one in faults if one.fault.kind in {Kind.KILL, Kind.RESTART} for name in one.victims]
    for name, count in (Counter(restarts) - Counter(ended)).items():
        yield f"{name} ended {count} times by itself."
    for one in faults:
        if one.fault.kind is Kind.RESTART and any(one.statuses):
            yield f"{', '.join(one.victims)} did not drain: exit status {one.statuses}."


def _of_streams(seen: AuditedSystem) -> Iterator[str]:
    streams = seen.streams
    if streams.messages[subjects.JOBS] or streams.unacknowledged:
        jobs = streams.messages[subjects.JOBS]
        yield f"The work queue still has {jobs} jobs, {streams.unacknowledged} of them unacknowledged."
    if following := streams.consumers.get(subjects.EVENTS):
        yield f"{following} consumers of events are left, and nobody reads them."
    if again := [subject for subject, count in streams.ends.items() if count > 1]:
        yield f"The end of {len(again)} jobs is kept more than once, such as {again[0]}."
    accepted = {outcome.edit.job_id for outcome in seen.outcomes if outcome.accepted}
    records = streams.messages[subjects.bucket_stream(subjects.RECORDS)]
    if records != len(accepted):
        yield f"There are {records} job records for {len(accepted)} accepted edits."
    quarantined = sum(
        record is not None and record.code == "attempts_exhausted" for record in seen.finally_.values()
    )
    kept = streams.messages[subjects.bucket_stream(subjects.QUARANTINE)]
    if kept != quarantined:
        yield f"{kept} jobs are in quarantine, and {quarantined} were given up."
    if (leases := streams.messages[subjects.bucket_stream(subjects.LEASES)]) > 1:
        yield f"{leases} leases are held."


def _of_blobs(seen: AuditedSystem) -> Iterator[str]:
    """Every blob is of a job that was asked for, or of all, and ends by itself in its time."""
    longest_s = max(seen.ttl_s + seen.budget_s + 1, seen.budget_s + TAKE_OVER_S) + 1
    asked = {outcome.edit.job_id for outcome in seen.outcomes}
    eternal, long, strange = [], [], []
    for blob in seen.blobs:
        eternal += [blob.key] if blob.ttl_s < 0 else []
        if blob.key.startswith(SHARED):
            continue
        strange += [blob.key] if asked.isdisjoint(blob.key.split("/")) else []
        long += [f"{blob.key} ({blob.ttl_s:.0f} s)"] if blob.ttl_s > longest_s else []
    for found, what in (
        (strange, "belong to no edit that was asked for"),
        (eternal, "are kept for ever"),
        (long, f"are kept for longer than {longest_s:.0f} s"),
    ):
        if found:
            yield f"{len(found)} blobs {what}, such as {found[0]}."


def _descriptors(name: str) -> int:
    """Files that a process may have opened since its first work."""
    return max(DESCRIPTORS, POOLS * CONNECTIONS) if name.startswith(VALKEY) else DESCRIPTORS


def _of_processes(seen: AuditedSystem) -> Iterator[str]:
    for samples in seen.usage.values():
        if len(samples) < SAMPLES:
            continue
        first, last = samples[1], samples[-1]  # the very first is before its first work
        if last.rss_mib - first.rss_mib > GROWTH_MIB + HELD * _held_mib(last.name, seen):
            yield f"{last.name} has grown from {first.rss_mib:.0f} to {last.rss_mib:.0f} MiB."
        if last.descriptors - first.descriptors > _descriptors(last.name):
            yield f"{last.name} has {last.descriptors} open files, {first.descriptors} before."
    if seen.left:
        yield f"{len(seen.left)} processes outlived the stack: {'; '.join(seen.left)}."
    yield from (f"Not ended in order: {obituary}" for obituary in seen.obituaries)


def _held_mib(name: str, seen: AuditedSystem) -> float:
    """Return what a server holds in memory by order: blobs and events until their time is over."""
    if name.startswith(VALKEY):
        return sum(blob.size_bytes for blob in seen.blobs) / 2**20
    return seen.streams.events_mib if name.startswith(NATS) else 0.0


def _of_logs(logs: Mapping[str, str]) -> Iterator[str]:
    found: Counter[str] = Counter()
    example: dict[str, str] = {}
    for name, log in logs.items():
        for line in log.splitlines():
            if match := SURPRISES.search(line):
                found[match[0]] += 1
                example.setdefault(match[0], f"{name}: {line.strip()[:300]}")
    for what, count in found.most_common():
        yield f"{count} log lines say {what}, such as {example[what]}"
