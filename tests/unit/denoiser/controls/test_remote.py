"""ControlNets of other processes and of this one, and the data paths to instances."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from pathlib import Path as FilePath
from typing import cast

import pytest
import torch
from torch import Tensor

from giornata.control.link import LinkLate, LinkLost
from giornata.control.link.client import ControlLink
from giornata.control.link.server import Listener
from giornata.control.networks import ControlNet, load
from giornata.packed.packing import make_region
from giornata.planning.operations import work_of
from giornata.scheduling.batch import RowKey
from giornata.wire.controlnets import DataPath, OpenControlReply
from giornata_denoiser.controls.controlnets import ControlDispatcher
from giornata_denoiser.controls.residuals import (
    ControlNetSession,
    ControlNetTarget,
    LocalControls,
    RemoteControls,
    control_target,
    with_control_costs,
)
from giornata_denoiser.controls.sessions import ControlDataPath, DataPathPool
from giornata_denoiser.engine.batch_tensors import ControlLost, OfSequences
from giornata_denoiser.engine.slabs import WaitTimer
from giornata_denoiser.rows.parts import Adapters, RowControl
from giornata_denoiser.rows.row import Row
from giornata_lab.bench.compute import tiny_flux
from giornata_lab.bench.compute.tiny_flux import LATENT, Spec
from tests.contract.control_link.strangers import TOKEN, listening_at
from tests.fakes import control_instance
from tests.fakes.control_instance import TOKENS, Instance
from tests.fakes.tiny_flux_control import net
from tests.patience import HUNG_S
from tests.present import present
from tests.unit.denoiser.engine.test_masked import OF

# What rows that are open at instances ask for and let go of, over data paths to instances of other
# processes.


SOON_S = 0.05
CPU = torch.device("cpu")
NETWORK = cast("ControlNetTarget", control_target(OF.network, 16))
BLOCKS = len(NETWORK.base.channels)
BEHIND = (0, *(None,) * (BLOCKS - 1))
"""One sample, behind the first block."""
NET = RowControl("edges", "a" * 64, 1.0, 0, 100)
WAITS = WaitTimer(lambda: 0.0)


def controlled_row(name: str, *controls: RowControl) -> Row:
    row = tiny_flux.row(OF, Spec(name, steps=6))
    return replace(row, adapters=Adapters(controls=controls or (NET,)))


def later(row: Row) -> Row:
    return replace(row, step=row.step + 1)


class Open:
    """Rows that are open at instances, and what their owner is told."""

    def __init__(self, late_s: float = HUNG_S) -> None:
        self.lost: list[tuple[str, type[Exception]]] = []
        self.remote = RemoteControls(NETWORK, torch.float32, CPU, self._take, late_s=late_s)

    def _take(self, key: RowKey, reason: Exception) -> None:
        self.lost.append((key.job_id, type(reason)))

    def put(self, link: ControlLink, *rows: Row) -> None:
        for row in rows:
            nets = len(row.adapters.controls)
            self.remote.sessions.put(row.key, ControlNetSession("c", link, row.key.job_id, (BEHIND,) * nets))

    def ask(self, *rows: Row) -> tuple[OfSequences, ...]:
        return self.remote.ask(rows, [True] * len(rows), WAITS)


def answer(served: Instance, *values: float) -> None:
    """Answer the next steps, each with its value."""
    for value in values:
        step = served.next_step()
        served.answer(step, 0, torch.full(step.shapes[0], value))


def value(of: OfSequences) -> float:
    sample = present(of[0].sample(0))
    return float(sample[0, 0])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    with control_instance.instance(tmp_path_factory.mktemp("link")) as found:
        yield found


@pytest.fixture
def doomed(tmp_path: Path) -> Iterator[Instance]:
    """An instance for one test, which ends it."""
    with control_instance.instance(tmp_path) as found:
        yield found


@contextmanager
def linked(served: Instance, slab_bytes: int = 1 << 20) -> Iterator[ControlLink]:
    address = served.addresses[DataPath.UNIX]
    with ControlLink(
        DataPath.UNIX, address, TOKENS[0], slab_bytes=slab_bytes, device=CPU, room_s=HUNG_S
    ) as link:
        yield link


@pytest.mark.slow
def test_all_rows_of_a_link_are_lost_with_it(doomed: Instance) -> None:
    rows = [controlled_row(name) for name in ("one", "two", "three")]
    made = Open()
    with linked(doomed) as link:
        made.put(link, *rows)
        asked = made.ask(*rows[:2])
        doomed.kill()
        with pytest.raises(ControlLost) as lost:
            value(asked[0])
    assert lost.value.keys == {row.key for row in rows}
    assert sorted(made.lost) == [("one", LinkLost), ("three", LinkLost), ("two", LinkLost)]
    assert not any(made.remote.sessions.has(row.key) for row in rows)


def test_a_step_waits_once_for_a_late_instance_whatever_rows_it_has(served: Instance) -> None:
    late, too, here, idle = (controlled_row(name) for name in ("late", "too", "here", "idle"))
    made = Open(SOON_S)
    with linked(served) as link:
        made.put(link, late, too, here, idle)
        asked = made.ask(here, late, too)
        answer(served, 1.0)
        assert [served.next_step().row for _ in range(2)] == ["late", "too"]
        value(asked[0])
        with pytest.raises(ControlLost) as lost:
            value(asked[1])
        assert lost.value.keys == {late.key, too.key}
        assert sorted(made.lost) == [("late", LinkLate), ("too", LinkLate)]
        assert made.remote.sessions.has(here.key)
        assert made.remote.sessions.has(idle.key), "nothing was asked for it"
        made.remote.retain(())


@pytest.mark.slow
def test_a_row_that_is_open_elsewhere_by_now_is_not_lost_there(served: Instance, doomed: Instance) -> None:
    row = controlled_row("moved")
    made = Open()
    with linked(served) as sound, linked(doomed) as link:
        made.put(link, row)
        (asked,) = made.ask(row)
        made.remote.sessions.drop(row.key)
        made.put(sound, row)
        doomed.kill()
        with pytest.raises(ControlLost):
            value(asked)
        assert not made.lost
        (again,) = made.ask(row)
        answer(served, 5.0)
        assert value(again) == 5.0
        made.remote.retain(())


def test_a_row_that_is_closed_between_plan_and_step_is_no_failed_row(served: Instance) -> None:
    row, plain = controlled_row("closed"), tiny_flux.row(OF, Spec("plain"))
    made = Open()
    controls = ControlDispatcher(None, made.remote)
    with linked(served) as link:
        made.put(link, row)
        assert controls.able(row) is row
        made.remote.sessions.drop(row.key)
        with pytest.raises(ControlLost) as lost:
            controls.residuals((row, plain), (True, True), WAITS)
    assert lost.value.keys == {row.key}
    assert controls.able(row) is None


@pytest.mark.slow
def test_samples_of_a_row_that_has_left_go_with_the_next_step_of_any_row(served: Instance) -> None:
    """Not before: a device may read them while rows are chosen."""
    row, plain = controlled_row("left"), tiny_flux.row(OF, Spec("plain"))
    made = Open()
    controls = ControlDispatcher(None, made.remote)
    with linked(served) as link:
        made.put(link, row)
        ((added,), _) = controls.residuals((row, plain), (True, True), WAITS)
        answer(served, 7.0)
        assert value((added,)) == 7.0
        controls.retain({plain.key})
        assert value((added,)) == 7.0
        controls.residuals((plain,), (True,), WAITS)
        with pytest.raises(ValueError, match="released"):
            value((added,))


# ControlNets in this process: what they see of a row that has more than a picture, and for how long it
# serves.


GRID = (3, 4)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> ControlNet:
    folder: Path = tmp_path_factory.mktemp("net")
    net(1, 1).save_pretrained(folder)
    return load(folder, torch.float32, CPU)


def masked(of: ControlNet) -> Row:
    cells = torch.zeros(GRID, dtype=torch.bool)
    cells[1, 1:3] = True
    hint = torch.randn(12, LATENT, generator=torch.Generator().manual_seed(3))
    return replace(
        tiny_flux.row(OF, Spec(grid=GRID, steps=6)),
        region=make_region(cells),
        adapters=Adapters(controls=(RowControl("edges", of.card.digest, 1.0, 0, 6, image=hint),)),
    )


def one_later(row: Row) -> Row:
    return replace(row, step=row.step + 1, latent=row.latent * 0.5)


def added(controls: LocalControls, row: Row, *, whole: bool) -> OfSequences:
    (of,) = controls.compute([row], [whole])
    return of


def first(of: OfSequences) -> Tensor:
    return present(of[0].sample(0))


def test_a_step_in_full_takes_nothing_that_an_instance_would_not_have_made_for_it(loaded: ControlNet) -> None:
    """One makes the region's samples alone; here they are of the picture, and serve no longer for that."""
    nets, row = {loaded.card.digest: loaded}, masked(loaded)
    controls = LocalControls(nets, NETWORK, 2)
    before = first(added(controls, row, whole=False))
    again = added(controls, one_later(row), whole=True)
    fresh = added(LocalControls(nets, NETWORK, 2), one_later(row), whole=True)
    torch.testing.assert_close(first(again), first(fresh), rtol=0, atol=0)
    held = added(LocalControls(nets, NETWORK, 2), row, whole=True)
    torch.testing.assert_close(first(held), before, rtol=0, atol=0)
    assert (first(fresh) - before).abs().max() > 1e-3, "the comparison sees the step"


def test_a_row_that_is_computed_here_until_it_is_open_elsewhere_costs_what_it_computes(
    loaded: ControlNet, tmp_path: Path
) -> None:
    """Else its steps would be predicted, and the network's costs learned, as if its ControlNets took no time."""
    opened = Open()
    controls = ControlDispatcher(LocalControls({loaded.card.digest: loaded}, NETWORK), opened.remote)
    row = with_control_costs(masked(loaded), {})
    here = present(controls.able(row))
    assert here.adapters.controls[0].work == work_of(loaded.card)
    assert sum(shape.control for shape in here.shapes) > 0
    assert controls.able(here) is here
    with listening_at(tmp_path / "s", None) as served:
        address = served.listener.addresses[DataPath.UNIX]
        with ControlLink(DataPath.UNIX, address, TOKEN, slab_bytes=1 << 16, device=CPU) as link:
            opened.put(link, here)
            there = controls.able(here)
    assert there is not None
    assert sum(shape.control for shape in there.shapes) == 0
    opened.remote.sessions.drop(row.key)
    again = present(controls.able(there))
    assert again.adapters == here.adapters
    without = ControlDispatcher(None, opened.remote)
    assert without.able(there) is None
    assert without.able(replace(there, step=5, adapters=Adapters())) is not None


# The data paths of a denoiser: whom making one holds up, who owns it, and the room that rows take of it.


SLAB_BYTES = 1 << 16


@dataclass
class Door:
    """A listener that admits denoisers once a test lets it."""

    folder: FilePath
    open: threading.Event = field(default_factory=threading.Event)
    knocked: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    left: queue.SimpleQueue[str] = field(default_factory=queue.SimpleQueue)

    @contextmanager
    def listening(self, name: str = "s") -> Iterator[OpenControlReply]:
        unix = self.folder / name
        with Listener(self._admits, lambda _: None, unix=unix, tcp=None, device=CPU, left=self.left.put):
            try:
                yield OpenControlReply(path=DataPath.UNIX, address=str(unix), token="t" * 8, behind=())
            finally:
                self.open.set()

    def _admits(self, _token: str) -> bool:
        self.knocked.release()
        return self.open.wait(HUNG_S)

    async def visited(self) -> None:
        assert await asyncio.to_thread(self.knocked.acquire, timeout=HUNG_S)

    async def empty(self) -> None:
        await asyncio.to_thread(self.left.get, timeout=HUNG_S)


@pytest.fixture
def door(tmp_path: FilePath) -> Door:
    return Door(tmp_path)


async def test_an_instance_that_does_not_admit_holds_up_no_other(door: Door, tmp_path: FilePath) -> None:
    free = Door(tmp_path / "free")
    free.folder.mkdir()
    free.open.set()
    links = DataPathPool(SLAB_BYTES, CPU)
    with door.listening() as held, free.listening() as opened:
        waiting = asyncio.create_task(links.to("held", held))
        await door.visited()
        async with asyncio.timeout(HUNG_S):
            await links.to("free", opened)
            await links.leave("free")
        assert not waiting.done()
        door.open.set()
        await asyncio.wait_for(waiting, HUNG_S)
        await links.close()


async def test_a_path_that_nobody_waits_for_any_longer_serves_the_next_row_and_is_closed(door: Door) -> None:
    links = DataPathPool(SLAB_BYTES, CPU)
    with door.listening() as opened:
        waiting = asyncio.create_task(links.to("c", opened))
        await door.visited()
        waiting.cancel()
        await asyncio.wait([waiting])
        door.open.set()
        async with asyncio.timeout(HUNG_S):
            path = await links.to("c", opened)
            assert door.knocked.acquire(blocking=False) is False, "it is the one that was being made"
            await links.close()
        assert path.link.lost
        await door.empty()


async def test_an_instance_that_was_started_again_leaves_no_lost_path_behind(door: Door) -> None:
    links = DataPathPool(SLAB_BYTES, CPU)
    door.open.set()
    with door.listening("before") as opened:
        before = await links.to("c", opened)
    assert isinstance(before.link, ControlLink)
    await asyncio.to_thread(before.link._reader.join, HUNG_S)
    with door.listening("after") as opened:
        now = await links.to("c", opened)
        assert links.made == [now]
        await links.close()


async def test_memory_that_is_not_to_be_had_is_a_loss() -> None:
    links = DataPathPool(1 << 60, CPU)
    with pytest.raises(LinkLost, match="no data path over tcp"):
        await links.to(
            "c", OpenControlReply(path=DataPath.TCP, address="127.0.0.1:1", token="t" * 8, behind=())
        )
    await links.close()


async def test_room_is_given_back_at_once_and_to_all_who_wait(door: Door) -> None:
    links = DataPathPool(SLAB_BYTES, CPU)
    door.open.set()
    with door.listening() as opened:
        path: ControlDataPath = await links.to("c", opened)
        await path.take(SLAB_BYTES)
        waiting = [asyncio.create_task(path.take(SLAB_BYTES // 2)) for _ in range(3)]
        await asyncio.sleep(0)
        assert not any(task.done() for task in waiting)
        path.give_back(SLAB_BYTES)
        await asyncio.wait(waiting[:2], timeout=HUNG_S)
        assert [task.done() for task in waiting] == [True, True, False]
        path.give_back(SLAB_BYTES // 2)
        await asyncio.wait_for(waiting[2], HUNG_S)
        await links.close()
