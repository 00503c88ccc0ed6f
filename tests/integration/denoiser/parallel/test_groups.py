"""Groups: made by their members, several at once, and lost and replaced."""

from __future__ import annotations

import signal
from datetime import timedelta

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch exports no type

from giornata_denoiser.parallel import GroupLost, RankGroup
from tests.integration.denoiser.parallel.members import (
    CPU,
    Lost,
    Member,
    Members,
    alone,
    assert_close,
    step_of,
)
from tests.integration.denoiser.parallel.test_forward import unequal

ALL = (0, 1, 2, 3)


@pytest.fixture(autouse=True)
def _groups(members: Members) -> None:
    """Each test has groups of its own."""
    members.epoch += 1


def traded(member: Member, devices: tuple[int, ...], epoch: int = 0) -> list[float]:
    """One uneven all-to-all: each member sends as many of its own number as the receiver's rank tells, and one more."""
    group = member.group(devices, epoch)
    sent = [rank + 1 for rank in range(group.size)]
    flat = torch.full((sum(sent),), float(member.me))
    values: list[float] = group.trade(flat, sent, [group.rank + 1] * group.size).tolist()
    return values


def warmed(member: Member, groups: list[tuple[int, ...]], epoch: int) -> bool:
    member.groups.warm(groups, epoch)
    return all(member.groups.of(each, epoch).size == len(each) for each in groups if member.me in each)


def left(member: Member, devices: tuple[int, ...]) -> None:
    member.groups.drop(devices)


@pytest.mark.parametrize("devices", [(2,), (0, 1), (3, 1), ALL, (0, 2, 3)])
def test_members_trade_uneven_parts(members: Members, devices: tuple[int, ...]) -> None:
    answers = members.run(devices, traded, devices, members.epoch)
    for rank, values in enumerate(answers):
        assert values == [float(device) for device in devices for _ in range(rank + 1)]


def test_groups_are_warmed_in_one_order(members: Members) -> None:
    groups = [(0, 1), (2, 3), ALL, (1, 2), (0,)]
    assert all(members.run(ALL, warmed, groups, members.epoch))


def test_two_groups_compute_at_once(members: Members) -> None:
    wanted = alone(unequal, 2)
    pairs = ((0, 3), (2, 1))
    for step in range(2):
        for devices in pairs:
            members.begin(devices, step_of, unequal, devices, wanted[step], step, members.epoch)
        for devices in pairs:
            for answer in members.end(devices):
                assert_close(answer, wanted[step + 1])


def test_a_group_that_one_member_leaves_is_lost_at_once(members: Members) -> None:
    members.run(ALL, traded, ALL, members.epoch)
    members.begin(ALL[1:], traded, ALL, members.epoch)
    members.run((0,), left, ALL)
    assert members.end(ALL[1:]) == [Lost(ALL)] * 3
    members.epoch += 1
    members.run(ALL, traded, ALL, members.epoch)


def aborted(member: Member, devices: tuple[int, ...], epoch: int) -> None:
    member.groups.abort(devices, epoch)


def test_an_aborted_group_trades_no_more_and_another_epochs_does(members: Members) -> None:
    pair = (0, 1)
    members.run(pair, traded, pair, members.epoch)
    members.run(pair, aborted, pair, members.epoch - 1)  # long gone
    members.run(pair, traded, pair, members.epoch)
    members.run(pair, aborted, pair, members.epoch)
    members.begin(pair, traded, pair, members.epoch)
    assert members.end(pair) == [Lost(pair), Lost(pair)]
    members.epoch += 1
    members.run(pair, traded, pair, members.epoch)


def test_a_killed_member_is_replaced(members: Members) -> None:
    """The others notice in the middle of a step, go on without it, and later with a new process."""
    wanted = alone(unequal, 3)
    members.run(ALL, step_of, unequal, ALL, wanted[0], 0, members.epoch)
    members.signal(2, signal.SIGSTOP)  # the others surely wait for it
    members.begin((0, 1, 3), step_of, unequal, ALL, wanted[0], 0, members.epoch)
    members.signal(2, signal.SIGKILL)
    assert members.end((0, 1, 3)) == [Lost(ALL)] * 3
    members.epoch += 1
    for answer in members.run((1, 3), step_of, unequal, (1, 3), wanted[1], 1, members.epoch):
        assert_close(answer, wanted[2])
    members.start(2)
    members.epoch += 1
    for answer in members.run(ALL, step_of, unequal, ALL, wanted[2], 2, members.epoch):
        assert_close(answer, wanted[3])


def test_a_member_that_does_not_come_is_told() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(GroupLost, match=r"\[0, 1\] is lost"):
        RankGroup(store, "g", (0, 1), 0, CPU, timedelta(milliseconds=10))


@pytest.mark.parametrize("devices", [(0, 1), (2, 2), ()])
def test_a_group_has_different_devices_and_its_own_among_them(devices: tuple[int, ...]) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(ValueError, match="accepted are different devices, 2 among them"):
        RankGroup(store, "g", devices, 2, CPU, timedelta(seconds=1))
