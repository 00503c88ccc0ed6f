"""Which worker gets which rows when nothing asks for adapters: as recorded before routing knew of loads ahead.

A digest tells every job's workers, in the order in which jobs ended. The simulator made them before adapters had links,
weights and loads ahead of turns: a decision that depends on these where there are none shows here.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest

from giornata.scheduling.policies import PolicyName
from giornata_tools.loadgen import facts
from giornata_tools.loadgen.distributions import zipf
from giornata_tools.loadgen.workload import MaskShape, Workload
from giornata_tools.simulation.machines import flashps_flux, h800_flux
from giornata_tools.simulation.options import RunOptions, Stages
from giornata_tools.simulation.scenario import ArrivalSetting, Scenario, popular
from giornata_tools.simulation.templates import TemplateSetting

WEIGHTS = zipf(12, facts.ZIPF)
WORK = Workload(facts.MASK_RATIOS["production"], facts.STEPS, {1: 0.7, 3: 0.3}, WEIGHTS, MaskShape.BLOB)
MACHINES = (h800_flux(), replace(h800_flux(), slowness=1.7), flashps_flux(), flashps_flux())
SCENARIO = Scenario(
    MACHINES,
    WORK,
    ArrivalSetting(seconds=50.0, warmup_s=0.0, cv=3.0),
    templates=TemplateSetting(preloaded=popular(WEIGHTS)[:3]),
    stages=Stages(encode_ms=200.0, finish_ms=300.0, servers=4),
    slo_s=20.0,
)
EXPECTED: dict[tuple[PolicyName, float], str] = {
    (PolicyName.ROUND_ROBIN, 1.0): "46 2aeb602809e9908e",
    (PolicyName.MASK_AWARE, 1.0): "46 76bdba55729e7b7e",
    (PolicyName.FINISH_TIME, 0.5): "25 03d6635d99ee823f",
    (PolicyName.FINISH_TIME, 1.5): "92 ed474736ad07fa1e",
    (PolicyName.DEADLINE_AWARE, 1.5): "92 b5379fd199936618",
}


def digest_of(policy: PolicyName, rate: float) -> str:
    run = SCENARIO.run(SCENARIO.jobs(rate, 7), RunOptions.of(policy))
    told = " ".join(f"{ended.job.job_id}:{ended.worker}" for ended in run.ended)
    return f"{len(run.ended)} {hashlib.sha256(told.encode()).hexdigest()[:16]}"


@pytest.mark.parametrize(("policy", "rate"), list(EXPECTED), ids=str)
def test_decisions_without_adapters_are_those_of_before(policy: PolicyName, rate: float) -> None:
    assert digest_of(policy, rate) == EXPECTED[policy, rate]
