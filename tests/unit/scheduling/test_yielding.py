"""Which rows give way: those of the tenant that has most, to one that has fewer and finds no room."""

from __future__ import annotations

from giornata.scheduling.placement import Placement
from giornata.scheduling.queue import AGEING_S, FairQueue, SchedulingParams
from giornata.scheduling.scheduler import find_yielding_attempt
from giornata.scheduling.worker_state import Attempt
from giornata.wire.jobs import Priority
from tests.unit.scheduling.test_placement import DEMAND, worker

BATCH = Priority.BATCH


class Scene:
    """One worker with four places, and who has them."""

    def __init__(self, **tenants: int) -> None:
        self.placement, self.line = Placement(), FairQueue()
        self.placement.observe(worker("d1"), 0)
        self.claims: dict[Attempt, SchedulingParams] = {}
        for tenant, rows in tenants.items():
            for number in range(rows):
                self.give(f"{tenant}{number}", SchedulingParams(tenant=tenant))

    def give(self, job: str, claim: SchedulingParams) -> None:
        self.placement.assign(job, 1, "d1", DEMAND, 0)
        self.claims[job, 1] = claim

    def asked(self, claim: SchedulingParams, now: float = 0.0) -> Attempt | None:
        key = self.line.join("waits", DEMAND, claim, 0).key
        try:
            return find_yielding_attempt(self.line, self.placement, self.claims, now)
        finally:
            self.line.leave(key)


def test_the_first_row_of_the_tenant_that_has_most_gives_way() -> None:
    scene = Scene(alice=3, bob=1)
    assert scene.asked(SchedulingParams(tenant="carol")) == ("alice0", 1)
    assert scene.asked(SchedulingParams(tenant="bob")) == ("alice0", 1)


def test_nobody_gives_way_to_who_would_have_more_than_the_others() -> None:
    scene = Scene(alice=2, bob=2)
    assert scene.asked(SchedulingParams(tenant="alice")) is None
    assert scene.asked(SchedulingParams(tenant="bob")) is None
    assert scene.asked(SchedulingParams(tenant="carol")) is not None


def test_nobody_gives_way_while_there_is_room() -> None:
    assert Scene(alice=3).asked(SchedulingParams(tenant="carol")) is None


def test_weights_decide_who_has_more() -> None:
    scene = Scene()
    for number in range(4):
        scene.give(f"alice{number}", SchedulingParams(tenant="alice", weight=8.0))
    assert scene.asked(SchedulingParams(tenant="bob", weight=1.0)) is None
    assert scene.asked(SchedulingParams(tenant="bob", weight=4.0)) == ("alice0", 1)


def test_interactive_rows_give_way_to_a_batch_job_that_has_waited() -> None:
    scene = Scene(alice=4)
    assert scene.asked(SchedulingParams(BATCH, "bob"), AGEING_S - 1) is None
    assert scene.asked(SchedulingParams(BATCH, "bob"), AGEING_S) == ("alice0", 1)


def test_batch_rows_give_way_to_another_tenant_s_batch_job() -> None:
    scene = Scene()
    for number in range(4):
        scene.give(f"alice{number}", SchedulingParams(BATCH, "alice"))
    assert scene.asked(SchedulingParams(BATCH, "bob")) == ("alice0", 1)
