"""The engine's thread: how it ends, rows whose adapters are not here yet, and rows under LoRAs."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from giornata.packed.low_rank import SequenceLoras, low_rank
from giornata.scheduling.batch import Capacity
from giornata.wire.errors import InternalError
from giornata_denoiser.choices import EXACT
from giornata_denoiser.engine.batch_tensors import LoraPart, LowRanks
from giornata_denoiser.engine.engine import Engine, EngineLoop
from giornata_denoiser.engine.model_runner import StepReport
from giornata_denoiser.engine.step_plan import ReuseOptions
from giornata_denoiser.families.flux import FluxInpaint
from giornata_denoiser.families.network import ModelFamily
from giornata_denoiser.rows.parts import Adapters, RowControl, RowLora
from giornata_denoiser.rows.row import Row
from giornata_denoiser.templates.store import CorrectionCache
from giornata_lab.bench.compute import tiny_flux
from giornata_lab.bench.compute.rows import changed
from giornata_lab.bench.compute.tiny_flux import Spec
from tests.patience import HUNG_S
from tests.present import present
from tests.unit.denoiser.engine.edits import GRID, ROOMY, edit, template
from tests.unit.denoiser.engine.test_masked import OF, exact_family

# The engine's thread: how it ends. What it owes the service is in :mod:`tests.contract.test_row_engine`.


SMALL = Capacity(rows=2, tokens=1000)


class Gated(FluxInpaint):
    """A network whose steps wait for `gate`, and that tells when one has begun; it can lose its device."""

    def __init__(self) -> None:
        super().__init__(tiny_flux.transformer())
        self.gate = threading.Semaphore(0)
        self.begun = threading.Semaphore(0)
        self.lost = False

    def model_input(self, latents: Tensor, conditioning: Sequence[Mapping[str, Tensor]]) -> Tensor:
        self.begun.release()
        assert self.gate.acquire(timeout=HUNG_S)
        if self.lost:
            raise torch.AcceleratorError("the device is gone", 1)
        return super().model_input(latents, conditioning)


class GatedLoop:
    """A loop over a gated network, whose steps a test begins and ends."""

    def __init__(self, capacity: Capacity = SMALL, low_ranks: LowRanks | None = None) -> None:
        self.network = Gated()
        self.family = tiny_flux.family(self.network)
        self.reports: queue.Queue[StepReport] = queue.Queue()
        self.crashes: queue.Queue[Exception] = queue.Queue()
        self.engine = EngineLoop(
            Engine(self.family, capacity, time.monotonic, low_ranks=low_ranks),
            self.reports.put,
            self.crashes.put,
        )

    def submit(self, *specs: Spec) -> bool:
        return self.engine.submit([tiny_flux.row(self.family, spec) for spec in specs])

    def begin(self) -> None:
        assert self.network.begun.acquire(timeout=HUNG_S)

    def finish_once_left(self) -> None:
        """Let the running step end when the loop has been told to leave."""
        with self.engine._condition:
            assert self.engine._condition.wait_for(lambda: self.engine._stopping, HUNG_S)
        self.network.gate.release()

    def finish(self) -> StepReport:
        self.network.gate.release()
        return self.reports.get(timeout=HUNG_S)


def test_leaving_ends_after_the_running_step_and_keeps_the_rest() -> None:
    made = GatedLoop()
    with made.engine:
        made.submit(Spec("a", steps=5))
        made.begin()
        assert [row.step for row in made.finish().advanced] == [1]
        made.begin()
        threading.Thread(target=made.finish_once_left).start()
    (row,) = made.engine.take_all()
    assert row.step == 2


def test_a_lost_device_is_told_and_keeps_the_rows() -> None:
    made = GatedLoop()
    made.network.lost = True
    made.network.gate.release(10)
    with made.engine:
        made.submit(Spec("a"))
        assert isinstance(made.crashes.get(timeout=HUNG_S), torch.AcceleratorError)
        assert not made.submit(Spec("b"))
        assert [row.key.job_id for row in made.engine.take_all()] == ["a"]


def test_an_idle_loop_ends_at_once() -> None:
    with GatedLoop().engine:
        pass


# Rows that wait for LoRAs, and rows that begin without them.


LORAS = (RowLora("a" * 64),)
PLAIN = tiny_flux.row(OF, Spec("x"))


class ResidentLoraSets:
    """Sets that a test loads."""

    def __init__(self) -> None:
        self.here: set[tuple[RowLora, ...]] = set()
        self._changes_nothing = SequenceLoras("empty", {})

    def find(self, loras: tuple[RowLora, ...]) -> SequenceLoras | None:
        return self._changes_nothing if loras in self.here else None


def adapted(row: Row, loras_from: int = 0) -> Row:
    return replace(row, adapters=Adapters(LORAS, loras_from))


@given(step=st.integers(0, 5), loras_from=st.integers(0, 6), here=st.booleans())
def test_a_row_whose_request_tells_the_step_takes_its_loras_there(
    step: int, loras_from: int, *, here: bool
) -> None:
    shelf = ResidentLoraSets()
    shelf.here = {LORAS} if here else set()
    adapters = Adapters(LORAS, loras_from, joins_early=False)
    row = changed(PLAIN, adapters=adapters, step=step, corrections=())
    assert LoraPart(shelf).able(row) == (row if here or step < loras_from else None)


@given(step=st.integers(0, 5), loras_from=st.integers(0, 6), here=st.booleans())
def test_a_row_goes_on_while_it_may_and_takes_its_loras_at_the_first_boundary(
    step: int, loras_from: int, *, here: bool
) -> None:
    shelf = ResidentLoraSets()
    shelf.here = {LORAS} if here else set()
    row = changed(adapted(PLAIN, loras_from), step=step, corrections=())
    now = LoraPart(shelf).able(row)
    if not here and step >= loras_from:
        assert now is None
        return
    assert now is not None
    joins = here and step < loras_from
    assert now.adapters.loras_from == (step if joins else loras_from)
    assert (now.reuse.corrections is None) == joins, "what was learned without them is void"


@pytest.fixture
def shelf() -> ResidentLoraSets:
    return ResidentLoraSets()


@pytest.fixture
def gated(shelf: ResidentLoraSets) -> GatedLoop:
    return GatedLoop(low_ranks=shelf)


def test_a_row_waits_for_its_loras_while_others_go_on(gated: GatedLoop, shelf: ResidentLoraSets) -> None:
    late, other = (tiny_flux.row(gated.family, Spec(name)) for name in ("late", "other"))
    with gated.engine as loop:
        loop.submit([adapted(late), other])
        gated.begin()
        assert [row.key.job_id for row in loop.state().running] == ["other"]
        shelf.here.add(LORAS)
        loop.resume("late", 1)
        gated.network.gate.release(1000)
        done = _ended(gated, 2)
        assert loop.paused == 1
    assert done["late"].adapters.loras_from == 0
    alone = _alone(tiny_flux.row(gated.family, Spec("late")))
    torch.testing.assert_close(done["late"].latent, alone, rtol=1e-4, atol=1e-5)


def test_a_row_that_waits_for_a_second_input_is_counted_once(
    gated: GatedLoop, shelf: ResidentLoraSets
) -> None:
    late, other = (tiny_flux.row(gated.family, Spec(name, steps=8)) for name in ("late", "other"))
    with gated.engine as loop:
        loop.submit([adapted(late), other])
        gated.begin()
        for _ in range(3):  # something else has come
            loop.resume("late", 1)
            gated.finish()
            gated.begin()
        counted = loop.paused
        shelf.here.add(LORAS)
        loop.resume("late", 1)
        gated.finish()
        gated.network.gate.release(1000)
        _ended(gated, 2)
    assert counted == loop.paused == 1


def test_the_loop_sleeps_while_all_rows_wait_and_wakes_for_the_first(
    gated: GatedLoop, shelf: ResidentLoraSets
) -> None:
    gated.network.gate.release(1000)
    with gated.engine as loop:
        loop.submit([adapted(tiny_flux.row(gated.family, Spec("late")))])
        assert not loop.state().running
        shelf.here.add(LORAS)
        loop.resume("late", 1)
        assert _ended(gated, 1)["late"].done


def test_a_bounded_row_pauses_at_its_bound(gated: GatedLoop, shelf: ResidentLoraSets) -> None:
    row = adapted(tiny_flux.row(gated.family, Spec("x")), loras_from=2)
    with gated.engine as loop:
        loop.submit([row])
        for _ in range(2):
            gated.begin()
            gated.network.gate.release()
            last = gated.reports.get(timeout=HUNG_S).advanced[0]
        assert last.step == 2
        loop.submit([tiny_flux.row(gated.family, Spec("other"))])
        gated.begin()
        assert [(row.key.job_id, row.step) for row in loop.state().waiting] == [("x", 2)]
        shelf.here.add(LORAS)
        loop.resume("x", 1)
        gated.network.gate.release(1000)
        assert _ended(gated, 2)["x"].adapters.loras_from == 2


def test_a_row_that_waits_can_be_cancelled_and_taken(gated: GatedLoop) -> None:
    with gated.engine as loop:
        loop.submit([adapted(tiny_flux.row(gated.family, Spec(name))) for name in ("a", "b")])
        assert [row.key.job_id for row in loop.cancel("a")] == ["a"]
        loop.resume("a", 1)  # too late, and harmless
        assert [row.key.job_id for row in loop.take_all()] == ["b"]


def _ended(gated: GatedLoop, count: int) -> dict[str, Row]:
    done: dict[str, Row] = {}
    while len(done) < count:
        report = gated.reports.get(timeout=HUNG_S)
        assert not report.failed
        done |= {row.key.job_id: row for row in report.advanced if row.done}
    return done


def _alone(row: Row) -> torch.Tensor:
    gated = GatedLoop()
    gated.network.gate.release(1000)
    with gated.engine as loop:
        loop.submit([row])
        return _ended(gated, 1)[row.key.job_id].latent


# Rows under LoRAs in an engine: each as alone, never without a set that is to act, and corrected under
# its own.


ONE, TWO = RowLora("one", 1.0), RowLora("two", 0.5)
SETS = ((), (ONE,), (ONE, TWO))
EXACTLY = 1e-5


class LoraSetStore:
    """A store of sets; satisfies :class:`LowRanks`."""

    def __init__(self, sets: Mapping[tuple[RowLora, ...], SequenceLoras]) -> None:
        self.sets = dict(sets)

    def find(self, loras: tuple[RowLora, ...]) -> SequenceLoras | None:
        return self.sets.get(loras)


@pytest.fixture(scope="module")
def of() -> ModelFamily:
    return exact_family()


@pytest.fixture(scope="module")
def store(of: ModelFamily) -> LoraSetStore:
    """Random sets of every layer of the blocks."""
    generator = torch.Generator().manual_seed(0)

    def tensors() -> dict[str, Tensor]:
        made = {}
        for path, layer in of.network.transformer.named_modules():  # type: ignore[attr-defined]  # of Flux
            if isinstance(layer, torch.nn.Linear):
                shapes = {"down": (4, layer.in_features), "up": (layer.out_features, 4)}
                for part, shape in shapes.items():
                    made[f"{path}.{part}"] = 0.1 * torch.randn(shape, generator=generator).double()
        return made

    loras = {ONE: tensors(), TWO: tensors()}
    return LoraSetStore(
        {each: low_rank(str(each), [(loras[lora], lora.scale) for lora in each]) for each in SETS if each}
    )


def engine(of: ModelFamily, low_ranks: LowRanks) -> Engine:
    reusing = ReuseOptions(correction_bits=EXACT)
    return Engine(of, ROOMY, lambda: 0.0, reusing=reusing, low_ranks=low_ranks)


def finished(made: Engine, *rows: Row) -> dict[str, Row]:
    made.batch.submit(rows)
    done: dict[str, Row] = {}
    while (report := made.step()) is not None:
        assert report.failed == ()
        done |= {row.key.job_id: row for row in report.advanced if row.done}
    return done


def rows_of(of: ModelFamily) -> list[Row]:
    """Full, renewing and taking from a template, guided or not, under each set; no two neighbours have the same."""
    taken, rows = template(of, steps=6), []
    for index in range(9):
        guided = 2.0 if index % 2 else 1.0
        spec = Spec(str(index), grid=GRID, steps=6, seed=index, true_cfg_scale=guided, text_tokens=4 + index)
        kind = index // 3
        row = tiny_flux.row(of, spec) if kind == 0 else edit(of, taken if kind == 1 else None, spec)
        row = changed(row, renewed_every=3) if kind == 2 else row
        rows.append(replace(row, adapters=Adapters(SETS[index % 3])))
    return rows


def test_equal_sets_are_neighbours_in_a_step(of: ModelFamily, store: LoraSetStore) -> None:
    made = engine(of, store)
    made.batch.submit(rows_of(of)[:8])
    order = [row.adapters.loras for row in made.plan()]
    assert order == sorted(order)
    assert len(set(order)) == 3


@pytest.mark.parametrize("kind", [0, 1, 2], ids=["full", "template", "renewing"])
def test_loras_that_join_later_act_from_their_step_on(
    of: ModelFamily, store: LoraSetStore, kind: int
) -> None:
    """It is the row without them up to that step, and from there the row that goes on elsewhere under them."""
    plain = rows_of(of)[3 * kind]
    late = replace(plain, adapters=Adapters(SETS[2], loras_from=2))
    made = engine(of, store)
    made.batch.submit([plain])
    for _ in range(2):
        report = made.step()
    there = changed(present(report).advanced[0], degree=0, corrections=None, adapters=Adapters(SETS[2]))
    wanted = finished(engine(of, store), there)[plain.key.job_id]
    found = finished(engine(of, store), late)[plain.key.job_id]
    torch.testing.assert_close(found.latent, wanted.latent, atol=EXACTLY, rtol=0)


def test_the_step_in_which_loras_join_is_in_full(of: ModelFamily, store: LoraSetStore) -> None:
    made = engine(of, store)
    made.batch.submit(
        [replace(rows_of(of)[index], adapters=Adapters(SETS[1], loras_from=2)) for index in (3, 6)]
    )
    tokens = []
    for _ in range(4):
        report = present(made.step())
        tokens.append(present(report.sample).image_tokens)
    assert tokens[0] == tokens[2] == 3 * 16  # one of them is guided
    assert tokens[1] == 3 * 4


def test_a_row_is_never_computed_without_a_set_that_is_to_act(of: ModelFamily, store: LoraSetStore) -> None:
    rows = rows_of(of)[:3]
    made = engine(of, LoraSetStore({SETS[1]: store.sets[SETS[1]]}))
    made.batch.submit(rows)
    report = present(made.step())
    assert {row.key for row in report.advanced} == {row.key for row in rows[:2]}
    (failed,) = report.failed
    assert failed.row.key == rows[2].key
    assert isinstance(failed.error, InternalError)
    assert "LoRA" in str(failed.error)


def test_corrections_belong_to_the_set_under_which_they_were_learned(
    of: ModelFamily, store: LoraSetStore
) -> None:
    kept = CorrectionCache(1 << 30)
    for index in (3, 4):
        made = engine(of, store)
        made.batch.submit([rows_of(of)[index]])
        report = present(made.step())
        (row,) = report.advanced
        assert row.reuse.taught
        if index == 4:
            row = changed(
                row,
                prompts=row.inputs.prompts[:1],
                corrections=row.reuse.corrections and row.reuse.corrections[:1],
            )
        assert kept.claim(row)
        kept.keep(row)
        assert row.region is not None
        assert row.reuse.template is not None
        under = present(row.adapters.learned_under(0))
        assert (
            kept.find(row.reuse.template.id, row.region, 2 if index == 3 else 1, under)
            == row.reuse.corrections
        )
        assert kept.find(row.reuse.template.id, row.region, 1, "another set") is None
    controlled = replace(row, adapters=Adapters(controls=(RowControl("m", "d", 1.0, 0, 4),)))
    assert not kept.claim(controlled)
