"""What every sequence of a step does with a template, and the slabs that running rows keep between steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from weakref import WeakValueDictionary

from giornata.planning.batch import BatchPlanner, plan_batch
from giornata.planning.blocks import Mode
from giornata.planning.costs import Shape, StepCosts, Work, step_work
from giornata_denoiser.batch import RowKey
from giornata_denoiser.families.protocol import Family
from giornata_denoiser.reuse.device import Device, Host
from giornata_denoiser.reuse.loader import Load, Loader
from giornata_denoiser.reuse.recording import EntryRecorder
from giornata_denoiser.reuse.region import Region
from giornata_denoiser.reuse.served import Served, planned, preferred
from giornata_denoiser.reuse.slabs import Slabs, Waits
from giornata_denoiser.reuse.template import Entry, Template
from giornata_denoiser.reuse.uses import Use
from giornata_denoiser.row import Row
from giornata_denoiser.trace import UNTRACED, Tracing

UNKNOWN = StepCosts((0.0, 0.0, 1.0, 0.3, 0.0))
"""Of a machine that nobody measured: computing counts tokens, loading nothing."""


@dataclass(frozen=True)
class Reuses:
    """What one step takes and records."""

    uses: tuple[Use, ...]
    """By sequence of the batch; positive sequences come first."""
    work: Work
    """What the step computes, over all blocks."""
    predicted_ms: float
    missing_bytes: int
    """Of what it takes, not yet loaded when it began."""


@dataclass(frozen=True, eq=False)
class Entries:
    """What serves each step of a row."""

    template: Template | None
    by_step: tuple[Entry | None, ...]

    @classmethod
    def of(cls, row: Row) -> Entries:
        """By the noise levels of its steps; a template run takes nothing, nor does a row that computes everything."""
        if row.template is None or row.region is None or row.recording is not None:
            return cls(row.template, (None,) * row.steps)
        levels = row.sigmas.sigmas[: row.steps].tolist()
        return cls(row.template, tuple(row.template.at(level, row.tolerance) for level in levels))


class Sources:
    """The slabs of running rows. A row that no longer runs leaves none behind.

    Args:
        family: whose slabs they are.
        loader: loads ahead, this step's slabs and later ones; without it each is loaded when its block asks.
        costs: of the machine, as they are known now.
        planner: of :data:`giornata.planning.batch.PLANNERS`.
        device: how slabs get to it.
        ahead_bytes: most slabs that are loaded for later steps.
        waits: told how long steps wait for loads.
        trace: told of every load.
    """

    def __init__(
        self,
        family: Family,
        loader: Loader | None = None,
        *,
        costs: Callable[[], StepCosts] = lambda: UNKNOWN,
        planner: BatchPlanner = plan_batch,
        device: Device | None = None,
        ahead_bytes: int = 1 << 30,
        waits: Waits | None = None,
        trace: Tracing = UNTRACED,
    ) -> None:
        self._family, self._loader, self._ahead_bytes = family, loader, ahead_bytes
        self._costs, self._planner, self._device = costs, planner, device or Host()
        self._waits, self._trace = waits, trace
        self._served: dict[RowKey, Served] = {}
        self._next: dict[RowKey, Served] = {}
        self._entries: dict[RowKey, Entries] = {}
        self._shared: WeakValueDictionary[tuple[int, bytes, int], Slabs] = WeakValueDictionary()

    def step(self, rows: Sequence[Row]) -> Reuses:
        """What the next step of the batch of `rows` takes and records; begins to load what it takes."""
        before = (self._served, self._next)
        self._entries = {row.key: self._entries_of(row) for row in rows if row.template is not None}
        self._served = dict(self._serving(rows, before))
        self._next = dict(self._following(rows, before))
        costs = self._costs()
        predicted_ms = self._plan(rows, costs)
        work = step_work(*self._computed(rows))
        missing = sum(served.missing_bytes for served in self._served.values())
        if self._loader is not None:
            self._loader.schedule(self._loads(rows))
        of_rows = [self._uses_of(row) for row in rows]
        uses = [uses[0] for uses in of_rows] + [uses[1] for uses in of_rows if len(uses) > 1]
        return Reuses(tuple(uses), work, max(predicted_ms, costs.step_ms(work)), missing)

    def _uses_of(self, row: Row) -> tuple[Use, ...]:
        if row.recording is not None:
            what = row.recording
            recorder = EntryRecorder(row.sigma, self._family.blocks, what.forms, what.bits, what.first_block)
            return (recorder,)
        served = self._served.get(row.key)
        return (None,) * len(row.prompts) if served is None else served.uses()

    def _serving(
        self, rows: Sequence[Row], before: Sequence[Mapping[RowKey, Served]]
    ) -> Iterator[tuple[RowKey, Served]]:
        """Every row's source in this step; what is here already stays."""
        for row in rows:
            entry = self._entry(row, row.step)
            if entry is not None:
                yield row.key, self._of(row, entry, before)

    def _following(
        self, rows: Sequence[Row], before: Sequence[Mapping[RowKey, Served]]
    ) -> Iterator[tuple[RowKey, Served]]:
        """Every row's next source, where it will have another one, as far as there is room."""
        room = self._ahead_bytes
        for row in rows:
            now = self._served.get(row.key)
            later = (self._entry(row, step) for step in range(row.step + 1, row.steps))
            entry = next((e for e in later if e is not None and (now is None or e is not now.entry)), None)
            if entry is None or self._loader is None:
                continue
            served = self._of(row, entry, before)
            room -= served.size_bytes
            if room < 0:
                return
            yield row.key, served

    def _of(self, row: Row, entry: Entry, before: Sequence[Mapping[RowKey, Served]]) -> Served:
        here = (known[row.key] for known in before if row.key in known)
        kept = next((served for served in here if served.entry is entry), None)
        return kept or self._made(row, entry)

    def _entry(self, row: Row, step: int) -> Entry | None:
        """What serves a row's step, if anything does."""
        known = self._entries.get(row.key)
        return None if known is None or step >= row.steps else known.by_step[step]

    def _entries_of(self, row: Row) -> Entries:
        """Found once a row."""
        known = self._entries.get(row.key)
        if known is None or known.template is not row.template:
            return Entries.of(row)
        return known

    def _made(self, row: Row, entry: Entry) -> Served:
        region = row.region
        if region is None:
            raise ValueError(f"row {row.key} computes everything")
        slabs = tuple(self._slabs(entry, region, own) for own in row.own_tokens)
        return Served(entry, slabs, row.shapes, preferred(entry))

    def _slabs(self, entry: Entry, region: Region, own: int) -> Slabs:
        key = id(entry), region.digest, own
        found = self._shared.get(key)
        if found is None:
            found = self._shared[key] = Slabs(
                entry,
                region,
                own,
                self._family,
                device=self._device,
                waits=self._waits,
                trace=self._trace,
            )
        return found

    def _plan(self, rows: Sequence[Row], costs: StepCosts) -> float:
        """Choose the modes of rows whose modes may still change; the step's predicted end in ms, 0 if none does."""
        open_ = {row.key: row for row in rows if row.key in self._served and not self._served[row.key].final}
        if not open_:
            return 0.0
        beside, modes = self._computed([row for row in rows if row.key not in open_])
        blocks = self._family.blocks
        # Costs of the step itself are spread over its blocks: time that loads may hide behind.
        beside_ms = costs.step_ms(step_work(beside, modes)) / blocks
        following = [
            None if self._entry(row, row.step + 1) is self._served[key].entry else self._next.get(key)
            for key, row in open_.items()
        ]
        chosen, ended_ms = planned(
            [self._served[key] for key in open_], following, costs, beside_ms, self._planner
        )
        self._served |= dict(zip(open_, chosen, strict=True))
        return ended_ms

    def _computed(self, rows: Sequence[Row]) -> tuple[list[Shape], list[tuple[Mode, ...]]]:
        """The shapes of all sequences of `rows` and the modes of their blocks."""
        full = (Mode.FULL,) * self._family.blocks
        shapes: list[Shape] = []
        modes: list[tuple[Mode, ...]] = []
        for row in rows:
            served = self._served.get(row.key)
            shapes += row.shapes
            modes += [full if served is None else served.modes] * len(row.shapes)
        return shapes, modes

    def _loads(self, rows: Sequence[Row]) -> Iterator[Load]:
        """In the order of their use: this step's, what it did without and the next step can use, later ones."""
        yield from _in_order(self._served.values())
        again = [
            replace(self._served[row.key], modes=preferred(self._served[row.key].entry))
            for row in rows
            if row.key in self._served and self._entry(row, row.step + 1) is self._served[row.key].entry
        ]
        yield from _in_order(again)
        yield from _in_order(self._next.values())


def _in_order(served: Iterable[Served]) -> Iterator[Load]:
    """Loads in the order in which blocks ask for them."""
    every = list(served)
    for block in range(max((len(each.modes) for each in every), default=0)):
        for each in every:
            yield from each.load(block)
