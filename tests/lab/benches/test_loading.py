"""The loading benchmark's engine: its weights say what was measured, and it serves a picture with every planner."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from giornata.planning.operations import SequenceShape, step_work
from giornata.wire.values import BlockMode
from giornata_lab.bench import loading
from giornata_lab.bench.compute import loading_engine
from giornata_lab.bench.compute.block_costs import Costs
from giornata_lab.bench.compute.loading_run import LoadingScene
from giornata_lab.bench.compute.models import TINY, flux
from giornata_lab.bench.compute.rows import Rows
from giornata_lab.bench.systems.networks import PLAIN_4

BLOCKS, STEPS = 4, 2
COSTS = Costs(
    {BlockMode.FULL: (9.0, 11.0) * 2, BlockMode.HIDDEN: (4.0,) * 4, BlockMode.KV: (3.0,) * 4}, around_ms=2.0
)


@pytest.fixture(scope="module")
def scene() -> LoadingScene:
    rows = Rows(flux(TINY, torch.float32, torch.device("cpu")), side=6, text_tokens=5)
    options = loading.options_of(["--steps", str(STEPS), "--mask", "0.1"])
    with torch.inference_mode():
        return loading._scene(rows, options)


@pytest.mark.parametrize(
    "shapes", [(SequenceShape(5, 36, 9),), (SequenceShape(5, 36, 9), SequenceShape(7, 36, 9))]
)
def test_the_weights_are_those_that_were_measured(shapes: tuple[SequenceShape, ...]) -> None:
    weights = loading_engine.linear(COSTS, PLAIN_4, shapes, rate_bytes_s=2000.0)
    for mode, block_ms in ((BlockMode.FULL, 10.0), (BlockMode.HIDDEN, 4.0), (BlockMode.KV, 3.0)):
        work = step_work(PLAIN_4, shapes, [(mode,) * BLOCKS] * len(shapes))
        assert weights.step_ms(work) == pytest.approx(2.0 + BLOCKS * block_ms)
    assert weights.load_ms(4000) == pytest.approx(2000)


@pytest.mark.parametrize("planner", loading_engine.PLANNERS)
def test_the_engine_says_what_its_steps_take(scene: LoadingScene, planner: str) -> None:
    """Where loading takes no time, every planner but one takes everything from the cache."""
    weights = loading_engine.linear(COSTS, scene.rows.family.operations, scene.row.shapes, rate_bytes_s=1e12)
    took = loading_engine.picture(scene, loading_engine.PLANNERS[planner], weights, rate_bytes_s=1e12)
    block_ms = 10.0 if planner == "full" else 3.0
    assert took.predicted_ms == pytest.approx(STEPS * (2.0 + BLOCKS * block_ms), rel=1e-3)
    assert took.ms > 0


def test_every_step_has_its_own_entry(scene: LoadingScene) -> None:
    levels = {entry.level for entry in scene.entries}
    row = scene.row
    assert levels == {replace(row, step=step).level for step in range(STEPS)}
