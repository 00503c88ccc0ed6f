"""The engine with templates and step caches: what serves which step, the first step's correction, plans, and loads."""

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
from torch import Tensor

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
from giornata_denoiser.engine.step_budget import row_bytes
from giornata_denoiser.families.network import ModelFamily
from giornata_denoiser.rows.parts import (
    Adapters,
    RowLora,
    TaylorExpansion,
    TaylorRule,
    cache_bytes,
    extrapolated,
)
from giornata_denoiser.rows.row import RecordingSpec, Row
from giornata_denoiser.rows.template import CachedBlock, CachedTemplate, Entry
from giornata_denoiser.trace import Trace
from giornata_lab.bench.compute import tiny_flux
from giornata_lab.bench.compute.rows import changed
from giornata_lab.bench.compute.tiny_flux import Spec
from tests.examples import examples
from tests.fakes.step_caches import taylor
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
from tests.unit.denoiser.engine.test_masked import BLOCKS, FLOAT32, OF, exact_family, step


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


# Step caches: rows of one step that pass all blocks or none, and do not notice each other.


TOLERANCE = 1e-10
TAYLOR = taylor(interval=4, order=1, warmup=2)


def cached(row: Row, rule: TaylorRule | None) -> Row:
    return replace(row, step_cache=rule)


def run(made: Engine, arrivals: dict[int, list[Row]]) -> tuple[dict[str, Tensor], list[tuple[int, int]]]:
    """Final latents by job, and of each computed step the blocks that it passed and skipped."""
    final: dict[str, Tensor] = {}
    blocks = []
    for number in range(60):
        made.batch.submit(arrivals.get(number, []))
        if (report := made.step()) is None:
            continue
        assert report.failed == ()
        if report.sample is not None:
            blocks.append((report.sample.blocks, report.sample.skipped_blocks))
        final |= {row.key.job_id: row.latent for row in report.advanced if row.done}
    return final, blocks


def test_a_row_whose_output_is_extrapolated_leaves_the_sample_to_others() -> None:
    rule = taylor(interval=3, order=1, warmup=1)
    beside, alone = engine(OF), engine(OF)
    rows = [
        cached(tiny_flux.row(OF, Spec("t", steps=6)), rule),
        tiny_flux.row(OF, Spec("o", steps=6, seed=1)),
    ]
    _, blocks = run(beside, {0: rows})
    computed = [rule.steps.computes(step) for step in range(6)]
    assert computed == [True, False, True, False, False, True]
    assert blocks == [(2 * BLOCKS, 0) if now else (BLOCKS, BLOCKS) for now in computed]
    _, blocks = run(alone, {0: rows[:1]})
    assert blocks == [(BLOCKS, 0)] * 3, "a step that computes nothing has no sample"


def test_steps_that_others_take_from_are_computed() -> None:
    never = taylor(interval=100, order=1, warmup=0)
    made = engine(OF)
    made.batch.submit([cached(changed(edit(OF, None, Spec(grid=GRID, steps=9)), renewed_every=4), never)])
    computed = [report.sample is not None for report in iter(made.step, None)]
    assert [step for step, now in enumerate(computed) if now] == [0, 1, 4, 8]  # the rule's own is the step 1


def test_what_is_remembered_says_nothing_of_other_loras_first_steps_that_others_take_from_and_recordings() -> (
    None
):
    output = torch.zeros(1, 12, 64)
    known = TaylorExpansion(0, 3, (output,))
    rule = taylor(100, 1, 1)
    row = replace(cached(tiny_flux.row(OF, Spec(steps=9)), replace(rule, known=known)), step=4, degree=1)
    assert extrapolated(row, learns=True) is known
    assert extrapolated(replace(row, degree=0), learns=True) is known, (
        "it has brought along what it remembers"
    )
    late = replace(row, adapters=Adapters((RowLora("l"),), loras_from=4))
    recording = RecordingSpec(frozenset({CacheForm.KV}), EXACT)
    for other in (
        late,
        changed(row, degree=0, prefix=(3,)),
        replace(row, degree=0, region=edit(OF, None, Spec(grid=GRID)).region),
        replace(row, step_cache=rule),
        replace(row, records=recording),
    ):
        assert extrapolated(other, learns=True) is None
    uncorrected = changed(row, region=edit(OF, None, Spec(grid=GRID)).region, template=template(OF))
    assert extrapolated(uncorrected, learns=True) is None
    assert extrapolated(uncorrected, learns=False) is known


def test_a_row_that_goes_on_elsewhere_begins_its_cache_again() -> None:
    rule = TAYLOR
    spec = Spec(steps=12)
    made = engine(OF)
    made.batch.submit([cached(tiny_flux.row(OF, spec), rule)])
    for _ in range(5):
        made.step()
    (row,) = made.batch.take_all()
    assert row.cached is not None
    resumed = cached(tiny_flux.row(OF, spec, row.export()), rule)
    assert resumed.cached is None
    _, blocks = run(engine(OF), {0: [resumed]})
    assert blocks[0] == (BLOCKS, 0)
    assert len(blocks) == spec.steps - 5 - rule.steps.skipped(spec.steps - 5)


@pytest.mark.parametrize(
    ("rule", "scale", "masked"), [(taylor(3, 0, 1), 1.0, True), (taylor(4, 2, 4), 2.0, False)]
)
def test_memory_counts_what_is_remembered(rule: TaylorRule, scale: float, *, masked: bool) -> None:
    spec = Spec(grid=GRID, steps=8, true_cfg_scale=scale)
    row = cached(changed(edit(OF, None, spec), renewed_every=3) if masked else tiny_flux.row(OF, spec), rule)
    counted = row_bytes(row, OF, None) - row_bytes(cached(row, None), OF, None)
    assert counted == cache_bytes(row) > 0
    made, held = engine(OF), 0
    made.batch.submit([row])
    while (report := made.step()) is not None:
        (after,) = report.advanced
        held = max(held, present(after.cached).size_bytes)
    assert held == counted


def test_a_failed_step_is_repeated_as_it_was() -> None:
    """A step that one row fails is computed again row by row: what rows remember is that of the step before."""
    of = exact_family()
    row = cached(tiny_flux.row(of, Spec("good", steps=9)), TAYLOR)
    alone, _ = run(engine(of), {0: [row]})
    made = Engine(of, ROOMY, lambda: 0.0)
    bad = tiny_flux.row(of, Spec("bad", steps=9, seed=3))
    bad = replace(bad, adapters=Adapters((RowLora("missing"),), loras_from=4))
    made.batch.submit([row, bad])
    final: dict[str, Tensor] = {}
    failed: list[str] = []
    while (report := made.step()) is not None:
        failed += [failure.row.key.job_id for failure in report.failed]
        final |= {each.key.job_id: each.latent for each in report.advanced if each.done}
    assert failed == ["bad"]
    torch.testing.assert_close(final["good"], alone["good"], atol=TOLERANCE, rtol=0)
