"""Plans of placement in the simulator, and baselines that load when it is their turn."""

from __future__ import annotations

from dataclasses import replace

import pytest

from giornata.scheduling.adapters import NeededLora
from giornata_lab.simulation.adapter_plans import AdapterPlan
from giornata_lab.simulation.baselines import SimPolicy
from giornata_lab.simulation.jobs import SimulatedJob
from giornata_lab.simulation.options import RunOptions
from giornata_lab.simulation.residency import AdapterSetting, LoadReason
from giornata_lab.simulation.results import SimulatedRun, summary
from giornata_lab.simulation.simulator import Simulation
from tests.lab.simulation.test_simulation import MACHINE, ends, job

ONE = replace(MACHINE, rows=1)
SETTING = AdapterSetting(
    device_bytes=400, memory_bytes=1e4, disk_bytes=0, store_bytes_per_s=100, link_bytes_per_s=100
)
"""A LoRA of 100 bytes takes a second from the store to memory, and another onto the device."""
COMPUTING_S = 10 * (10 + 20) / 1e3


def asking(number: int, at_s: float, *names: str) -> SimulatedJob:
    made = job(number, at_s, template=None)
    return replace(made, demand=replace(made.demand, adapters=tuple(NeededLora(name, 100) for name in names)))


def simulated(
    jobs: list[SimulatedJob], options: RunOptions, workers: int = 2, setting: AdapterSetting = SETTING
) -> SimulatedRun:
    return Simulation([ONE] * workers, jobs, options, adapters=setting).run()


def reasons(run: SimulatedRun) -> list[LoadReason]:
    return [why for worker in run.workers for _, why in worker.loaded]


def test_a_proactive_plan_loads_what_was_popular_onto_every_device() -> None:
    jobs = [asking(0, 0.0, "a"), asking(1, 100.0, "a"), asking(2, 100.0, "a")]
    plain = simulated(jobs, RunOptions())
    planned = simulated(jobs, RunOptions(placing=AdapterPlan.PROACTIVE))
    assert reasons(planned).count(LoadReason.PLAN) == 1, "one device has it"
    assert LoadReason.PLAN not in reasons(plain)
    assert ends(planned)["j2"] == pytest.approx(100 + COMPUTING_S), "both found it ready"
    assert ends(plain)["j2"] > 100 + COMPUTING_S


def test_plans_load_no_more_than_fits_beside_what_rows_use() -> None:
    names = [f"l{number}" for number in range(12)]
    jobs = [asking(number, number * 7.0, name) for number, name in enumerate(names * 2)]
    made = Simulation([ONE] * 2, jobs, RunOptions(placing=AdapterPlan.PROACTIVE), adapters=SETTING)
    made.run()
    for worker in made._workers.values():
        assert worker.loras.device.size_bytes <= SETTING.device_bytes


@pytest.mark.parametrize("policy", [SimPolicy.RROD, SimPolicy.LRUMS])
def test_baselines_load_when_rows_have_a_place(policy: SimPolicy) -> None:
    """Two jobs at one worker: the second one's LoRA is loaded once the first has ended."""
    run = simulated([asking(0, 0.0, "a"), asking(1, 0.0, "b")], RunOptions.of(policy), workers=1)
    assert ends(run) == pytest.approx({"j0": 2 + COMPUTING_S, "j1": 4 + 2 * COMPUTING_S})
    assert summary(run).lora_ready_share == 0.0
