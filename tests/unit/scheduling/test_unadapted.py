"""Without adapters every decision is as it was before routing knew what loads of adapters cost.

The digests are of the code before that. They tell which rows go to which worker, in which order, and no times.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Final

import pytest

from giornata.scheduling.demand import JobDemand, RowShape
from giornata.scheduling.placement import Placement
from giornata.scheduling.policies import POLICIES, PolicyName
from giornata.scheduling.queue import FairQueue, SchedulingParams
from giornata.scheduling.scheduler import QueueOrderScheduler
from giornata.wire.jobs import Priority
from giornata.wire.workers import LoadSample, RowProgress, ServiceState, Tier
from tests.fakes.fleet import CARD
from tests.unit.scheduling.test_placement import worker

ROUTED: Final = {
    "round_robin": "829f3211eeb18d68",
    "request_level": "077c2202afe39367",
    "token_level": "a52aa2cb4e68673a",
    "mask_aware": "c208749232c874e8",
    "finish_time": "4009b720a5a1a204",
    "deadline_aware": "bbec45eebed5db46",
}
WORKERS: Final = 7
TICK_S: Final = 0.25


@dataclass
class Fleet:
    """Workers around the scheduler, whose rows advance by a step each time that they are heard."""

    placement: Placement = field(default_factory=Placement)
    rows: dict[str, dict[tuple[str, int, int], int]] = field(default_factory=dict)
    """Steps left of the rows of each worker, by job, attempt and index."""

    def hear(self, name: str, now: float) -> None:
        """Advance the rows of a worker, and tell of it."""
        own = self.rows.setdefault(name, {})
        for key in list(own):
            own[key] -= 2
            if own[key] <= 0:
                del own[key]
                if not any(other[:2] == key[:2] for other in own):
                    self.placement.release(*key[:2])
        self.placement.observe(self._state(name, own), now)

    def _state(self, name: str, own: dict[tuple[str, int, int], int]) -> ServiceState:
        told = [
            RowProgress(job_id=job, attempt=attempt, index=index, step=0, steps=left, tokens=16, begun=True)
            for (job, attempt, index), left in own.items()
        ]
        state = worker(name, *told, capacity=3)
        assert state.worker is not None
        number = int(name[1:])
        news = {
            "resident": {
                Tier.MEMORY: tuple(f"t{template}" for template in range(number, 12, 5)),
                Tier.DISK: tuple(f"t{template}" for template in range(number, 18, 3)),
            },
            "loads": (LoadSample(tier=Tier.DISK, size_bytes=10, load_ms=40.0),),
        }
        return state.model_copy(update={"worker": state.worker.model_copy(update=news)})


def asked(chance: Random, now: float) -> tuple[JobDemand, SchedulingParams]:
    """Rows of a random job, and what decides its turn."""
    steps = chance.choice((4, 10, 20))
    shape = RowShape(text=0, image=16, computed=chance.choice((2, 6, 16)), steps=steps)
    template = f"t{chance.randrange(20)}" if chance.random() < 0.7 else None
    demand = JobDemand(
        CARD.name,
        CARD.digest,
        (shape,) * chance.choice((1, 1, 2, 4)),
        template,
        together=chance.random() < 0.2,
        alone=chance.random() < 0.05,
    )
    claim = SchedulingParams(
        chance.choice((Priority.INTERACTIVE, Priority.INTERACTIVE, Priority.BATCH)),
        tenant=chance.choice("abc"),
        weight=chance.choice((1.0, 2.0)),
        finish_by_s=now + chance.uniform(0.1, 3.0) if chance.random() < 0.5 else None,
        takes_s=steps * 0.016,
    )
    return demand, claim


def routed(policy: PolicyName, seed: int) -> Iterator[object]:
    """Which rows go where, of jobs with priorities, tenants, deadlines and templates in memory and on disk."""
    chance, fleet = Random(seed), Fleet()  # noqa: S311 - a workload
    line = FairQueue(by_deadline=policy is PolicyName.DEADLINE_AWARE)
    scheduler, attempts, number = QueueOrderScheduler(POLICIES[policy], looked_at=2), 0, 0
    for tick in range(160):
        now = tick * TICK_S
        for name in (f"d{index}" for index in range(WORKERS)):
            fleet.hear(name, now)
        for _ in range(chance.choice((0, 0, 1, 2, 5))):
            line.join(f"j{number}", *asked(chance, now), now)
            number += 1
        decision = scheduler.decide(line, fleet.placement, now)
        for key, name, rows, passes in decision.placements:
            attempts += 1
            given = line.serve(key, rows, now, passes)
            fleet.placement.assign(key[0], attempts, name, given, now)
            fleet.rows[name] |= {
                (key[0], attempts, row): shape.steps for row, shape in zip(rows, given.shapes, strict=True)
            }
            yield tick, key, name, rows, passes


def digest(noted: object) -> str:
    return hashlib.sha256(repr(noted).encode()).hexdigest()[:16]


@pytest.mark.parametrize("policy", list(ROUTED))
def test_routed_rows_go_where_they_went(policy: str) -> None:
    assert digest(list(routed(PolicyName(policy), seed=5))) == ROUTED[policy]
