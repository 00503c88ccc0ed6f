"""The simulator applies what a scheduler decides: rows that are taken from a worker begin again."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from giornata.scheduling.placement import Placement
from giornata.scheduling.policies import finish_time
from giornata.scheduling.queue import RowQueue
from giornata.scheduling.scheduler import QueueOrderScheduler, SchedulingDecision
from giornata_lab.simulation.options import RunOptions
from giornata_lab.simulation.simulator import Simulation
from giornata_lab.simulation.templates import TemplateSetting
from tests.lab.simulation.test_simulation import MACHINE, ends, job


@dataclass
class Preempting:
    """Serves jobs in their turn; when the second job comes, the first one is taken from its worker."""

    serves: QueueOrderScheduler
    preempted: list[tuple[str, int]]

    def decide(self, line: RowQueue, placement: Placement, now: float) -> SchedulingDecision:
        decision = self.serves.decide(line, placement, now)
        if any(entry.job_id == "j1" for entry in line) and not self.preempted:
            self.preempted.append(("j0", 1))
            return decision._replace(preemptions=(("j0", 1),))
        return decision


def test_a_preempted_attempt_begins_again_and_every_job_ends() -> None:
    machine = replace(MACHINE, rows=1)
    scheduler = Preempting(QueueOrderScheduler(finish_time), [])
    jobs = [job(0, 0.0), job(1, 0.04)]
    run = Simulation(
        [machine], jobs, RunOptions(), templates=TemplateSetting(preloaded=("t0",)), scheduler=scheduler
    ).run()
    assert scheduler.preempted == [("j0", 1)]
    step_s, begun_s = 0.015, 0.045  # its third step is computed to the end
    assert ends(run) == pytest.approx({"j1": begun_s + 10 * step_s, "j0": begun_s + 20 * step_s})
