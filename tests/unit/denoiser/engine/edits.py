"""Engines, templates and edits over a tiny family, and what an edit comes to by a second implementation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from giornata.packed.attention import DenseKV
from giornata.packed.packing import BlockInputs, CachedTokens, Region, make_region
from giornata.planning.operations import StepCosts, StepWork
from giornata.scheduling.batch import Capacity
from giornata.wire.values import BlockMode
from giornata_denoiser.choices import EXACT, CacheForm
from giornata_denoiser.engine.engine import Engine
from giornata_denoiser.engine.step_budget import StepBudget
from giornata_denoiser.engine.step_plan import ReuseOptions
from giornata_denoiser.families.network import ModelFamily
from giornata_denoiser.rows.row import RecordingSpec, Row
from giornata_denoiser.rows.template import CachedTemplate, Entry
from giornata_denoiser.trace import Trace
from giornata_lab.bench.compute import tiny_flux
from giornata_lab.bench.compute.rows import changed
from giornata_lab.bench.compute.tiny_flux import Spec
from tests.present import present
from tests.unit.denoiser.engine.test_masked import BLOCKS, Everything, step

FORMS = [frozenset({CacheForm.KV}), frozenset({CacheForm.HIDDEN}), frozenset(CacheForm), frozenset()]
GRID = (4, 4)
ROOMY = Capacity(rows=8, tokens=10_000)


def engine(of: ModelFamily, **how: object) -> Engine:
    budget, trace = how.pop("budget", None), how.pop("trace", None)
    assert budget is None or isinstance(budget, StepBudget)
    reusing = ReuseOptions(**how)  # type: ignore[arg-type]  # by name
    if isinstance(trace, Trace):
        return Engine(of, ROOMY, lambda: 0.0, budget=budget, reusing=reusing, trace=trace)
    return Engine(of, ROOMY, lambda: 0.0, budget=budget, reusing=reusing)


def finished(made: Engine) -> dict[str, Row]:
    rows: dict[str, Row] = {}
    while (report := made.step()) is not None:
        assert report.failed == ()
        rows |= {row.key.job_id: row for row in report.advanced if row.done}
    assert_nothing_kept(made)
    return rows


def finish_rows(of: ModelFamily, rows: Sequence[Row], **how: object) -> dict[str, Row]:
    """The rows of an engine of their own at their end, by the names of their jobs."""
    made = engine(of, **how)
    made.batch.submit(rows)
    return finished(made)


def assert_nothing_kept(made: Engine) -> None:
    """An engine without rows holds nothing of those that it had."""
    assert len(made.batch) == 0
    assert not made.computing.keys


def template(
    of: ModelFamily, forms: frozenset[CacheForm] = FORMS[0], *, steps: int = 4, first_block: int = 0
) -> CachedTemplate:
    recording = RecordingSpec(forms, EXACT, first_block)
    made = engine(of)
    made.batch.submit([replace(tiny_flux.row(of, Spec("run", grid=GRID, steps=steps)), records=recording)])
    return CachedTemplate("t", GRID, finished(made)["run"].entries)


def where(tokens: Sequence[int] = (0, 5, 10, 15)) -> Region:
    touched = torch.zeros(GRID, dtype=torch.bool)
    touched.view(-1)[list(tokens)] = True
    return present(make_region(touched))


def edit(of: ModelFamily, taken: CachedTemplate | None, spec: Spec, place: Region | None = None) -> Row:
    return changed(tiny_flux.row(of, spec), region=place or where(), template=taken)


class Oracle:
    """What an entry kept of outside tokens, changed as the first step of the edit showed."""

    keeps = False

    def __init__(self, entry: Entry, place: Region, seen: tuple[Entry, Everything] | None) -> None:
        self.entry, self.outside, self.seen = entry, place.outside, seen

    def _part(self, block: int, part: str, own: Callable[[Everything], Tensor]) -> Tensor:
        def kept(entry: Entry) -> Tensor:
            stored = getattr(entry.blocks[block], part)
            return torch.as_tensor(stored.data)[self.outside]

        if self.seen is None:
            return kept(self.entry)
        first, everything = self.seen
        shrunk: float = (max(self.entry.level, 0.25) / max(first.level, 0.25)) ** 0.5
        return kept(self.entry) + shrunk * (own(everything)[self.outside].flatten(1) - kept(first))

    def keys_values(self, block: int) -> DenseKV:
        key = self._part(block, "key", lambda seen: seen.heads[block][0])
        value = self._part(block, "value", lambda seen: seen.heads[block][1])
        return DenseKV(key.view(-1, 4, 16), value.view(-1, 4, 16))

    def hidden(self, block: int) -> Tensor:
        return self._part(block, "hidden", lambda seen: seen.inputs[block])

    def part(self, block: int, part: str) -> Tensor:
        raise AssertionError("a transformer takes nothing else")


def expected(
    of: ModelFamily,
    row: Row,
    taken: CachedTemplate,
    modes: tuple[BlockMode, ...],
    *,
    corrected: bool,
    teacher: Row | None = None,
) -> Tensor:
    """The edit's final latent by a second implementation: every step from the entry of its noise level.

    Where it is `corrected`, by its own first step or by that of a `teacher`.
    """
    seen: list[tuple[Entry, Everything]] = []
    place = present(row.region)
    if teacher is not None:
        seen, _ = _first_step(of, teacher, taken)
    while not row.done:
        if corrected and not seen:
            seen, latent = _first_step(of, row, taken)
            row = row.advanced(latent)
            continue
        entry = min(taken.entries, key=lambda entry: abs(entry.level - row.level))
        sources = [Oracle(entry, place, seen[i] if seen else None) for i in range(len(row.inputs.prompts))]
        row = row.advanced(
            step(of, [row], [BlockInputs(CachedTokens(modes, source)) for source in sources])[0]
        )
    return row.latent


def _first_step(
    of: ModelFamily, row: Row, taken: CachedTemplate
) -> tuple[list[tuple[Entry, Everything]], Tensor]:
    """What a step in full shows of every sequence, beside the entry of its level; and the latent after it."""
    entry = min(taken.entries, key=lambda entry: abs(entry.level - row.level))
    everything = [Everything() for _ in row.inputs.prompts]
    latent = step(of, [row], [BlockInputs(recorder=each) for each in everything])[0]
    return [(entry, each) for each in everything], latent


def preferred_modes(forms: frozenset[CacheForm]) -> tuple[BlockMode, ...]:
    mode = BlockMode.KV if CacheForm.KV in forms else BlockMode.HIDDEN if forms else BlockMode.FULL
    return (mode,) * BLOCKS


class Measured:
    """Costs at which loading is worth planning, and what it was told."""

    costs = StepCosts((0.1, 0.0, 1e-2, 0.0, 0.0, 0.0), (0.0, 2e-6))

    def __init__(self) -> None:
        self.steps: list[tuple[StepWork, float]] = []

    def observe_step(self, work: StepWork, step_ms: float) -> None:
        self.steps.append((work, step_ms))
