"""Published ways to choose a worker beside those that serve: FlashPS's (EuroSys '26) and ROCK's (CLUSTER '25). Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from functools import partial
from types import MappingProxyType
from typing import Final

from giornata.scheduling import policies
from giornata.scheduling.demand import JobDemand
from giornata.scheduling.policies import LOAD_WEIGHT, CandidateWorker, Policy, with_room

QUEUED: Final = 4
"""Rows with which a worker's queue is as long as :func:`lrums` counts."""


def round_robin(candidates: Sequence[CandidateWorker], demand: JobDemand) -> CandidateWorker | None:
    """One after the other, by the job's ticket."""
    able = sorted(with_room(candidates, demand), key=lambda c: c.instance)
    return able[demand.ticket % len(able)] if able else None


def request_level(candidates: Sequence[CandidateWorker], demand: JobDemand) -> CandidateWorker | None:
    """The fewest rows: request-level balancing, a baseline of FlashPS section 6.5."""
    return min(with_room(candidates, demand), key=lambda c: (c.rows, c.instance), default=None)


def token_level(candidates: Sequence[CandidateWorker], demand: JobDemand) -> CandidateWorker | None:
    """The fewest masked tokens: token-level balancing, the other baseline of FlashPS section 6.5."""
    return min(with_room(candidates, demand), key=lambda c: (c.tokens, c.rows, c.instance), default=None)


def mask_aware(candidates: Sequence[CandidateWorker], demand: JobDemand) -> CandidateWorker | None:
    """The shortest step with the job's rows in it: FlashPS's Algorithm 2, by our cost model."""

    def step_ms(candidate: CandidateWorker) -> float:
        backlog = candidate.outlook.backlog
        rows = (*backlog.running, *backlog.waiting, *candidate.loads)
        return backlog.base_ms + sum(row.step_ms for row in rows)

    return min(with_room(candidates, demand), key=lambda c: (step_ms(c), c.instance), default=None)


def step_aware(candidates: Sequence[CandidateWorker], demand: JobDemand) -> CandidateWorker | None:
    """The worker that is done soonest with the job's rows too: the balancing by remaining steps of FlashPS's artifact.

    There the longest of all workers is to be least, and of equal choices the first is taken; here they are told apart.
    """

    def drained_ms(candidate: CandidateWorker) -> float:
        backlog = candidate.outlook.backlog
        return max(replace(backlog, waiting=(*backlog.waiting, *candidate.loads)).ends_ms())

    return min(with_room(candidates, demand), key=lambda c: (drained_ms(c), c.instance), default=None)


def lrums(candidates: Sequence[CandidateWorker], demand: JobDemand) -> CandidateWorker | None:
    """Matching score, with adapters that go by last use: the second baseline of ROCK, section 6.1.

    Half the share of the job's adapters that are cached, half how short the worker's queue is. That the machine's
    memory counts as a cache is a reading, with which the paper's order of hits comes out.
    """

    def score(candidate: CandidateWorker) -> tuple[float, int, str]:
        free = 1 - min(1.0, candidate.rows / QUEUED)
        return 0.5 * candidate.held + 0.5 * free, -candidate.rows, candidate.instance

    return max(with_room(candidates, demand), key=score, default=None)


class SimPolicy(StrEnum):
    """What a way to choose workers is called in simulations and benchmarks."""

    ROUND_ROBIN = "round_robin"
    REQUEST_LEVEL = "request_level"
    TOKEN_LEVEL = "token_level"  # noqa: S105 - no secret
    MASK_AWARE = "mask_aware"
    STEP_AWARE = "step_aware"
    FINISH_TIME = "finish_time"
    DEADLINE_AWARE = "deadline_aware"
    RROD = "rrod"
    """Round robin, adapters on demand: the first baseline of ROCK, section 6.1. Simulated workers keep no adapter."""
    LRUMS = "lrums"
    ROCK = "rock"
    """No policy of single jobs: :class:`giornata_lab.simulation.rock_kinds.RockScheduler`."""


WEIGHING: Final = MappingProxyType(
    {
        SimPolicy.FINISH_TIME: policies.finish_time,
        SimPolicy.DEADLINE_AWARE: policies.deadline_aware,
    }
)
"""Policies that know what loads cost, and begin them while jobs wait."""
POLICIES: Final[Mapping[SimPolicy, Policy]] = MappingProxyType(
    {
        SimPolicy.ROUND_ROBIN: round_robin,
        SimPolicy.REQUEST_LEVEL: request_level,
        SimPolicy.TOKEN_LEVEL: token_level,
        SimPolicy.MASK_AWARE: mask_aware,
        SimPolicy.STEP_AWARE: step_aware,
        **WEIGHING,
        SimPolicy.RROD: round_robin,
        SimPolicy.LRUMS: lrums,
    }
)


def policy_of(name: SimPolicy, load_weight: float = LOAD_WEIGHT) -> Policy:
    """The policy of this name; those that weigh loads do so with `load_weight`."""
    known = WEIGHING.get(name)
    return POLICIES[name] if known is None else partial(known, load_weight=load_weight)
