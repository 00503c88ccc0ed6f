"""A rank: the process that computes on one device of a pool; it ends with its leader, however that ends.

``python -m giornata_denoiser.pool.rank DESCRIPTOR``: the leader is at the other end of an inherited socket.
"""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Final, NamedTuple, cast

import structlog
import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch exports no type

from giornata.control.link.client import ControlLink
from giornata.frames import FramedConnection, PeerEnded, framed
from giornata.logs import configure_logs
from giornata.packed.low_rank import SequenceLoras
from giornata.planning.cost_model import CostModel
from giornata.runtime import keep_freed
from giornata.scheduling.batch import RowKey
from giornata.scheduling.degrees.pool import Devices
from giornata.wire.errors import GiornataError
from giornata_denoiser.checkpoint import open_checkpoint
from giornata_denoiser.controls.controlnets import dispatcher_of
from giornata_denoiser.controls.residuals import (
    ControlLinkAddress,
    ControlNetSession,
    OpenControls,
    control_target,
)
from giornata_denoiser.engine.loading import Loader
from giornata_denoiser.engine.model_runner import FailedRow, FiniteCheck, ModelRunner, RowPreview, StepReport
from giornata_denoiser.families.network import ModelFamily
from giornata_denoiser.parallel import RankGroups, halve_guidance, shared
from giornata_denoiser.pool.messages import (
    AbortGroup,
    Answer,
    ForgetResources,
    MapSlab,
    Order,
    OrderedRow,
    Ping,
    Pong,
    PutRow,
    PutSharedObject,
    RankReady,
    RankRefused,
    RankSetup,
    RankStepEnded,
    RankStepFailed,
    ReleaseRows,
    RowAdvanced,
    RowBlamed,
    StepOrder,
    Stop,
    WarmGroup,
    connect,
    pack,
    unpack,
)
from giornata_denoiser.pool.shared_memory import ExpansionHead, StateRing, TensorPlaces, mapped_tensor, viewed
from giornata_denoiser.profiling.fitting import profile_of
from giornata_denoiser.rows.parts import RowLora, lora_set_name
from giornata_denoiser.rows.row import Row
from giornata_denoiser.rows.template import Correction
from giornata_denoiser.startup import memory_on, rehearse, reusing_of

log = structlog.get_logger(__name__)


class GroupFamilies:
    """The family over each group of devices that this rank belongs to; GroupLost where a member does not come."""

    def __init__(self, family: ModelFamily, groups: RankGroups) -> None:
        self._family, self._groups = family, groups

    def meet(self, devices: Devices, epoch: int) -> None:
        """Make a group if it is new."""
        self._groups.of(devices, epoch)

    def of(self, devices: Devices, epoch: int, *, halves: bool) -> ModelFamily:
        """That of a group, by shares of tokens or by guidance halves."""
        if len(devices) == 1:
            return self._family
        return (halve_guidance if halves else shared)(self._family, self._groups.of(devices, epoch))

    def check(self, devices: Devices, epoch: int) -> None:
        """Raise where a group was aborted while it computed."""
        if len(devices) > 1:
            self._groups.of(devices, epoch).check()

    def abort(self, devices: Devices, epoch: int) -> None:
        """Have what a group computes fail, if it is of this epoch. Any thread."""
        self._groups.abort(devices, epoch)

    def close(self, devices: Devices) -> None:
        """Let a group go: its other members' steps fail at once."""
        self._groups.drop(devices)


class StaleOrder(LookupError):
    """An order is of a row that is not here, or at another step."""


class _GroupKey(NamedTuple):
    """The devices that compute a step: what one such group keeps of a row is of no use to another."""

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


class RankLoras:
    """The sets of LoRAs that the leader has put, on the rank's device; satisfies `LowRanks`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._sets: dict[int, SequenceLoras] = {}

    def put(self, number: int, thing: object) -> None:
        """Copy to the device what has come, if it is a set."""
        if isinstance(thing, SequenceLoras):
            self._sets[number] = thing.to(self.device)

    def forget(self, number: int) -> None:
        """Let a set go, if this is the number of one."""
        self._sets.pop(number, None)

    def find(self, loras: tuple[RowLora, ...]) -> SequenceLoras | None:
        """See :meth:`giornata_denoiser.engine.batch_tensors.LowRanks.find`."""
        name = lora_set_name(loras)
        return next((each for each in self._sets.values() if each.name == name), None)


class RankControls(OpenControls[ControlLink]):
    """The rows of a rank that instances compute ControlNets for: it asks them over links of its own to `device`."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._links: dict[ControlLinkAddress, ControlLink] = {}
        self._lost: dict[RowKey, str] = {}

    def follow(self, key: RowKey, session: ControlNetSession[ControlLinkAddress] | None) -> None:
        """The row is open there, as the leader says; None for nowhere."""
        if session is None:
            self.drop(key)
            return
        link, known = self._links.get(session.link), self.session(key)
        try:
            if link is None or link.lost:
                self._close_lost()
                link = self._links[session.link] = session.link.open(self._device)
        except (OSError, RuntimeError) as error:  # torch tells of memory that is not to be had by the latter
            self.drop(key)
            self.lose(key, error)
            return
        if known is None or known.link is not link:
            self.put(key, ControlNetSession(session.instance, link, session.row, session.behind))

    def taken(self) -> dict[RowKey, str]:
        """Return the rows that have been lost since the last call, and why."""
        lost, self._lost = self._lost, {}
        return lost

    def _close_lost(self) -> None:
        """Let go of the memory of instances that are gone: one that was started again has another address."""
        for address in [address for address, link in self._links.items() if link.lost]:
            self._links.pop(address).close()

    def close(self) -> None:
        """Close all links."""
        for link in self._links.values():
            link.close()

    def lose(self, key: RowKey, reason: Exception) -> None:
        """The row cannot be asked for any more where it was open."""
        self._lost[key] = str(reason)


class RankSteps:
    """The rows of a rank, and what it keeps of them in each group. One thread uses it, but for :meth:`abort`.

    Args:
        me: this rank's place among the pool's devices.
        families: see :class:`GroupFamilies`.
        make: makes what computes steps over a family; all of them share one loader, the `loras` and the `controls`.
    """

    def __init__(
        self,
        me: int,
        families: GroupFamilies,
        make: Callable[[ModelFamily], ModelRunner],
        loras: RankLoras,
        controls: RankControls,
    ) -> None:
        self._me, self._families, self._make, self._loras = me, families, make, loras
        self._controls = controls
        self._slabs: dict[int, Tensor] = {}
        """The memory of each of the leader's slabs, (bytes,) uint8, by number."""
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
                    try:
                        self._slabs[number] = mapped_tensor(descriptor, size_bytes)
                    finally:
                        os.close(descriptor)
            case PutSharedObject(number, data, own):
                self._kept[number] = thing = self._unpacked(data, own)
                self._loras.put(number, thing)
            case PutRow(number, data, own, slab, ring):
                row: Row = self._unpacked(data, own)
                self._rows[number] = _RankRow(row, row, self._slabs[slab], ring)
            case ReleaseRows(rows):
                for number in self._rows.keys() & set(rows):
                    self._rows[number].way = None
                self._retain()
            case ForgetResources(rows, kept, slabs):
                self._forget(rows, kept, slabs)
            case WarmGroup(devices, epoch):
                try:
                    self._families.meet(devices, epoch)
                except (
                    ConnectionError
                ) as error:  # a member was lost meanwhile: the leader names another epoch
                    log.warning("group_not_warm", devices=devices, error=str(error))

    def compute(self, order: StepOrder) -> RankStepEnded | RankStepFailed:
        """The step that is ordered.

        Raises:
            torch.AcceleratorError: the device is lost, and so is this process.
        """
        began = time.perf_counter()
        try:
            rows = self._ordered(order)
            report = self._step(order, rows)
            self._families.check(order.devices, order.epoch)
        except StaleOrder as stale:
            return RankStepFailed(order=order.number, reason="stale", text=str(stale))
        except torch.AcceleratorError:
            raise
        except Exception as error:  # noqa: BLE001 - a step's edge: the leader is told, and blames nobody yet
            return self._failed(order, error)
        if lost := self._losses():
            return RankStepFailed(order.number, "control", lost[0][1], lost)
        return self._told(order, report, began)

    def abort(self, devices: Devices, epoch: int) -> None:
        """Have a step of a group fail that has lost a member. Any thread."""
        self._families.abort(devices, epoch)

    def _unpacked(self, data: bytes, own: int) -> Any:
        return unpack(data, lambda place: viewed(self._slabs[place.slab or own], place), self._kept)

    def _failed(self, order: StepOrder, error: Exception) -> RankStepFailed:
        """Let the group go, so that its other members fail at once."""
        log.warning("step_failed", devices=order.devices, error=repr(error), exc_info=error)
        self._families.close(order.devices)
        self._drop(order.devices)
        self._closed.add((order.devices, order.epoch))
        if lost := self._losses():
            return RankStepFailed(order.number, "control", repr(error), lost)
        if isinstance(error, torch.OutOfMemoryError):
            return RankStepFailed(order=order.number, reason="memory", text=repr(error))
        ended = isinstance(error, ConnectionError)
        return RankStepFailed(order=order.number, reason="group" if ended else "raised", text=repr(error))

    def _losses(self) -> tuple[tuple[int, str], ...]:
        """The rows that cannot be asked for where they were open, by number, and why."""
        lost = self._controls.taken()
        numbers = {held.row.key: number for number, held in self._rows.items()} if lost else {}
        return tuple((numbers[key], why) for key, why in lost.items() if key in numbers)

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
            self._controls.follow(row.key, ordered.session)
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
            joins = held.row.adapters.loras_from != ordered.loras_from
            return _joined(held.row.corrected(None), ordered) if joins else held.row
        known = ordered.corrections
        corrections = None if known is None else tuple(cast("Correction", self._kept[each]) for each in known)
        put = held.put.plain() if ordered.plain else held.put
        if not ordered.leaves:
            put = replace(put, records=None)
        row = held.ring.read(held.slab, put, ordered.step, ordered.remembers)
        # What is in the slab lasts for three steps.
        rule = row.step_cache
        if rule is not None and rule.known is not None:
            row = replace(row, step_cache=replace(rule, known=rule.known.copied(self._loras.device)))
        return _joined(row.corrected(corrections), ordered)

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

    def _forget(self, rows: Collection[int], kept: Collection[int], slabs: Collection[int]) -> None:
        for number in rows:
            held = self._rows.pop(number, None)
            if held is not None:
                self._controls.drop(held.row.key)
        if rows:
            self._retain()
        for number in kept:
            self._kept.pop(number, None)
            self._loras.forget(number)
        for number in slabs:  # each goes with the last tensor that views it
            self._slabs.pop(number, None)

    def _told(self, order: StepOrder, report: StepReport, began: float) -> RankStepEnded:
        """Take in what a step has come to, and describe it if this is the group's first rank."""
        numbers = {self._rows[ordered.number].row.key: ordered.number for ordered in order.rows}
        first = order.devices[0] == self._me
        advanced = tuple(
            self._advanced(numbers[row.key], row, report.previews, first=first) for row in report.advanced
        )
        if not first:
            return RankStepEnded(order.number, began, time.perf_counter())
        return RankStepEnded(
            order.number,
            began,
            time.perf_counter(),
            advanced,
            tuple(_blamed(numbers[failure.row.key], failure) for failure in report.failed),
            report.sample,
            report.cached,
        )

    def _advanced(
        self, number: int, row: Row, previews: Collection[RowPreview], *, first: bool
    ) -> RowAdvanced:
        held = self._rows[number]
        way = held.way
        if way is not None and row.entries:
            self._groups[way].computing.hosting.finish(row.entries)
        was, now = held.row.reuse, row.reuse
        changed = now.template is not was.template or now.renewed_every != was.renewed_every
        records = row.records and replace(row.records, entries=())
        held.row, alone = replace(row, records=records), way is not None and len(way.devices) == 1
        if first:
            held.ring.write(held.slab, row)
        shown = [preview for preview in previews if preview.key == row.key]
        return RowAdvanced(
            number,
            row.step,
            plain=changed,
            entry=row.entries[-1] if row.entries else None,
            corrections=now.corrections if now.taught and alone else None,
            remembers=ExpansionHead.of(row),
            preview=(shown[0].index, torch.from_numpy(shown[0].pixels)) if shown else None,
        )


def _joined(row: Row, ordered: OrderedRow) -> Row:
    return replace(row, adapters=replace(row.adapters, loras_from=ordered.loras_from))


def _blamed(number: int, failure: FailedRow) -> RowBlamed:
    cause = failure.error.__cause__
    return RowBlamed(number, failure.error.body(), "" if cause is None else repr(cause))


# Orders are computed one after the other in the main thread. A second thread reads them as they come,
# answers pings, and aborts groups that have lost a member.


Loaded = tuple[RankSteps, RankReady]
"""What computes, and what the leader is told first."""


class Rank:
    """Computes what comes over a channel.

    Args:
        channel: to the leader.
        on_end: told, in the reading thread, that the leader is gone; what is being computed then is for nobody.
    """

    def __init__(self, channel: FramedConnection, on_end: Callable[[], object]) -> None:
        self._channel, self._on_end = channel, on_end
        self._orders: queue.SimpleQueue[tuple[Order, tuple[int, ...]]] = queue.SimpleQueue()
        self._steps: RankSteps | None = None
        self._reading = threading.Thread(target=self._read, name="orders", daemon=True)

    def run(self, loading: AbstractContextManager[Loaded]) -> None:
        """Load, then compute until the leader says stop. Pings are answered from now on.

        Raises:
            PeerEnded: the leader is gone.
            torch.AcceleratorError: the device is lost.
        """
        self._reading.start()
        with loading as (steps, ready):
            self._steps = steps
            self._tell(ready)
            while not isinstance((order := self._orders.get())[0], Stop):
                self._obey(steps, *order)

    def close(self) -> None:
        """Let the leader go, and wait for the thread that reads."""
        self._channel.interrupt()
        self._reading.join()
        self._channel.close()

    def _obey(self, steps: RankSteps, order: Order, files: tuple[int, ...]) -> None:
        if isinstance(order, StepOrder):
            self._tell(steps.compute(order))
        elif not isinstance(order, AbortGroup | Ping | Stop):
            steps.take(order, files)

    def _tell(self, answer: Answer) -> None:
        tell(self._channel, answer)

    def _read(self) -> None:
        try:
            while True:
                order: Order = unpack(self._channel.receive())
                files = (self._channel.take_file(),) if isinstance(order, MapSlab) else ()
                if isinstance(order, Ping):
                    self._tell(Pong())
                elif isinstance(order, AbortGroup):
                    if self._steps is not None:
                        self._steps.abort(order.devices, order.epoch)
                else:
                    self._orders.put((order, files))
                if isinstance(order, Stop):
                    return
        except OSError:
            self._on_end()


def tell(channel: FramedConnection, answer: Answer) -> None:
    """Send an answer, its tensors in a file; PeerEnded where the leader is gone."""
    places = TensorPlaces()
    data = pack(answer, places)
    left = places.written()
    try:
        channel.send(framed(data), () if left is None else (left,))
    except OSError as error:
        raise PeerEnded(f"the leader does not listen: {error}") from error
    finally:
        if left is not None:
            os.close(left)


GROUP_BYTES: Final = 700 << 20
"""GPU memory of a group: 544 to 688 MB a communicator of NCCL have been seen on an A100 (nccl#964)."""
STORE_S: Final = 60.0
"""How long a rank waits for the store that its leader hosts already."""


@contextmanager
def loaded(opening: RankSetup) -> Iterator[Loaded]:
    """Load the model and compute a picture; what steps load ends with the context.

    Raises:
        Failed: the model cannot be loaded, or cannot compute.
    """
    config = opening.config
    checkpoint = open_checkpoint(config)
    rehearse(checkpoint)
    profile = profile_of(config, checkpoint)
    model = CostModel.of(profile)
    device = checkpoint.family.device
    memory = memory_on(config, checkpoint, opening.groups * GROUP_BYTES)
    loras, controls = RankLoras(device), RankControls(device)
    network = control_target(checkpoint.family.network, checkpoint.card.pixel_multiple)
    with Loader() as loader:
        reusing = reusing_of(opening.correction_bits, device, memory, loader, model)

        def make(family: ModelFamily) -> ModelRunner:
            # A step's latents go to the host at its end: its verdict is there as early.
            return ModelRunner(
                family,
                time.perf_counter,
                checkpoint.preview_map,
                reusing=reusing,
                judge=FiniteCheck,
                low_ranks=loras,
                controls=None
                if network is None
                else dispatcher_of(config, checkpoint, network, controls, controls.lose),
            )

        store = TCPStore(*opening.store, is_master=False, timeout=timedelta(seconds=STORE_S))
        groups = RankGroups(store, opening.me, device, opening.group_s)
        try:
            yield (
                RankSteps(opening.me, GroupFamilies(checkpoint.family, groups), make, loras, controls),
                RankReady(profile, tuple(checkpoint.control_cards.values())),
            )
        finally:
            controls.close()
            groups.close()


# The program that a leader starts.


PARENT_DEATH_SIGNAL: Final = 1
"""`PR_SET_PDEATHSIG` of Linux's `prctl`."""


def ends_with_parent() -> None:
    """Have the kernel end this process with the one that started it; elsewhere than on Linux the socket alone does."""
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def main(descriptor: int) -> int:
    """Be a rank whose leader is at the other end of the socket `descriptor`. Returns the exit status."""
    ends_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal tells the leader, too, which drains
    channel = connect(socket.socket(fileno=descriptor))
    opening: RankSetup = unpack(channel.receive())
    config = opening.config
    configure_logs(config.log_level, config.log_format, f"{config.instance}/{opening.me}")
    try:
        if config.torch_device().type == "cpu":
            keep_freed()
        if opening.threads is not None:
            torch.set_num_threads(opening.threads)
        Rank(channel, on_end=lambda: os._exit(1)).run(loaded(opening))
    except PeerEnded:
        return 1
    except GiornataError as error:
        tell(channel, RankRefused(error.body()))
        log.warning("rank_refused", device=config.device, error=str(error))
        return 1
    except Exception:  # the process's edge: logged, and told by its end
        log.exception("rank_failed", device=config.device)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
