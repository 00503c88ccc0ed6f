"""How a simulated cluster is scheduled, and the stages around its workers. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from giornata.scheduling.batch import BatchingMode
from giornata.scheduling.demand import JobDemand
from giornata.scheduling.placement import SLACK, Placement
from giornata.scheduling.policies import LOAD_WEIGHT, CandidateWorker, Policy
from giornata.scheduling.queue import FairQueue, RowQueue, TenantJobOrder
from giornata.scheduling.scheduler import (
    LOOKED_AT,
    QueueOrderScheduler,
    RowAssignment,
    Scheduler,
    SchedulingDecision,
)
from giornata.wire.workers import Tier
from giornata_lab.simulation.adapter_plans import AdapterPlan
from giornata_lab.simulation.baselines import WEIGHING, SimPolicy, policy_of
from giornata_lab.simulation.residency import AdapterSetting
from giornata_lab.simulation.rock_kinds import JobKindQueue, RockScheduler

OF_ADAPTERS: Final = frozenset({SimPolicy.RROD, SimPolicy.LRUMS, SimPolicy.ROCK})
"""Policies of adapter serving, with rules of their own for what devices keep."""
ROCK_SHARE: Final = 0.85
"""Share of a device's bytes for adapters beyond which ROCK lets the least recently used go."""
BASELINES: Final = frozenset(
    {
        SimPolicy.ROUND_ROBIN,
        SimPolicy.REQUEST_LEVEL,
        SimPolicy.TOKEN_LEVEL,
        SimPolicy.MASK_AWARE,
        SimPolicy.STEP_AWARE,
    }
)


class QueueOrder(StrEnum):
    """What a line is called in simulations."""

    FAIR = "fair"
    """Tenants take turns by their shares."""
    KINDS = "kinds"
    """Queues of alike jobs take turns (ROCK, CLUSTER '25, section 4.1)."""


class BindingTime(StrEnum):
    """When a job is given to a worker."""

    LATE = "late"
    """When a worker has a place for it; until then it waits in the router's line, as live, and as in FlashPS."""
    ARRIVAL = "arrival"
    """At once: it waits at its worker."""


EVERY: Final = 1 << 30
"""More workers, and more rows of one, than there are."""


@dataclass(frozen=True)
class ArrivalScheduler:
    """Gives every job whole to the worker that the policy chooses, however full it is."""

    policy: Policy
    cached: frozenset[Tier]
    """Where an adapter counts as held."""

    def decide(self, line: RowQueue, placement: Placement, now: float) -> SchedulingDecision:
        """See :class:`giornata.scheduling.scheduler.Scheduler`."""
        placed = []
        with placement.trial() as count:
            for entry in line.order(now):
                asked = entry.asked(now)
                chosen = self.policy(self._known(placement, asked), asked)
                if chosen is not None:
                    count(entry.job_id, chosen.instance, asked)
                    placed.append(RowAssignment(entry.key, chosen.instance, entry.rows))
        return SchedulingDecision(tuple(placed))

    def _known(self, placement: Placement, asked: JobDemand) -> list[CandidateWorker]:
        """Every worker, as if it had room."""
        found = []
        for worker in placement.candidates(asked, EVERY):
            tiers = placement.adapters(worker.instance)
            held = [tiers.get(lora.digest) in self.cached for lora in asked.adapters]
            found.append(worker._replace(capacity_rows=EVERY, held=sum(held) / max(1, len(held))))
        return found


@dataclass(frozen=True)
class StageSetting:
    """Times beside denoising."""

    encode_ms: float = 0.0
    finish_ms: float = 0.0
    """Decoding and pasting of a picture; a server does one after the other."""
    servers: int = 8
    """Servers that encode, and as many that finish."""


@dataclass(frozen=True)
class RunOptions:
    """How a run is scheduled."""

    policy: SimPolicy = SimPolicy.FINISH_TIME
    binding: BindingTime = BindingTime.LATE
    spreads: bool = True
    """Whether rows of one job may go to several workers where jobs are bound late."""
    telemetry_hz: float = 4.0
    by_deadline: bool = False
    """Whether jobs with an SLO come in the line by their deadlines."""
    turn: TenantJobOrder = TenantJobOrder.LEAST_WORK
    """Which of the waiting jobs comes first."""
    slack: float = SLACK
    """Share of its fastest rate that a worker may lose to fewer rows while none wait; 0: it gets as many rows as it has
    places."""
    adapters: bool = True
    """Whether the router knows the jobs' LoRAs and ControlNets: it tells workers to load them, and chooses by them."""
    line_name: QueueOrder = QueueOrder.FAIR
    """Whose turn comes next."""
    load_weight: float = LOAD_WEIGHT
    """What loads cost that hide behind waiting, to the policies that know loads."""
    loads_ahead: bool = True
    """Whether these have likely workers load while jobs wait."""
    cached: frozenset[Tier] = frozenset(Tier)
    """Tiers that LRUMS counts as cached; by default its machine's memory, too."""
    placing: AdapterPlan = AdapterPlan.OFF
    """Which plan says what hosts and devices load before jobs ask for it."""
    seed: int = 0
    """Of what plans draw."""
    batching: BatchingMode = BatchingMode.STEP
    """When rows join others at a worker."""

    @classmethod
    def of(cls, policy: SimPolicy) -> RunOptions:
        """Return how a policy serves: ours as live, the baselines as FlashPS's artifact has them.

        There a job waits in one line, in the order of arrival, until a worker has fewer than its maximum, and goes to
        it whole. The baselines of ROCK give every job at once to the worker that they choose.
        """
        if policy in BASELINES:
            return cls(policy, spreads=False, turn=TenantJobOrder.ARRIVAL, slack=0.0, adapters=False)
        if policy in {SimPolicy.RROD, SimPolicy.LRUMS}:
            return cls(policy, BindingTime.ARRIVAL, spreads=False, turn=TenantJobOrder.ARRIVAL, slack=0.0)
        if policy is SimPolicy.ROCK:
            return cls(
                policy,
                turn=TenantJobOrder.ARRIVAL,
                line_name=QueueOrder.KINDS,
                placing=AdapterPlan.ROCK,
            )
        return cls(policy, by_deadline=policy is SimPolicy.DEADLINE_AWARE)

    def line(self) -> RowQueue:
        """A line without jobs."""
        if self.line_name is QueueOrder.KINDS:
            return JobKindQueue()
        return FairQueue(by_deadline=self.by_deadline, turn=self.turn)

    def kept(self, adapters: AdapterSetting) -> AdapterSetting:
        """Return what devices keep of adapters, where the policy has a rule of its own."""
        if self.policy not in OF_ADAPTERS:
            return adapters
        share = ROCK_SHARE if self.policy is SimPolicy.ROCK else 1.0
        return replace(
            adapters,
            keeps=self.policy is not SimPolicy.RROD,
            on_turn=self.policy is not SimPolicy.ROCK,
            device_bytes=share * adapters.device_bytes,
        )

    def scheduler(self) -> Scheduler:
        """The scheduler that these options name."""
        if self.policy is SimPolicy.ROCK:
            return RockScheduler()
        policy = policy_of(self.policy, self.load_weight)
        if self.binding is BindingTime.ARRIVAL:
            return ArrivalScheduler(policy, self.cached)
        ahead = self.loads_ahead and self.policy in WEIGHING
        return QueueOrderScheduler(policy, LOOKED_AT, self.spreads, ahead)
