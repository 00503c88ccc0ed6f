"""What every sequence of a step does with a template, and the slabs that running rows keep between steps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from weakref import WeakValueDictionary

from giornata.packed.uses import Use, by_sequence
from giornata.planning.batch import BatchPlanner, plan_batch
from giornata.planning.costs import Shape, StepCosts, Work, step_work
from giornata.scheduling.batch import RowKey
from giornata.wire.values import Mode
from giornata_denoiser.blocks.correction import Correction
from giornata_denoiser.blocks.loads import Load, LoadsAhead
from giornata_denoiser.blocks.recording import EntryRecorder
from giornata_denoiser.blocks.slabs import Slabs
from giornata_denoiser.engine.served import Served, planned, preferred
from giornata_denoiser.engine.weighing import predicted_ms, reuses
from giornata_denoiser.families.protocol import Family
from giornata_denoiser.rows.row import Row
from giornata_denoiser.rows.template import Entry

MakeSlabs = Callable[[Entry, Row, int, Correction | None], Slabs]
"""Slabs of a row's entry for a sequence that computes so many tokens, corrected or not."""


@dataclass(frozen=True)
class Reuses:
    """What one step takes and records."""

    uses: tuple[Use, ...]
    """By sequence of the batch; positive sequences come first."""
    work: Work
    """What the step computes, over all blocks."""
    predicted_ms: float
    reusing_ms: float
    """Of that, what rows that take from templates compute at least."""
    excess_ms: float
    """Of that, what is beyond the least of all rows."""
    missing_bytes: int
    """Of what it takes, not yet loaded when it began."""


@dataclass(frozen=True, eq=False)
class Entries:
    """What serves each step of a row."""

    row: Row
    by_step: tuple[Entry | None, ...]

    @classmethod
    def of(cls, row: Row) -> Entries:
        """By the noise levels of its steps; a template run takes nothing, nor does a row that computes everything."""
        if row.template is None or row.region is None or row.recording is not None:
            return cls(row, (None,) * row.steps)
        levels = row.sigmas.sigmas[: row.steps].tolist()
        return cls(row, tuple(row.template.at(level, row.tolerance) for level in levels))

    def are_of(self, row: Row) -> bool:
        """Whether `row` is that row some steps later, and not another of its name."""
        return row.conditioning is self.row.conditioning and row.template is self.row.template

    def at(self, step: int) -> Entry | None:
        """Of one step, also beyond the last."""
        return self.by_step[step] if step < len(self.by_step) else None

    def after(self, step: int) -> Entry | None:
        """The next other one."""
        now = self.at(step)
        return next((entry for entry in self.by_step[step + 1 :] if entry not in (None, now)), None)


class Sources:
    """The slabs of running rows.

    Args:
        family: whose slabs they are.
        make_slabs: makes them.
        costs: of the machine, as they are known now.
        loader: loads ahead, this step's slabs and later ones; without it each is loaded when its block asks.
        planner: of :data:`giornata.planning.batch.PLANNERS`.
        ahead_bytes: most slabs that are loaded for later steps.
        correction_bits: in which corrections are kept; None corrects nothing.
        shares: rows of one entry load it once; see :attr:`giornata_denoiser.blocks.device.Device.shares`.
    """

    def __init__(
        self,
        family: Family,
        make_slabs: MakeSlabs,
        costs: Callable[[], StepCosts],
        *,
        loader: LoadsAhead | None = None,
        planner: BatchPlanner = plan_batch,
        ahead_bytes: int = 1 << 30,
        correction_bits: int | None = 8,
        shares: bool = False,
    ) -> None:
        self._family, self._make_slabs, self._costs = family, make_slabs, costs
        self._loader, self._planner, self._ahead_bytes = loader, planner, ahead_bytes
        self._correction_bits, self._shares = correction_bits, shares
        self._entries: dict[RowKey, Entries] = {}
        self._corrections: dict[RowKey, tuple[Correction, ...]] = {}
        self._served: dict[RowKey, Served] = {}
        self._next: dict[RowKey, Served] = {}
        self._shared: WeakValueDictionary[tuple[object, ...], Slabs] = WeakValueDictionary()

    def retain(self, keys: Collection[RowKey]) -> None:
        """Forget all rows but these."""
        for known in (self._entries, self._corrections, self._served, self._next):
            for key in known.keys() - keys:
                del known[key]

    def step(self, rows: Sequence[Row]) -> Reuses:
        """What the next step of the batch of `rows` takes and records; begins to load what it takes."""
        for row in rows:
            self._advance(row)
        self._look_ahead(rows)
        costs = self._costs()
        planned_ms = self._plan(rows, costs)
        work = step_work(*self._computed(rows))
        missing = sum(self._served[row.key].missing_bytes for row in rows if row.key in self._served)
        if self._loader is not None:
            self._loader.schedule(self._loads(rows))
        uses = by_sequence([self._uses_of(row) for row in rows])
        expected_ms = max(planned_ms, costs.step_ms(work))
        least_ms, reusing_ms = self._least(rows, costs)
        return Reuses(uses, work, expected_ms, reusing_ms, max(0.0, expected_ms - least_ms), missing)

    def _least(self, rows: Sequence[Row], costs: StepCosts) -> tuple[float, float]:
        """What a step of `rows` computes if no load has to be waited for; of that, those who take from templates."""
        base_ms = costs.compute[0]
        each_ms = [predicted_ms([row], costs, self._family.blocks) - base_ms for row in rows]
        reusing_ms = sum(ms for row, ms in zip(rows, each_ms, strict=True) if reuses(row))
        return base_ms + sum(each_ms), reusing_ms

    def _uses_of(self, row: Row) -> tuple[Use, ...]:
        if row.recording is not None:
            what = row.recording
            recorder = EntryRecorder(row.sigma, self._family.blocks, what.forms, what.bits, what.first_block)
            return (recorder,)
        served = self._served.get(row.key)
        return (None,) * len(row.prompts) if served is None else served.uses()

    def _advance(self, row: Row) -> None:
        """What serves the row's step; what is here already stays."""
        known = self._entries.get(row.key)
        if known is None or not known.are_of(row):
            self.retain([key for key in self._entries if key != row.key])
            known = self._entries[row.key] = Entries.of(row)
        entry, served = known.at(row.step), self._served.pop(row.key, None)
        if entry is None:
            return
        if served is not None and served.corrections and served.step == row.step:
            # The step that was to teach them has failed and is tried again: what they have learnt may be half of it,
            # and the slabs may hold the row's own values already.
            del self._corrections[row.key]
            served = None
        ahead = self._next.get(row.key)
        if ahead is not None and ahead.entry is entry:
            served = self._next.pop(row.key)
        if served is None or served.entry is not entry:
            served = self._made(row, entry)
        corrected = self._correcting(row, replace(served, corrections=(), step=row.step))
        if corrected is not None:
            self._served[row.key] = corrected

    def _correcting(self, row: Row, served: Served) -> Served | None:
        """To be computed in full and learnt from, if that has not been done; None where no later step would profit."""
        if self._correction_bits is None or row.region is None or row.key in self._corrections:
            return served
        if not any(self._entries[row.key].by_step[row.step + 1 :]):
            return None
        bits = self._correction_bits
        made = tuple(Correction(slabs, row.region, bits) for slabs in served.slabs)
        self._corrections[row.key] = made
        return replace(served, corrections=made)

    def _look_ahead(self, rows: Sequence[Row]) -> None:
        """The next other source of rows, as far as there is room; not before their correction is known."""
        room = self._ahead_bytes
        for row in rows if self._loader is not None else ():
            entry, now = self._entries[row.key].after(row.step), self._served.get(row.key)
            if entry is None or (now is not None and now.corrections):
                continue
            served = self._next.get(row.key)
            if served is None or served.entry is not entry:
                served = self._made(row, entry)
            room -= served.size_bytes
            if room < 0:
                self._next.pop(row.key, None)
            else:
                self._next[row.key] = served

    def _made(self, row: Row, entry: Entry) -> Served:
        corrections = self._corrections.get(row.key, (None,) * len(row.prompts))
        slabs = tuple(
            self._slabs(row, entry, own, correction)
            for own, correction in zip(row.own_tokens, corrections, strict=True)
        )
        return Served(entry, slabs, row.shapes, preferred(entry))

    def _slabs(self, row: Row, entry: Entry, own: int, correction: Correction | None) -> Slabs:
        """Those of another sequence, if nothing is the row's own: neither now nor once it is corrected."""
        if row.region is None or self._correction_bits is not None:
            return self._make_slabs(entry, row, own, correction)
        key = id(entry), row.region.digest, own
        found = self._shared.get(key)
        if found is None:
            found = self._shared[key] = self._make_slabs(entry, row, own, None)
        return found

    def _plan(self, rows: Sequence[Row], costs: StepCosts) -> float:
        """Choose the modes of rows whose modes may still change; the step's predicted end in ms, 0 if none does."""
        here = {row.key: row for row in rows if row.key in self._served}
        open_ = [key for key in here if not (self._served[key].final or self._served[key].corrections)]
        if not open_:
            return 0.0
        beside, modes = self._computed([row for row in rows if row.key not in open_])
        # Costs of the step itself are spread over its blocks: time that loads may hide behind.
        beside_ms = costs.step_ms(step_work(beside, modes)) / self._family.blocks
        following = [self._next.get(key) if self._changes(here[key]) else None for key in open_]
        served = [self._served[key] for key in open_]
        chosen, ended_ms = planned(
            served,
            following,
            costs,
            self._planner,
            beside_ms=beside_ms,
            busy_ms=costs.load_ms(self._busy_bytes(served)),
            shared=self._shares,
        )
        self._served |= dict(zip(open_, chosen, strict=True))
        return ended_ms

    def _busy_bytes(self, planned_for: Sequence[Served]) -> int:
        """Of a load that has begun for others, or for later: the link is not free before."""
        load = None if self._loader is None else self._loader.under_way
        if load is None or any(load.slabs in served.slabs for served in planned_for):
            return 0
        return load.slabs.load_bytes(load.block, load.mode)

    def _changes(self, row: Row) -> bool:
        """Whether the next step is served by another entry than this one."""
        known = self._entries[row.key]
        return known.at(row.step + 1) is not known.at(row.step)

    def _computed(self, rows: Sequence[Row]) -> tuple[list[Shape], list[tuple[Mode, ...]]]:
        """The shapes of all sequences of `rows` and the modes of their blocks."""
        full = (Mode.FULL,) * self._family.blocks
        shapes: list[Shape] = []
        modes: list[tuple[Mode, ...]] = []
        for row in rows:
            served = self._served.get(row.key)
            shapes += row.shapes
            modes += [full if served is None else served.computed] * len(row.shapes)
        return shapes, modes

    def _loads(self, rows: Sequence[Row]) -> Iterator[Load]:
        """In the order of their use: this step's, what it did without and the next step can use, later ones."""
        now = {row.key: self._served[row.key] for row in rows if row.key in self._served}
        yield from _in_order(now.values())
        yield from _in_order(
            replace(now[row.key], modes=preferred(now[row.key].entry))
            for row in rows
            if row.key in now and not (now[row.key].final or self._changes(row))
        )
        yield from _in_order(self._next[row.key] for row in rows if row.key in self._next)


def _in_order(served: Iterable[Served]) -> Iterator[Load]:
    """Loads in the order in which blocks ask for them."""
    every = list(served)
    for block in range(max((len(each.modes) for each in every), default=0)):
        for each in every:
            yield from each.load(block)
