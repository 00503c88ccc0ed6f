"""The engine with templates: what serves which step, the first step's correction, plans, loads, and who may share."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from giornata.packed.attention import Outside
from giornata.packed.region import Region, region
from giornata.packed.sequences import Sequences
from giornata.packed.tracing import UNTRACED, Lane, Tracing
from giornata.packed.uses import Reuse, Use
from giornata.planning.batch import PLANNERS, BatchPlan, BatchPlanner, BatchRow, PlannerName, plan_batch
from giornata.planning.blocks import Link
from giornata.planning.costs import StepCosts, Work
from giornata.planning.profile import BatchCap
from giornata.scheduling.batch import Capacity
from giornata.wire.values import Mode
from giornata.wire.workers import StepSample
from giornata_denoiser.blocks.loader import Loader
from giornata_denoiser.blocks.loads import Load
from giornata_denoiser.blocks.slabs import Slabs
from giornata_denoiser.engine.engine import Engine
from giornata_denoiser.engine.options import ReuseOptions
from giornata_denoiser.engine.weighing import Budget, fits, row_bytes, share, slab_bytes, step_bytes
from giornata_denoiser.families.flux.inpaint import FluxInpaint
from giornata_denoiser.families.protocol import Family
from giornata_denoiser.rows.row import Recording, Row
from giornata_denoiser.rows.stored import EXACT
from giornata_denoiser.rows.template import Entry, Form, Kept, Template
from giornata_denoiser.trace import Trace
from tests.fakes import tiny_flux
from tests.fakes.tiny_flux import Spec
from tests.unit.denoiser.test_masked import BLOCKS, FLOAT32, Everything, step

FORMS = [frozenset({Form.KV}), frozenset({Form.HIDDEN}), frozenset(Form), frozenset()]
GRID = (4, 4)
ROOMY = Capacity(rows=8, tokens=10_000)


def engine(of: Family, **how: object) -> Engine:
    budget, trace = how.pop("budget", None), how.pop("trace", None)
    assert budget is None or isinstance(budget, Budget)
    reusing = ReuseOptions(**how)  # type: ignore[arg-type]  # by name
    if isinstance(trace, Trace):
        return Engine(of, ROOMY, lambda: 0.0, budget=budget, reusing=reusing, trace=trace)
    return Engine(of, ROOMY, lambda: 0.0, budget=budget, reusing=reusing)


def finished(made: Engine) -> dict[str, Row]:
    rows: dict[str, Row] = {}
    while (report := made.step()) is not None:
        assert report.failed == ()
        rows |= {row.key.job_id: row for row in report.advanced if row.done}
    return rows


def template(
    of: Family, forms: frozenset[Form] = FORMS[0], *, steps: int = 4, first_block: int = 0
) -> Template:
    recording = Recording(forms, EXACT, first_block)
    made = engine(of)
    made.batch.submit([replace(tiny_flux.row(of, Spec("run", grid=GRID, steps=steps)), recording=recording)])
    return Template("t", GRID, finished(made)["run"].entries)


def where(tokens: Sequence[int] = (0, 5, 10, 15)) -> Region:
    touched = torch.zeros(GRID, dtype=torch.bool)
    touched.view(-1)[list(tokens)] = True
    found = region(touched, 0)
    assert found is not None
    return found


def edit(of: Family, taken: Template | None, spec: Spec, place: Region | None = None) -> Row:
    return replace(tiny_flux.row(of, spec), region=place or where(), template=taken)


class Oracle:
    """What an entry kept of outside tokens, changed as the first step of the edit showed."""

    def __init__(self, entry: Entry, place: Region, seen: tuple[Entry, Everything] | None) -> None:
        self.entry, self.outside, self.seen = entry, place.outside, seen

    def _part(self, block: int, part: str, own: Callable[[Everything], Tensor]) -> Tensor:
        def kept(entry: Entry) -> Tensor:
            stored = getattr(entry.blocks[block], part)
            return torch.as_tensor(stored.data)[self.outside]

        if self.seen is None:
            return kept(self.entry)
        first, everything = self.seen
        return kept(self.entry) + own(everything)[self.outside].flatten(1) - kept(first)

    def keys_values(self, block: int) -> Outside:
        key = self._part(block, "key", lambda seen: seen.heads[block][0])
        value = self._part(block, "value", lambda seen: seen.heads[block][1])
        return Outside(key.view(-1, 4, 16), value.view(-1, 4, 16))

    def hidden(self, block: int) -> Tensor:
        return self._part(block, "hidden", lambda seen: seen.inputs[block])


def expected(of: Family, row: Row, taken: Template, modes: tuple[Mode, ...], *, corrected: bool) -> Tensor:
    """The edit's final latent by a second implementation: every step from the entry of its noise level."""
    seen: list[tuple[Entry, Everything]] = []
    place = row.region
    assert place is not None
    while not row.done:
        entry = min(taken.entries, key=lambda entry: abs(entry.sigma - row.sigma))
        if corrected and not seen:
            everything = [Everything() for _ in row.prompts]
            seen = [(entry, each) for each in everything]
            row = row.advanced(step(of, [row], everything)[0])
            continue
        sources = [Oracle(entry, place, seen[i] if seen else None) for i in range(len(row.prompts))]
        row = row.advanced(step(of, [row], [Reuse(modes, source) for source in sources])[0])
    return row.latent


def preferred_modes(forms: frozenset[Form]) -> tuple[Mode, ...]:
    mode = Mode.KV if Form.KV in forms else Mode.HIDDEN if forms else Mode.FULL
    return (mode,) * BLOCKS


@pytest.mark.parametrize("bits", [None, EXACT])
@pytest.mark.parametrize("forms", FORMS)
@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_an_engine_records_a_template_and_serves_edits_from_it(
    forms: frozenset[Form], scale: float, bits: int | None
) -> None:
    """Every step of an edit takes from the entry of its noise level, as a second implementation does."""
    of = tiny_flux.family()
    taken = template(of, forms)
    other = tiny_flux.row(of, Spec("other", grid=(2, 3), steps=2, true_cfg_scale=2.0, seed=4))
    spec = Spec("edit", grid=GRID, steps=7, text_tokens=3, true_cfg_scale=scale, seed=0)
    row = edit(of, taken, spec)
    wanted = expected(of, row, taken, preferred_modes(forms), corrected=bits is not None)
    made = engine(of, correction_bits=bits)
    made.batch.submit([row, other])
    ended = finished(made)
    torch.testing.assert_close(ended["edit"].latent, wanted, atol=FLOAT32, rtol=0)
    alone = engine(of)
    alone.batch.submit([other])
    torch.testing.assert_close(ended["other"].latent, finished(alone)["other"].latent, atol=FLOAT32, rtol=0)
    if forms:
        full = replace(row, key=replace(row.key, job_id="full"), template=None)
        made.batch.submit([full])
        assert (finished(made)["full"].latent - ended["edit"].latent).abs().max() > 10 * FLOAT32


def test_no_entry_within_the_tolerance_means_to_compute_everything() -> None:
    of = tiny_flux.family()
    far = Template("t", GRID, (Entry(2.0, (Kept(),) * BLOCKS),))
    latents = []
    for taken in (None, far):
        made = engine(of)
        made.batch.submit([replace(edit(of, taken, Spec(grid=GRID)), tolerance=0.5)])
        latents.append(finished(made)["job"].latent)
    assert torch.equal(*latents)


def test_blocks_before_the_first_that_was_kept_are_computed_in_full() -> None:
    of = tiny_flux.family()
    part, whole = template(of, first_block=2), template(of)
    assert part.size_bytes * 2 == whole.size_bytes
    row = edit(of, part, Spec("edit", grid=GRID, steps=5, seed=1))
    modes = (Mode.FULL, Mode.FULL, Mode.KV, Mode.KV)
    wanted = expected(of, row, part, modes, corrected=True)
    made = engine(of, correction_bits=EXACT)
    made.batch.submit([row])
    torch.testing.assert_close(finished(made)["edit"].latent, wanted, atol=FLOAT32, rtol=0)


def chaotic(seed: int) -> BatchPlanner:
    """Any modes that what is kept permits."""
    draw = random.Random(seed)  # noqa: S311 - no secrets

    def planner(rows: Sequence[BatchRow], link: Link, base_ms: float) -> BatchPlan:
        plan = plan_batch(rows, link, base_ms)
        return BatchPlan(
            tuple(tuple(draw.choice(list(Mode)) for _ in chosen) for chosen in plan.modes), plan.timeline
        )

    return planner


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), ahead=st.booleans())
def test_any_modes_give_the_runs_own_step(seed: int, *, ahead: bool) -> None:
    """With the template run's own prompt, noise and level, whatever is planned and however it is loaded."""
    of = tiny_flux.family()
    taken, spec, place = template(of, frozenset(Form)), Spec("run", grid=GRID), where()
    (wanted,) = step(of, [tiny_flux.row(of, spec)])
    with Loader() as loader:
        made = engine(of, planner=chaotic(seed), loader=loader if ahead else None, correction_bits=None)
        made.batch.submit([edit(of, taken, spec, place)])
        report = made.step()
    assert report is not None
    (row,) = report.advanced
    torch.testing.assert_close(row.latent[place.computed], wanted[place.computed], atol=FLOAT32, rtol=0)


@pytest.mark.parametrize("planner", PLANNERS)
def test_every_planner_serves_an_edit_to_its_end(planner: PlannerName) -> None:
    of = tiny_flux.family()
    taken = template(of, frozenset(Form), steps=3)
    row = edit(of, taken, Spec("edit", grid=GRID, steps=6, seed=2))
    with Loader() as loader:
        made = engine(of, planner=PLANNERS[planner], loader=loader, correction_bits=EXACT, model=Measured())
        made.batch.submit([row])
        done = finished(made)["edit"]
    assert done.latent.isfinite().all()
    if planner in {PlannerName.KV, PlannerName.HIDDEN, PlannerName.FULL}:
        reference = expected(of, row, taken, (Mode(planner),) * BLOCKS, corrected=True)
        torch.testing.assert_close(done.latent, reference, atol=FLOAT32, rtol=0)


class Measured:
    """Costs at which loading is worth planning, and what it was told."""

    costs = StepCosts((0.1, 0.0, 1e-2, 3e-3, 0.0), (0.0, 2e-6))

    def __init__(self) -> None:
        self.steps: list[tuple[Work, float]] = []

    def observe_step(self, work: Work, step_ms: float) -> None:
        self.steps.append((work, step_ms))


def test_a_cost_model_is_told_of_every_step_that_loaded_nothing() -> None:
    of = tiny_flux.family()
    model = Measured()
    made = engine(of, model=model)
    made.batch.submit([edit(of, template(of, steps=1), Spec("edit", grid=GRID, steps=3, text_tokens=5))])
    first, second, third = (made.step() for _ in range(3))
    own, keys = 5 + 4, 5 + 16
    assert first is not None
    assert first.sample is not None
    assert first.sample.loaded_bytes > 0
    assert first.sample.predicted_ms == pytest.approx(
        model.costs.step_ms(Work(BLOCKS, keys * BLOCKS, 0, keys**2 * BLOCKS))
    )
    assert second is not None
    assert third is not None
    assert [work.tokens for work, _ in model.steps] == [own * BLOCKS] * 2
    assert [work.pairs for work, _ in model.steps] == [own * keys * BLOCKS] * 2


def test_a_sample_tells_what_is_expected_beyond_the_least_that_is_computed() -> None:
    of = tiny_flux.family()
    own, keys = 5 + 4, 5 + 16

    def sampled(load_ms: float) -> list[StepSample]:
        model = Measured()
        model.costs = replace(Measured.costs, load=(0.0, load_ms))
        made = engine(of, model=model, planner=PLANNERS[PlannerName.KV])
        made.batch.submit([edit(of, template(of, steps=3), Spec("edit", grid=GRID, steps=3, text_tokens=5))])
        reports = [made.step() for _ in range(2)]
        return [report.sample for report in reports if report is not None and report.sample is not None]

    base_ms, least_ms = (
        Measured.costs.compute[0],
        Measured.costs.step_ms(Work(1, own, 0, own * keys) * BLOCKS),
    )
    free, dear = sampled(0.0), sampled(1.0)
    assert [sample.reusing_ms for sample in free] == pytest.approx([0.0, least_ms - base_ms])
    assert [sample.excess_ms for sample in free] == pytest.approx([0.0, 0.0])
    assert dear[1].reusing_ms == pytest.approx(least_ms - base_ms)
    assert dear[1].excess_ms == pytest.approx(dear[1].predicted_ms - least_ms)
    assert dear[1].excess_ms > least_ms


class Busy:
    """A loader that is in the middle of somebody else's load, and never gets to another."""

    def __init__(self, under_way: Load | None) -> None:
        self.under_way = under_way

    def schedule(self, loads: Iterable[Load]) -> None:
        """None of them."""


def test_a_plan_begins_where_the_loader_is() -> None:
    of = tiny_flux.family()
    taken = template(of)
    others = Slabs(taken.entries[0], where(), 9, of)
    seen: list[Link] = []

    def planner(rows: Sequence[BatchRow], link: Link, base_ms: float) -> BatchPlan:
        seen.append(link)
        return plan_batch(rows, link, base_ms)

    for under_way in (None, Load(others, 0, Mode.KV)):
        made = engine(of, loader=Busy(under_way), planner=planner, model=Measured(), correction_bits=None)
        made.batch.submit([edit(of, taken, Spec("edit", grid=GRID, steps=2))])
        made.step()
        made.batch.take_all()
    idle, busy = seen
    assert idle.busy_ms == 0
    assert busy.busy_ms == pytest.approx(Measured.costs.load_ms(others.size_bytes(0, Mode.KV)))


@pytest.mark.parametrize("at_step", [0, 1, 3])
def test_a_row_that_fails_leaves_the_others_as_they_were(at_step: int) -> None:
    """Also in the step that teaches the others their correction, which is then computed again, each row alone."""
    of = tiny_flux.family()
    taken = template(of)
    good = edit(of, taken, Spec("good", grid=GRID, steps=5, seed=2))
    bad = edit(of, taken, Spec("bad", grid=GRID, steps=5, seed=3))
    alone = engine(of)
    alone.batch.submit([good])
    wanted = finished(alone)["good"].latent
    made = engine(of)
    made.batch.submit([good, bad])
    for _ in range(at_step):
        made.step()
    made.plan()
    (spoiled,) = (row for row in made.batch.running if row.key.job_id == "bad")
    made.batch.settle([replace(spoiled, latent=spoiled.latent[:3])], [])  # no forward takes it
    report = made.step()
    assert report is not None
    assert [failure.row.key.job_id for failure in report.failed] == ["bad"]
    torch.testing.assert_close(finished(made)["good"].latent, wanted, atol=FLOAT32, rtol=0)


class Hiccup(FluxInpaint):
    """A family whose first forward fails in its last block, whoever is in it."""

    failed = False

    def velocity(
        self,
        sequences: Sequences,
        image: Tensor,
        timestep: Tensor,
        uses: Sequence[Use] = (),
        trace: Tracing = UNTRACED,
    ) -> Tensor:
        found = super().velocity(sequences, image, timestep, uses, trace)
        if not self.failed:
            self.failed = True
            raise RuntimeError("once")
        return found


def test_a_step_that_is_computed_again_teaches_its_rows_anew() -> None:
    of = tiny_flux.family()
    taken = template(of)
    rows = [edit(of, taken, Spec(name, grid=GRID, steps=4, seed=i)) for i, name in enumerate("ab")]
    calm = engine(of)
    calm.batch.submit(rows)
    wanted = finished(calm)
    made = engine(Hiccup(tiny_flux.transformer()))
    made.batch.submit(rows)
    ended = finished(made)
    for name in "ab":
        torch.testing.assert_close(ended[name].latent, wanted[name].latent, atol=FLOAT32, rtol=0)


def test_a_template_that_cannot_be_loaded_is_a_miss() -> None:
    of = tiny_flux.family()
    taken = template(of)
    spec = Spec("edit", grid=GRID, steps=4)
    broken = Entry(
        taken.entries[0].sigma, tuple(replace(kept, value=None) for kept in taken.entries[0].blocks)
    )
    rows = [edit(of, Template("t", GRID, (broken,)), spec), edit(of, None, spec)]
    latents = []
    for row in rows:
        made = engine(of)
        made.batch.submit([row])
        latents.append(finished(made)["edit"].latent)
    torch.testing.assert_close(*latents, atol=FLOAT32, rtol=0)


def test_an_edit_of_one_step_is_computed_in_full() -> None:
    of = tiny_flux.family()
    spec = Spec("edit", grid=GRID, steps=1)
    latents = []
    for taken in (template(of), None):
        made = engine(of)
        made.batch.submit([edit(of, taken, spec)])
        latents.append(finished(made)["edit"].latent)
    torch.testing.assert_close(*latents, atol=FLOAT32, rtol=0)


def test_a_row_cancelled_between_steps_leaves_the_others_as_they_were() -> None:
    of = tiny_flux.family()
    taken = template(of)
    rows = [edit(of, taken, Spec(name, grid=GRID, steps=5, seed=i)) for i, name in enumerate("ab")]
    alone = engine(of)
    alone.batch.submit(rows[:1])
    wanted = finished(alone)["a"].latent
    with Loader() as loader:
        made = engine(of, loader=loader)
        made.batch.submit(rows)
        made.step()
        made.step()
        made.batch.cancel("b")
        done = finished(made)
    assert set(done) == {"a"}
    torch.testing.assert_close(done["a"].latent, wanted, atol=FLOAT32, rtol=0)


def test_a_row_of_the_same_name_is_corrected_anew() -> None:
    of = tiny_flux.family()
    taken = template(of)
    first, second = (edit(of, taken, Spec("job", grid=GRID, steps=4, seed=seed)) for seed in (1, 2))
    alone = engine(of)
    alone.batch.submit([second])
    wanted = finished(alone)["job"].latent
    made = engine(of)
    made.batch.submit([first])
    made.step()
    made.batch.cancel("job")
    made.batch.submit([second])
    torch.testing.assert_close(finished(made)["job"].latent, wanted, atol=FLOAT32, rtol=0)


def rows_of_any_weight(of: Family, taken: Template) -> Iterator[Row]:
    draw = random.Random(0)  # noqa: S311 - no secrets
    for number in range(1000):
        spec = Spec(f"r{number}", grid=GRID, steps=draw.randint(1, 3), true_cfg_scale=draw.choice([1.0, 2.0]))
        tokens = draw.sample(range(16), draw.randint(1, 15))
        yield edit(of, taken if draw.random() < 0.7 else None, spec, where(tokens))


def test_memory_stays_within_its_budget_over_a_thousand_admissions() -> None:
    of = tiny_flux.family()
    taken = template(of)
    rows = list(rows_of_any_weight(of, taken))
    activation = 1000.0
    most = 4 * max(step_bytes([row], activation, of) for row in rows)
    made = engine(of, budget=Budget(memory_bytes=most, activation_bytes=activation))
    made.batch.submit(rows)
    fullest, admitted = 0, set()
    while joined := made.plan():
        admitted |= {row.key for row in joined}
        assert step_bytes(joined, activation, of) <= most
        fullest = max(fullest, len(joined))
        made.batch.settle(
            [row.advanced(row.latent) for row in joined], [r.key for r in joined if r.step + 1 >= r.steps]
        )
    assert len(admitted) == 1000
    assert fullest > 4


def test_what_is_counted_is_what_is_held() -> None:
    of = tiny_flux.family()
    row = edit(of, template(of), Spec("edit", grid=GRID, steps=6, true_cfg_scale=2.0, text_tokens=7))
    slabs = (
        [Slabs(row.template.entries[0], row.region, own, of) for own in row.own_tokens]
        if row.template and row.region
        else []
    )
    held = [slab.keys_values(block) for slab in slabs for block in range(BLOCKS)]
    assert slab_bytes(row, 4) == sum(each.key.nbytes + each.value.nbytes for each in held) > 0
    run = replace(tiny_flux.row(of, Spec("run", grid=GRID, steps=3)), recording=Recording(FORMS[0], EXACT))
    recorded = template(of, steps=3).size_bytes
    assert row_bytes(run, of) - row_bytes(replace(run, recording=None), of) == recorded


def test_rows_share_a_step_while_it_is_predicted_to_be_short_enough() -> None:
    of = tiny_flux.family()
    costs = StepCosts((1.0, 0.0, 0.1, 0.0, 0.0))
    rows = [edit(of, None, Spec(f"r{i}", grid=GRID, text_tokens=4)) for i in range(4)]
    alone_ms = 1.0 + 0.1 * 20 * BLOCKS
    assert not fits(rows[:2], Budget(step_ms=alone_ms), costs, of)
    assert fits(rows[:2], Budget(step_ms=2 * alone_ms), costs, of)
    assert not fits(rows, Budget(step_ms=2 * alone_ms), costs, of)


def test_a_cap_counts_rows_of_unequal_sizes() -> None:
    caps = (BatchCap(tokens=100, rows=4), BatchCap(tokens=1000, rows=2))
    assert [share(tokens, caps) for tokens in (50, 100, 101, 5000)] == [0.25, 0.25, 0.5, 0.5]
    assert share(50, ()) == 0
    of = tiny_flux.family()
    rows = [edit(of, None, Spec(f"r{i}", grid=GRID)) for i in range(3)]
    tight = Budget(caps=(BatchCap(tokens=1000, rows=2),))
    assert fits(rows[:2], tight, StepCosts((0.0,) * 5), of)
    assert not fits(rows, tight, StepCosts((0.0,) * 5), of)


def test_a_trace_shows_steps_blocks_and_loads(tmp_path: Path) -> None:
    of = tiny_flux.family()
    taken = template(of)
    ticks = iter(range(1_000_000))
    trace = Trace(clock=lambda: float(next(ticks)))
    with Loader() as loader:
        made = engine(of, loader=loader, trace=trace)
        made.batch.submit([edit(of, taken, Spec("edit", grid=GRID, steps=3))])
        finished(made)
    trace.write(tmp_path / "deep" / "trace.json")
    events = json.loads((tmp_path / "deep" / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    blocks = [event["name"] for event in spans if event["cat"] == Lane.COMPUTE]
    assert blocks == [f"block {block}" for _ in range(3) for block in range(BLOCKS)]
    assert sum(event["cat"] == Lane.STEP for event in spans) == 3
    loads = [event for event in spans if event["cat"] == Lane.LOAD]
    assert {event["args"]["mode"] for event in loads} == {"kv"}
    assert all(event["dur"] > 0 and event["args"]["bytes"] > 0 for event in loads)
    assert {event["args"]["name"] for event in events if event["ph"] == "M"} == {str(lane) for lane in Lane}
