"""What rows that are open at instances ask for and let go of, over data paths to instances of other processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from giornata.control.link.client import ControlLink
from giornata.control.link.losses import LinkLate, LinkLost
from giornata.scheduling.batch import RowKey
from giornata.wire.controlnets import DataPath
from giornata_denoiser.blocks.waits import WaitTimer
from giornata_denoiser.controls.executing import ControlDispatcher
from giornata_denoiser.controls.networks import controlled
from giornata_denoiser.controls.remote import (
    ControlNetSession,
    RemoteControlOptions,
    RemoteControls,
    _RemoteResiduals,
)
from giornata_denoiser.engine.controls import ControlLost, OfSequences
from giornata_denoiser.rows.adapters import Adapters, RowControl
from giornata_denoiser.rows.row import Row
from tests.fakes import control_instance, tiny_flux
from tests.fakes.control_instance import TOKENS, Instance
from tests.fakes.tiny_flux import Spec
from tests.patience import HUNG_S

SOON_S = 0.05
CPU = torch.device("cpu")
FAMILY = tiny_flux.family()
NETWORK = controlled(FAMILY.network, 16)
assert NETWORK is not None
BLOCKS = len(NETWORK.base.channels)
BEHIND = (0, *(None,) * (BLOCKS - 1))
"""One sample, behind the first block."""
NET = RowControl("edges", "a" * 64, 1.0, 0, 100)
WAITS = WaitTimer(lambda: 0.0)


def controlled_row(name: str, *controls: RowControl) -> Row:
    row = tiny_flux.row(FAMILY, Spec(name, steps=6))
    return replace(row, adapters=Adapters(controls=controls or (NET,)))


def later(row: Row) -> Row:
    return replace(row, step=row.step + 1)


class Open:
    """Rows that are open at instances, and what their owner is told."""

    def __init__(self, manner: RemoteControlOptions) -> None:
        assert NETWORK is not None
        self.lost: list[tuple[str, type[Exception]]] = []
        self.remote = RemoteControls(NETWORK, torch.float32, CPU, self._take, manner)

    def _take(self, key: RowKey, reason: Exception) -> None:
        self.lost.append((key.job_id, type(reason)))

    def put(self, link: ControlLink, *rows: Row) -> None:
        for row in rows:
            nets = len(row.adapters.controls)
            self.remote.put(row.key, ControlNetSession("c", link, row.key.job_id, (BEHIND,) * nets))

    def ask(self, *rows: Row) -> tuple[OfSequences, ...]:
        return self.remote.ask(rows, [True] * len(rows), WAITS)


def answer(served: Instance, *values: float) -> None:
    """Answer the next steps, each with its value."""
    for value in values:
        step = served.next_step()
        served.answer(step, 0, torch.full(step.shapes[0], value))


def value(of: OfSequences) -> float:
    sample = of[0].sample(0)
    assert sample is not None
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
    made = Open(RemoteControlOptions(late_s=HUNG_S))
    with linked(doomed) as link:
        made.put(link, *rows)
        asked = made.ask(*rows[:2])
        doomed.kill()
        with pytest.raises(ControlLost) as lost:
            value(asked[0])
    assert lost.value.keys == {row.key for row in rows}
    assert sorted(made.lost) == [("one", LinkLost), ("three", LinkLost), ("two", LinkLost)]
    assert not any(made.remote.has(row.key) for row in rows)


def test_a_step_waits_once_for_a_late_instance_whatever_rows_it_has(served: Instance) -> None:
    late, too, here, idle = (controlled_row(name) for name in ("late", "too", "here", "idle"))
    made = Open(RemoteControlOptions(late_s=SOON_S))
    with linked(served) as link:
        made.put(link, late, too, here, idle)
        asked = made.ask(here, late, too)
        answer(served, 1.0)
        assert [served.next_step().row for _ in range(2)] == ["late", "too"]
        _come(asked[0])
        with pytest.raises(ControlLost) as lost:
            value(asked[1])
        assert lost.value.keys == {late.key, too.key}
        assert sorted(made.lost) == [("late", LinkLate), ("too", LinkLate)]
        assert made.remote.has(here.key)
        assert made.remote.has(idle.key), "nothing was asked for it"
        made.remote.retain(())


@pytest.mark.slow
def test_a_row_that_is_open_elsewhere_by_now_is_not_lost_there(served: Instance, doomed: Instance) -> None:
    row = controlled_row("moved")
    made = Open(RemoteControlOptions(late_s=HUNG_S))
    with linked(served) as sound, linked(doomed) as link:
        made.put(link, row)
        (asked,) = made.ask(row)
        made.remote.drop(row.key)
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
    row, plain = controlled_row("closed"), tiny_flux.row(FAMILY, Spec("plain"))
    made = Open(RemoteControlOptions(late_s=HUNG_S))
    controls = ControlDispatcher(None, made.remote)
    with linked(served) as link:
        made.put(link, row)
        assert controls.able(row) is row
        made.remote.drop(row.key)
        with pytest.raises(ControlLost) as lost:
            controls.residuals((row, plain), (True, True), WAITS)
    assert lost.value.keys == {row.key}
    assert controls.able(row) is None


@pytest.mark.slow
def test_samples_of_a_row_that_has_left_go_with_the_next_step_of_any_row(served: Instance) -> None:
    """Not before: a device may read them while rows are chosen."""
    row, plain = controlled_row("left"), tiny_flux.row(FAMILY, Spec("plain"))
    made = Open(RemoteControlOptions(late_s=HUNG_S))
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


def _come(of: OfSequences) -> None:
    (awaited,) = of
    assert isinstance(awaited, _RemoteResiduals)
    awaited.coming.asked.sample(0, HUNG_S)


def _asked(
    made: Open, served: Instance, rows: tuple[Row, ...], values: tuple[float, ...]
) -> tuple[OfSequences, ...]:
    """Ask, and answer."""
    asked = made.ask(*rows)
    answer(served, *values)
    return asked
