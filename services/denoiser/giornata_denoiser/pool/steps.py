"""What a rank computes: steps of rows that its leader has put into shared memory, over the family of each group."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, cast

import structlog
import torch
from torch import Tensor

from giornata.scheduling.degrees.pool import Devices
from giornata_denoiser.engine.computing import ModelRunner
from giornata_denoiser.engine.protocol import FailedRow, RowPreview, StepReport
from giornata_denoiser.families.protocol import ModelFamily
from giornata_denoiser.pool.left import StepResultWriter
from giornata_denoiser.pool.memory import MappedSlabs
from giornata_denoiser.pool.messages import (
    ForgetResources,
    MapSlab,
    OrderedRow,
    PutRow,
    PutSharedObject,
    RankStepEnded,
    RankStepFailed,
    ReleaseRows,
    RowAdvanced,
    RowBlamed,
    StepOrder,
    WarmGroup,
)
from giornata_denoiser.pool.objects import StateRing, unpacked
from giornata_denoiser.rows.correction import Correction
from giornata_denoiser.rows.row import Row

log = structlog.get_logger(__name__)


class Families(Protocol):
    """The family of each group of devices that this rank belongs to."""

    def meet(self, devices: Devices, epoch: int) -> None:
        """Make a group if it is new. Raises where another member does not come."""

    def of(self, devices: Devices, epoch: int, *, halves: bool) -> ModelFamily:
        """That of a group, by shares of tokens or by guidance halves; raises likewise."""

    def check(self, devices: Devices, epoch: int) -> None:
        """Raise where a group was aborted while it computed."""

    def abort(self, devices: Devices, epoch: int) -> None:
        """Have what a group computes fail, if it is of this epoch. Any thread."""

    def close(self, devices: Devices) -> None:
        """Let a group go: its other members' steps fail at once."""


class StaleOrder(LookupError):
    """An order is of a row that is not here, or at another step."""


class _GroupKey(NamedTuple):
    """What computes a step: what it keeps of a row is of no use to another."""

    devices: Devices
    epoch: int
    halves: bool

    @classmethod
    def of(cls, order: StepOrder) -> _GroupKey:
        return cls(order.devices, order.epoch, order.halves)


@dataclass(eq=False)
class _RankRow:
    put: Row
    """As the leader has put it."""
    row: Row
    """As its latest step here has made it."""
    slab: Tensor
    ring: StateRing
    way: _GroupKey | None = None
    """What computed the row's latest step here."""


@dataclass(eq=False)
class _Group:
    computing: ModelRunner
    resting: bool = True
    """Whether no row is there."""


class RankSteps:
    """The rows of a rank, and what it keeps of them in each group. One thread uses it, but for :meth:`abort`.

    Args:
        me: this rank's place among the pool's devices.
        families: see :class:`Families`.
        make: makes what computes steps over a family; all of them share one loader.
    """

    def __init__(self, me: int, families: Families, make: Callable[[ModelFamily], ModelRunner]) -> None:
        self._me, self._families, self._make = me, families, make
        self._mapped = MappedSlabs()
        self._kept: dict[int, object] = {}
        self._rows: dict[int, _RankRow] = {}
        self._groups: dict[_GroupKey, _Group] = {}
        self._closed: set[tuple[Devices, int]] = set()
        """Groups that have been let go of: their names are used up."""

    def take(
        self,
        message: MapSlab | PutSharedObject | PutRow | ReleaseRows | ForgetResources | WarmGroup,
        files: Iterable[int],
    ) -> None:
        """Take in what is no step."""
        match message:
            case MapSlab(number, size_bytes):
                for descriptor in files:
                    self._mapped.map(number, size_bytes, descriptor)
            case PutSharedObject(number, data):
                self._kept[number] = unpacked(data, self._mapped, self._kept)
            case PutRow(number, data, slab, ring):
                row = cast("Row", unpacked(data, self._mapped, self._kept))
                self._rows[number] = _RankRow(row, row, self._mapped.memory(slab), ring)
            case ReleaseRows(rows):
                for number in self._rows.keys() & set(rows):
                    self._rows[number].way = None
                self._retain()
            case ForgetResources(rows, kept, slabs):
                self._forget(rows, kept)
                self._mapped.forget(slabs)
            case WarmGroup(devices, epoch):
                try:
                    self._families.meet(devices, epoch)
                except (
                    ConnectionError
                ) as error:  # a member was lost meanwhile: the leader names another epoch
                    log.warning("group_not_warm", devices=devices, error=str(error))

    def compute(self, order: StepOrder) -> tuple[RankStepEnded | RankStepFailed, int | None]:
        """The step that is ordered, and a descriptor of what it has left, the caller's to close.

        Raises:
            torch.AcceleratorError: the device is lost, and so is this process.
        """
        began = time.perf_counter()
        try:
            rows = self._ordered(order)
            report = self._step(order, rows)
            self._families.check(order.devices, order.epoch)
        except StaleOrder as stale:
            return RankStepFailed(order=order.number, reason="stale", text=str(stale)), None
        except torch.AcceleratorError:
            raise
        except Exception as error:  # noqa: BLE001 - a step's edge: the leader is told, and blames nobody yet
            return self._failed(order, error), None
        return self._told(order, report, began)

    def abort(self, devices: Devices, epoch: int) -> None:
        """Have a step of a group fail that has lost a member. Any thread."""
        self._families.abort(devices, epoch)

    def _failed(self, order: StepOrder, error: Exception) -> RankStepFailed:
        """Let the group go, so that its other members fail at once."""
        log.warning("step_failed", devices=order.devices, error=repr(error), exc_info=error)
        self._families.close(order.devices)
        self._drop(order.devices)
        self._closed.add((order.devices, order.epoch))
        if isinstance(error, torch.OutOfMemoryError):
            return RankStepFailed(order=order.number, reason="memory", text=repr(error))
        lost = isinstance(error, ConnectionError)
        return RankStepFailed(order=order.number, reason="group" if lost else "raised", text=repr(error))

    def _step(self, order: StepOrder, rows: tuple[Row, ...]) -> StepReport:
        """In a group a step is tried once: whether to try again, and where, is the leader's to say."""
        computing = self._groups[_GroupKey.of(order)].computing
        return computing.compute(rows) if len(order.devices) == 1 else computing.attempt(rows)

    def _ordered(self, order: StepOrder) -> tuple[Row, ...]:
        """The rows as they enter the step, known to the group's computing and to no other's."""
        way = _GroupKey.of(order)
        if len(order.devices) > 1 and (order.devices, order.epoch) in self._closed:
            raise StaleOrder(f"the group of {order.devices} was closed")
        rows = tuple(self._entering(ordered, way) for ordered in order.rows)
        self._meet(way)
        fresh = {ordered.number for ordered in order.rows if ordered.fresh}
        for number in fresh:
            self._rows[number].way = None
        self._retain()
        for ordered, row in zip(order.rows, rows, strict=True):
            held = self._rows[ordered.number]
            held.row, held.way = row, way
        return rows

    def _entering(self, ordered: OrderedRow, way: _GroupKey) -> Row:
        held = self._rows.get(ordered.number)
        if held is None:
            raise StaleOrder(f"row {ordered.number} is not here")
        if not ordered.fresh:
            if held.way != way or held.row.step != ordered.step:
                raise StaleOrder(
                    f"row {ordered.number} is at step {held.row.step}; ordered was {ordered.step}"
                )
            return held.row
        known = ordered.corrections
        corrections = None if known is None else tuple(cast("Correction", self._kept[each]) for each in known)
        put = _plain(held.put) if ordered.plain else held.put
        if not ordered.leaves:
            put = replace(put, records=None)
        return replace(held.ring.read(held.slab, put, ordered.step), corrections=corrections)

    def _meet(self, way: _GroupKey) -> None:
        """Have what computes in this way at hand."""
        if way in self._groups:
            return
        if any(known.devices == way.devices and known.epoch != way.epoch for known in self._groups):
            self._drop(way.devices)
        self._groups[way] = _Group(self._make(self._families.of(way.devices, way.epoch, halves=way.halves)))

    def _drop(self, devices: Devices) -> None:
        self._groups = {way: group for way, group in self._groups.items() if way.devices != devices}

    def _retain(self) -> None:
        """Let each group's computing forget rows that have left it."""
        for way, group in self._groups.items():
            here = [held.row for held in self._rows.values() if held.way == way]
            group.computing.retain([row.key for row in here], here, resting=not here)
            if not here and not group.resting:  # the loader may load for another group by now
                group.computing.rest(())
            group.resting = not here

    def _forget(self, rows: Collection[int], kept: Collection[int]) -> None:
        for number in rows:
            self._rows.pop(number, None)
        if rows:
            self._retain()
        for number in kept:
            self._kept.pop(number, None)

    def _told(self, order: StepOrder, report: StepReport, began: float) -> tuple[RankStepEnded, int | None]:
        """Take in what a step has come to, and describe it if this is the group's first rank."""
        numbers = {self._rows[ordered.number].row.key: ordered.number for ordered in order.rows}
        first, leaving = order.devices[0] == self._me, StepResultWriter()
        advanced = [
            self._advanced(numbers[row.key], row, report.previews, leaving if first else None)
            for row in report.advanced
        ]
        if not first:
            return RankStepEnded(
                order=order.number, began_s=began, ended_s=time.perf_counter(), left_bytes=0
            ), None
        left = leaving.written()
        return RankStepEnded(
            order=order.number,
            began_s=began,
            ended_s=time.perf_counter(),
            advanced=tuple(each for each in advanced if each is not None),
            blamed=tuple(_blamed(numbers[failure.row.key], failure) for failure in report.failed),
            sample=report.sample,
            left_bytes=leaving.size_bytes,
        ), left

    def _advanced(
        self, number: int, row: Row, previews: Collection[RowPreview], leaving: StepResultWriter | None
    ) -> RowAdvanced | None:
        held = self._rows[number]
        way = held.way
        if way is not None and row.entries:
            self._groups[way].computing.hosting.finish(row.entries)
        plain = row.template is not held.row.template or row.renewed_every != held.row.renewed_every
        held.row, alone = replace(row, entries=()), way is not None and len(way.devices) == 1
        if leaving is None:
            return None
        held.ring.write(held.slab, row)
        shown = [preview for preview in previews if preview.key == row.key]
        return RowAdvanced(
            number=number,
            step=row.step,
            plain=plain,
            entry=leaving.entry(row.entries[-1]) if row.entries else None,
            corrections=tuple(map(leaving.correction, row.corrections or ()))
            if row.taught and alone
            else None,
            preview=leaving.preview(shown[0].index, shown[0].pixels) if shown else None,
        )


def _plain(row: Row) -> Row:
    return replace(row, template=None, renewed_every=0, records=None)


def _blamed(number: int, failure: FailedRow) -> RowBlamed:
    cause = failure.error.__cause__
    return RowBlamed(number=number, error=failure.error.body(), cause="" if cause is None else repr(cause))
