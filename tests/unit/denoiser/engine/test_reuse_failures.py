"""The engine where rows fail, leave, come again or lose a step: the others are as they were."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from giornata.packed.packing import BlockInputs, Residuals
from giornata.wire.errors import InternalError
from giornata.wire.values import BlockMode
from giornata_denoiser.choices import EXACT
from giornata_denoiser.engine.batch_tensors import ControlLost, ControlPart, with_residuals
from giornata_denoiser.engine.engine import CALM, Engine, EngineLoop, MemoryLimit
from giornata_denoiser.engine.loading import Loader
from giornata_denoiser.engine.model_runner import StepReport
from giornata_denoiser.engine.slabs import Device, Slabs, TransferHandle, WaitTimer
from giornata_denoiser.engine.step_budget import StepBudget, step_bytes
from giornata_denoiser.engine.step_plan import ReuseOptions
from giornata_denoiser.families.flux import FluxInpaint
from giornata_denoiser.rows.row import Row
from giornata_denoiser.rows.template import CachedTemplate, Entry
from giornata_lab.bench.compute import tiny_flux
from giornata_lab.bench.compute.rows import changed
from giornata_lab.bench.compute.tiny_flux import Spec
from tests.present import present
from tests.unit.denoiser.engine.edits import GRID, ROOMY, edit, engine, finish_rows, finished, template
from tests.unit.denoiser.engine.test_masked import FLOAT32, OF, exact_family
from tests.unit.denoiser.engine.test_renewing import Hiccup

# The engine with templates where rows fail, leave or come again: the others are as they were.


@pytest.mark.parametrize("at_step", [0, 3])
def test_a_row_that_fails_leaves_the_others_as_they_were(at_step: int) -> None:
    """Also in the step that teaches the others their correction, which is then computed again, each row alone."""
    of = exact_family()
    taken = template(of)
    good = edit(of, taken, Spec("good", grid=GRID, steps=5, seed=2))
    bad = edit(of, taken, Spec("bad", grid=GRID, steps=5, seed=3))
    wanted = finish_rows(of, [good], correction_bits=EXACT)["good"].latent
    made = engine(of, correction_bits=EXACT)
    made.batch.submit([good, bad])
    for _ in range(at_step):
        made.step()
    made.plan()
    (spoiled,) = (row for row in made.batch.running if row.key.job_id == "bad")
    made.batch.settle([replace(spoiled, latent=spoiled.latent[:3])], [])  # no forward takes it
    report = present(made.step())
    assert [failure.row.key.job_id for failure in report.failed] == ["bad"]
    torch.testing.assert_close(finished(made)["good"].latent, wanted, atol=FLOAT32, rtol=0)


def test_a_step_that_is_computed_again_teaches_its_rows_anew() -> None:
    taken = template(OF)
    rows = [edit(OF, taken, Spec(name, grid=GRID, steps=4, seed=i)) for i, name in enumerate("ab")]
    wanted = finish_rows(OF, rows)
    ended = finish_rows(tiny_flux.family(Hiccup(1)), rows)
    for name in "ab":
        torch.testing.assert_close(ended[name].latent, wanted[name].latent, atol=FLOAT32, rtol=0)


def test_a_template_that_cannot_be_loaded_is_a_miss() -> None:
    taken = template(OF)
    spec = Spec("edit", grid=GRID, steps=4)
    broken = Entry(
        taken.entries[0].level, tuple(replace(kept, value=None) for kept in taken.entries[0].blocks)
    )
    rows = [edit(OF, CachedTemplate("t", GRID, (broken,)), spec), edit(OF, None, spec)]
    latents = [finish_rows(OF, [row])["edit"].latent for row in rows]
    torch.testing.assert_close(*latents, atol=FLOAT32, rtol=0)


@pytest.mark.parametrize("where", ["load_bytes", "on_loaded", "finish"])
def test_a_loader_that_fails_once_costs_one_row_its_template_and_goes_on(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it fails: nobody waits for ever, and later rows are loaded for."""
    taken = template(OF)
    failures = ["once"]

    def fail_once() -> None:
        if failures and threading.current_thread().name == "loader":
            raise RuntimeError(failures.pop())

    if where == "load_bytes":
        whole = Slabs.load_bytes

        def load_bytes(self: Slabs, block: int, mode: BlockMode) -> int:
            fail_once()
            return whole(self, block, mode)

        monkeypatch.setattr(Slabs, "load_bytes", load_bytes)
    if where == "finish":
        monkeypatch.setattr(TransferHandle, "finish", lambda _: fail_once())
    with Loader(on_loaded=lambda _: fail_once() if where == "on_loaded" else None) as loader:
        rows = [edit(OF, taken, Spec("edit", grid=GRID, steps=5, seed=2)) for _ in range(2)]
        ended = [finish_rows(OF, [row], loader=loader)["edit"].latent for row in rows]
    assert failures == [], "it did fail"
    alone = engine(OF)
    alone.batch.submit([edit(OF, taken, Spec("alone", grid=GRID, steps=5, seed=2))])
    torch.testing.assert_close(ended[1], finished(alone)["alone"].latent, atol=FLOAT32, rtol=0)


@pytest.fixture
def living_slabs(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Counts the slabs of the test that are still there."""
    made, init = weakref.WeakSet[Slabs](), Slabs.__init__

    def noted(self: Slabs, *args: Any, **named: Any) -> None:
        init(self, *args, **named)
        made.add(self)

    def count() -> int:
        gc.collect()
        return len(made)

    monkeypatch.setattr(Slabs, "__init__", noted)
    return count


@pytest.mark.slow
@pytest.mark.parametrize("loaded_ahead", [False, True])
def test_an_idle_engine_keeps_nothing_of_its_last_rows(
    loaded_ahead: bool, living_slabs: Callable[[], int]
) -> None:
    taken = template(OF)
    ended = threading.Event()
    rested = threading.Event()

    class Resting(Engine):
        def rest(self) -> None:
            super().rest()
            if ended.is_set():
                rested.set()

    def heard(report: StepReport) -> None:
        if any(row.done for row in report.advanced):
            ended.set()

    with ExitStack() as stack:
        loader = stack.enter_context(Loader()) if loaded_ahead else None
        made = Resting(OF, ROOMY, lambda: 0.0, reusing=ReuseOptions(loader))
        loop = stack.enter_context(EngineLoop(made, heard, lambda _: None))
        assert loop.submit([edit(OF, taken, Spec("a", grid=GRID, steps=4))])
        assert rested.wait(20)
        assert living_slabs() == 0


class Small(FluxInpaint):
    """A network whose memory has no room for several rows, and that tells what they kept when one is tried alone."""

    kept: int | None = None
    living_slabs: Callable[[], int]

    def predict(self, batch: Any, latents: Tensor, *args: Any, **named: Any) -> Tensor:
        if len(latents) > 16:
            raise torch.OutOfMemoryError("no room")
        if self.kept is None:
            self.kept = self.living_slabs()
        return super().predict(batch, latents, *args, **named)


@pytest.mark.slow
def test_rows_are_tried_alone_once_memory_is_given_back(living_slabs: Callable[[], int]) -> None:
    taken = template(OF)
    rows = [edit(OF, taken, Spec(name, grid=GRID, steps=4, seed=i)) for i, name in enumerate("ab")]
    network = Small(tiny_flux.transformer())
    network.living_slabs = living_slabs
    made = engine(tiny_flux.family(network))
    made.batch.submit(rows)
    made.step()
    assert network.kept == 1, "the slabs of the row that is tried"
    assert set(finished(made)) == {"a", "b"}


class Narrow(FluxInpaint):
    """A network whose memory has room for two rows, and that counts how often more were tried."""

    failures = 0

    def predict(self, batch: Any, latents: Tensor, *args: Any, **named: Any) -> Tensor:
        if len(latents) > 2 * 16:
            self.failures += 1
            raise torch.OutOfMemoryError("no room")
        return super().predict(batch, latents, *args, **named)


def test_after_a_step_that_ran_out_of_memory_rows_take_turns() -> None:
    """The step is not tried again in every step; rows that do not fit wait, and end as they would have alone."""
    taken = template(OF)
    rows = [
        edit(OF, taken if i % 2 else None, Spec(f"r{i}", grid=GRID, steps=6, seed=i), None) for i in range(5)
    ]
    alone = engine(OF)
    alone.batch.submit(rows)
    wanted = finished(alone)
    network = Narrow(tiny_flux.transformer())
    with Loader() as loader:
        made = engine(tiny_flux.family(network), loader=loader)
        made.batch.submit(rows)
        first = present(made.step())
        assert len(first.advanced) == 5, "each alone"
        going_on = made.plan()
        aside = made.batch.waiting
        assert aside
        assert [row.key for row in (*going_on, *aside)] == [row.key for row in rows], "the last ones wait"
        assert {row.step for row in aside} == {1}
        ended = finished(made)
    assert network.failures <= 4
    assert set(ended) == set(wanted)
    for name, row in ended.items():
        torch.testing.assert_close(row.latent, wanted[name].latent, atol=FLOAT32, rtol=0)


def test_a_row_that_does_not_fit_alone_lowers_no_limit() -> None:
    network = Narrow(tiny_flux.transformer())
    made = engine(tiny_flux.family(network))
    large = tiny_flux.row(OF, Spec("large", grid=(7, 7), steps=2))
    small = [tiny_flux.row(OF, Spec(f"s{i}", grid=(2, 2), steps=2)) for i in range(4)]
    made.batch.submit([large])
    report = present(made.step())
    assert [failed.row.key.job_id for failed in report.failed] == ["large"]
    made.batch.submit(small)
    assert len(made.plan()) == 4


class Crowded(Device):
    """A device whose memory templates fill until they are given back."""

    def __init__(self) -> None:
        self.given_back = 0

    def give_back(self) -> None:
        self.given_back += 1


class Full(FluxInpaint):
    """A network that has room for nothing until `crowded` has given templates back, and then for so many steps."""

    crowded: Crowded
    tries = 0

    def predict(self, *args: Any, **named: Any) -> Tensor:
        self.tries += 1
        if not self.crowded.given_back:
            raise torch.OutOfMemoryError("no room")
        return super().predict(*args, **named)


@pytest.mark.parametrize("masked", [False, True])
def test_a_row_alone_that_runs_out_of_memory_is_tried_again_without_templates_on_the_device(
    masked: bool,
) -> None:
    network = Full(tiny_flux.transformer())
    network.crowded = Crowded()
    crowded = tiny_flux.family(network)
    made = Engine(crowded, ROOMY, lambda: 0.0, reusing=ReuseOptions(device=network.crowded))
    row = edit(OF, template(OF) if masked else None, Spec("a", grid=GRID, steps=3, seed=1), None)
    made.batch.submit([row])
    report = present(made.step())
    assert [(row.step, report.failed) for row in report.advanced] == [(1, ())]
    assert (network.tries, network.crowded.given_back) == (2, 1)
    torch.testing.assert_close(
        finished(made)["a"].latent,
        finish_rows(OF, [changed(row, template=None, renewed_every=0, records=None)])["a"].latent,
        atol=FLOAT32,
        rtol=0,
    )


def test_a_row_that_has_no_room_at_all_fails_at_the_second_try() -> None:
    network = Full(tiny_flux.transformer())
    network.crowded = Crowded()
    device = Crowded()
    made = Engine(tiny_flux.family(network), ROOMY, lambda: 0.0, reusing=ReuseOptions(device=device))
    made.batch.submit([tiny_flux.row(OF, Spec("a", grid=GRID, steps=3))])
    report = present(made.step())
    assert [type(failure.error) for failure in report.failed] == [InternalError], (
        "another denoiser may have room"
    )
    assert report.failed[0].error.retryable
    assert (network.tries, device.given_back) == (2, 1)


def test_the_limit_rises_again_slowly() -> None:
    rows = [tiny_flux.row(OF, Spec(f"r{i}", grid=GRID)) for i in range(4)]
    needed = step_bytes(rows, StepBudget(), OF)
    limit = MemoryLimit(StepBudget(memory_bytes=2 * needed), OF)
    limit.ran_out(rows)
    lowered = limit.budget.memory_bytes
    assert needed / 2 < lowered < needed
    assert not limit.fits(rows)
    limit.ran_out(rows[:3])
    assert limit.budget.memory_bytes < lowered
    for _ in range(CALM - 1):
        limit.went_well()
    assert limit.budget.memory_bytes < lowered, "not at once"
    for _ in range(30 * CALM):
        limit.went_well()
    assert limit.budget.memory_bytes == 2 * needed


def test_a_row_cancelled_between_steps_leaves_the_others_as_they_were() -> None:
    taken = template(OF)
    rows = [edit(OF, taken, Spec(name, grid=GRID, steps=5, seed=i)) for i, name in enumerate("ab")]
    wanted = finish_rows(OF, rows[:1])["a"].latent
    with Loader() as loader:
        made = engine(OF, loader=loader)
        made.batch.submit(rows)
        made.step()
        made.step()
        made.batch.cancel("b")
        done = finished(made)
    assert set(done) == {"a"}
    torch.testing.assert_close(done["a"].latent, wanted, atol=FLOAT32, rtol=0)


def test_a_row_of_the_same_name_is_corrected_anew() -> None:
    taken = template(OF)
    first, second = (edit(OF, taken, Spec("job", grid=GRID, steps=4, seed=seed)) for seed in (1, 2))
    wanted = finish_rows(OF, [second])["job"].latent
    made = engine(OF)
    made.batch.submit([first])
    made.step()
    made.batch.cancel("job")
    made.batch.submit([second])
    torch.testing.assert_close(finished(made)["job"].latent, wanted, atol=FLOAT32, rtol=0)


# Steps that are lost inside the network, for want of what a ControlNet adds: repeated as if none had been.


STEPS = 6


@dataclass
class Failing(Residuals):
    """Adds nothing, and is lost behind a block."""

    row: Row
    behind: int
    whole: bool = True

    def sample(self, block: int) -> Tensor | None:
        if block == self.behind:
            raise ControlLost({self.row.key})
        return None


@dataclass
class Losing(ControlPart):
    """Loses the first row once in a step, behind a block."""

    step: int
    behind: int
    lost: list[int] = field(default_factory=list)

    def add(
        self, rows: Sequence[Row], uses: tuple[BlockInputs, ...], waits: WaitTimer
    ) -> tuple[BlockInputs, ...]:
        if rows[0].step != self.step or self.lost:
            return super().add(rows, uses, waits)
        self.lost.append(rows[0].step)
        failing: tuple[Residuals, ...] = (Failing(rows[0], self.behind),) * len(rows[0].inputs.prompts)
        return with_residuals(uses, rows, (failing, *(() for _ in rows[1:])))


@pytest.mark.parametrize(("step", "behind"), [(0, 3), (1, 3), (3, 3), (4, 0)])
def test_a_repeated_step_makes_what_it_would_have_made(step: int, behind: int) -> None:
    """Corrections that are learned, and keys and values that are kept, are half written by then."""
    of = exact_family()
    plain = edit(of, None, Spec("renewing", grid=GRID, steps=STEPS, seed=2, true_cfg_scale=2.0))
    rows = [
        changed(plain, renewed_every=3, keeps_padding=True),
        edit(of, template(of, steps=STEPS), Spec("taking", grid=GRID, steps=STEPS, seed=3)),
    ]
    ends = []
    for controls in (ControlPart(), Losing(step, behind)):
        made = Engine(of, ROOMY, lambda: 0.0, reusing=ReuseOptions(correction_bits=EXACT), controls=controls)
        made.batch.submit(rows)
        ends.append(finished(made))
    assert controls.lost == [step]  # type: ignore[attr-defined]  # of the last one
    for name, row in ends[0].items():
        torch.testing.assert_close(ends[1][name].latent, row.latent, atol=FLOAT32, rtol=0)
