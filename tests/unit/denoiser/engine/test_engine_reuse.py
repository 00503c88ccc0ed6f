"""The engine with templates: what serves which step, the first step's correction, plans, and loads."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from giornata.packed.packing import TraceLane
from giornata.planning.operations import BatchRow, LoadLink, SequenceShape, StepWork, step_work
from giornata.planning.plans import (
    BatchPlan,
    BatchPlanner,
    evaluate_modes,
    plan_batch,
    plan_each_alone,
    uniform_modes,
)
from giornata.scheduling.cost_models import work_of
from giornata.wire.values import BlockMode
from giornata.wire.workers import StepSample
from giornata_denoiser.choices import EXACT, CacheForm
from giornata_denoiser.engine.engine import Engine
from giornata_denoiser.engine.loading import FinishedSlabLoad, Loader, SlabLoad, SlabRun
from giornata_denoiser.engine.slabs import Slabs
from giornata_denoiser.families.network import ModelFamily
from giornata_denoiser.rows.template import CachedBlock, CachedTemplate, Entry
from giornata_denoiser.trace import Trace
from giornata_lab.bench.compute import tiny_flux
from giornata_lab.bench.compute.rows import changed
from giornata_lab.bench.compute.tiny_flux import Spec
from tests.examples import examples
from tests.present import present
from tests.unit.denoiser.engine.edits import (
    FORMS,
    GRID,
    ROOMY,
    Measured,
    edit,
    engine,
    expected,
    finish_rows,
    finished,
    preferred_modes,
    template,
    where,
)
from tests.unit.denoiser.engine.test_masked import BLOCKS, FLOAT32, OF, step


@pytest.mark.parametrize(
    ("forms", "scale", "bits"),
    [
        (FORMS[0], 2.0, EXACT),
        (FORMS[1], 1.0, EXACT),
        (FORMS[2], 2.0, None),
        (FORMS[3], 2.0, EXACT),
    ],
)
def test_an_engine_records_a_template_and_serves_edits_from_it(
    forms: frozenset[CacheForm], scale: float, bits: int | None
) -> None:
    """Every step of an edit takes from the entry of its noise level, as a second implementation does."""
    taken = template(OF, forms)
    other = tiny_flux.row(OF, Spec("other", grid=(2, 3), steps=2, true_cfg_scale=2.0, seed=4))
    spec = Spec("edit", grid=GRID, steps=7, text_tokens=3, true_cfg_scale=scale, seed=0)
    row = edit(OF, taken, spec)
    wanted = expected(OF, row, taken, preferred_modes(forms), corrected=bits is not None)
    made = engine(OF, correction_bits=bits)
    made.batch.submit([row, other])
    ended = finished(made)
    torch.testing.assert_close(ended["edit"].latent, wanted, atol=FLOAT32, rtol=0)
    torch.testing.assert_close(
        ended["other"].latent, finish_rows(OF, [other])["other"].latent, atol=FLOAT32, rtol=0
    )
    if forms:
        full = changed(row, key=replace(row.key, job_id="full"), template=None)
        made.batch.submit([full])
        assert (finished(made)["full"].latent - ended["edit"].latent).abs().max() > 10 * FLOAT32


def test_no_entry_within_the_tolerance_means_to_compute_everything() -> None:
    far = CachedTemplate("t", GRID, (Entry(2.0, (CachedBlock(),) * BLOCKS),))
    rows = [changed(edit(OF, taken, Spec(grid=GRID)), tolerance=0.5) for taken in (None, far)]
    assert torch.equal(*[finish_rows(OF, [row])["job"].latent for row in rows])


def test_blocks_before_the_first_that_was_kept_are_computed_in_full() -> None:
    part, whole = template(OF, first_block=2), template(OF)
    assert part.size_bytes * 2 == whole.size_bytes
    row = edit(OF, part, Spec("edit", grid=GRID, steps=5, seed=1))
    modes = (BlockMode.FULL, BlockMode.FULL, BlockMode.KV, BlockMode.KV)
    wanted = expected(OF, row, part, modes, corrected=True)
    torch.testing.assert_close(
        finish_rows(OF, [row], correction_bits=EXACT)["edit"].latent, wanted, atol=FLOAT32, rtol=0
    )


def chaotic(seed: int) -> BatchPlanner:
    """Any modes that what is kept permits."""
    draw = random.Random(seed)  # noqa: S311 - no secrets

    def planner(rows: Sequence[BatchRow], link: LoadLink, base_ms: float) -> BatchPlan:
        plan = plan_batch(rows, link, base_ms)
        modes = tuple(tuple(draw.choice(list(BlockMode)) for _ in chosen) for chosen in plan.modes)
        return replace(plan, modes=modes)

    return planner


@cache
def whole_template() -> CachedTemplate:
    """Of every form; one for all examples."""
    return template(OF, frozenset(CacheForm))


@pytest.mark.slow
@examples(times=1 / 3)  # each edits with a whole model
@given(seed=st.integers(0, 10_000), ahead=st.booleans())
def test_any_modes_give_the_runs_own_step(seed: int, *, ahead: bool) -> None:
    """With the template run's own prompt, noise and level, whatever is planned and however it is loaded."""
    taken, spec, place = whole_template(), Spec("run", grid=GRID), where()
    (wanted,) = step(OF, [tiny_flux.row(OF, spec)])
    with Loader() as loader:
        made = engine(OF, planner=chaotic(seed), loader=loader if ahead else None, correction_bits=None)
        made.batch.submit([edit(OF, taken, spec, place)])
        report = made.step()
    (row,) = present(report).advanced
    torch.testing.assert_close(row.latent[place.computed], wanted[place.computed], atol=FLOAT32, rtol=0)


def computed(of: ModelFamily, shape: SequenceShape, mode: BlockMode) -> StepWork:
    return step_work(of.operations, [shape], [(mode,) * BLOCKS])


def test_a_cost_model_is_told_of_every_step_that_loaded_nothing() -> None:
    model = Measured()
    made = engine(OF, model=model)
    made.batch.submit([edit(OF, template(OF, steps=1), Spec("edit", grid=GRID, steps=3, text_tokens=5))])
    first, second, third = (made.step() for _ in range(3))
    own, keys = 5 + 4, 5 + 16
    assert first is not None
    assert first.sample is not None
    assert first.sample.loaded_bytes > 0
    assert first.sample.predicted_ms == pytest.approx(
        model.costs.step_ms(computed(OF, SequenceShape(5, 16, 4), BlockMode.FULL))
    )
    assert second is not None
    assert second.sample is not None
    assert third is not None
    assert [work for work, _ in model.steps] == [computed(OF, SequenceShape(5, 16, 4), BlockMode.KV)] * 2
    assert (second.sample.image_tokens, second.sample.attention_pairs) == (4, own * keys)
    assert work_of(second.sample) == model.steps[0][0], (
        "so that a router learns from what the engine learns from"
    )


def test_a_sample_tells_how_long_its_own_step_has_waited_for_loads() -> None:
    """The clock goes on by a second whenever it is asked: each slab that is loaded in a step takes one."""
    seconds = itertools.count()
    made = Engine(OF, ROOMY, lambda: float(next(seconds)))
    made.batch.submit([edit(OF, template(OF, steps=1), Spec("edit", grid=GRID, steps=4, text_tokens=5))])
    samples = [report.sample for report in iter(made.step, None) if report.sample is not None]
    loading = [sample.loaded_bytes > 0 for sample in samples]
    assert loading == [True, False, False, False]
    assert [sample.waited_ms for sample in samples] == [1000.0 * BLOCKS, 0.0, 0.0, 0.0]


def test_a_sample_tells_what_is_expected_beyond_the_least_that_is_computed() -> None:

    def sampled(load_ms: float) -> list[StepSample]:
        model = Measured()
        model.costs = replace(Measured.costs, load=(0.0, load_ms))
        made = engine(OF, model=model, planner=plan_each_alone(uniform_modes(BlockMode.KV)))
        made.batch.submit([edit(OF, template(OF, steps=3), Spec("edit", grid=GRID, steps=3, text_tokens=5))])
        reports = [made.step() for _ in range(2)]
        return [report.sample for report in reports if report is not None and report.sample is not None]

    base_ms, least_ms = (
        Measured.costs.compute[0],
        Measured.costs.step_ms(computed(OF, SequenceShape(5, 16, 4), BlockMode.KV)),
    )
    free, dear = sampled(0.0), sampled(10.0)
    assert [sample.reusing_ms for sample in free] == pytest.approx([0.0, least_ms - base_ms])
    assert [sample.excess_ms for sample in free] == pytest.approx([0.0, 0.0])
    assert dear[1].reusing_ms == pytest.approx(least_ms - base_ms)
    assert dear[1].excess_ms == pytest.approx(dear[1].predicted_ms - least_ms)
    assert dear[1].excess_ms > least_ms


class Busy:
    """A loader that is in the middle of somebody else's load, and never gets to another."""

    def __init__(self, under_way: SlabLoad | None) -> None:
        self.under_way = under_way

    def schedule(self, groups: Iterable[Sequence[SlabRun]]) -> None:
        """None of them."""


def test_a_plan_begins_where_the_loader_is() -> None:
    taken = template(OF)
    others = Slabs(taken.entries[0], where(), 9, OF)
    seen: list[LoadLink] = []

    def planner(rows: Sequence[BatchRow], link: LoadLink, base_ms: float) -> BatchPlan:
        seen.append(link)
        return plan_batch(rows, link, base_ms)

    for under_way in (None, SlabLoad(others, 0, BlockMode.KV)):
        made = engine(OF, loader=Busy(under_way), planner=planner, model=Measured(), correction_bits=None)
        made.batch.submit([edit(OF, taken, Spec("edit", grid=GRID, steps=2))])
        made.step()
        made.batch.take_all()
    idle, busy = seen
    assert idle.busy_ms == 0
    assert busy.busy_ms == pytest.approx(Measured.costs.load_ms(others.load_bytes(0, BlockMode.KV)))


def test_a_hidden_state_at_hand_is_not_loaded() -> None:
    """Behind a block in full nothing has to be there for a block that projects: the template keeps no such thing."""
    taken, modes = template(OF), (BlockMode.FULL, BlockMode.HIDDEN, BlockMode.KV, BlockMode.KV)
    row = edit(OF, taken, Spec("edit", grid=GRID, steps=1))

    def planner(rows: Sequence[BatchRow], link: LoadLink, base_ms: float) -> BatchPlan:
        return evaluate_modes(rows, [modes for _ in rows], link, base_ms)

    heard: list[FinishedSlabLoad] = []
    with Loader(on_loaded=heard.append) as loader:
        latent = finish_rows(OF, [row], planner=planner, loader=loader, correction_bits=None)["edit"].latent
    assert [(loaded.load.block, loaded.load.mode) for loaded in heard] == [
        (2, BlockMode.KV),
        (3, BlockMode.KV),
    ]
    wanted = expected(OF, row, taken, modes, corrected=False)
    torch.testing.assert_close(latent, wanted, atol=FLOAT32, rtol=0)


def test_a_trace_shows_steps_blocks_and_loads(tmp_path: Path) -> None:
    taken = template(OF)
    ticks = iter(range(1_000_000))
    trace = Trace(clock=lambda: float(next(ticks)))
    with Loader() as loader:
        finish_rows(OF, [edit(OF, taken, Spec("edit", grid=GRID, steps=3))], loader=loader, trace=trace)
    trace.write(tmp_path / "deep" / "trace.json")
    events = json.loads((tmp_path / "deep" / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    blocks = [event["name"] for event in spans if event["cat"] == TraceLane.COMPUTE]
    assert blocks == [f"block {block}" for _ in range(3) for block in range(BLOCKS)]
    assert sum(event["cat"] == TraceLane.STEP for event in spans) == 3
    loads = [event for event in spans if event["cat"] == TraceLane.LOAD]
    assert {event["args"]["mode"] for event in loads} == {"kv"}
    assert all(event["dur"] > 0 and event["args"]["bytes"] > 0 for event in loads)
    assert {event["args"]["name"] for event in events if event["ph"] == "M"} == {
        str(lane) for lane in TraceLane
    }
