"""Tiers: budgets, the order of use, what a listener knows of a host tier, and uses counted in windows."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata.residency.ledger import EvictionLedger
from giornata.residency.tiers import FolderTier, LoadedTier, LoadTokenBucket, TierLookup
from giornata.residency.use_based import KEPT, AdapterUsage, HostTiers
from giornata.wire.loras import HostTier, TierChange, TierSnapshot
from tests.patience import HUNG_S

NAMES = st.sampled_from("abcdef")
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), NAMES, st.integers(0, 12)),
        st.tuples(st.sampled_from(["use", "pin", "unpin", "remove"]), NAMES, st.just(0)),
    ),
    max_size=60,
)


@given(ACTIONS, st.integers(0, 20))
def test_a_ledger_keeps_to_its_budget_and_to_the_order_of_use(  # noqa: C901 - a model, action by action
    actions: list[tuple[str, str, int]], budget: int
) -> None:
    """Beside a model of it: a list in order of use."""
    ledger = EvictionLedger(budget)
    order: list[str] = []
    sizes: dict[str, int] = {}
    pins: dict[str, int] = {}
    for action, name, size in actions:
        gone: tuple[str, ...] = ()
        made_room = action == "add" or (action == "unpin" and pins.get(name, 0) > 0)
        if action == "add":
            gone = ledger.add(name, size)
            if name in order:
                order.remove(name)
            if size <= budget or pins.get(name):
                order.append(name)
                sizes[name] = size
            else:
                assert gone == (name,)
                assert name not in ledger
                continue
        elif action == "use" and name in order:
            ledger.use(name)
            order.append(order.pop(order.index(name)))
        elif action == "pin":
            ledger.pin(name)
            pins[name] = pins.get(name, 0) + 1
        elif action == "unpin" and pins.get(name):
            gone = ledger.unpin(name)
            pins[name] -= 1
        elif action == "remove":
            assert ledger.remove(name) == (name in order)
            if name in order:
                order.remove(name)
        free = [n for n in order if not pins.get(n) and not (action == "add" and n == name)]
        expected = []
        while made_room and sum(sizes[n] for n in order) > budget and free:
            expected.append(free.pop(0))
            order.remove(expected[-1])
        assert list(gone) == expected
        assert ledger.size_bytes == sum(sizes[n] for n in order)
        assert [n in ledger for n in "abcdef"] == [n in order for n in "abcdef"]


def test_a_pin_that_is_not_there_is_not_taken_back() -> None:
    with pytest.raises(ValueError, match="a is not pinned"):
        EvictionLedger(1).unpin("a")


def test_the_least_worth_goes_first_and_a_pinned_name_stays() -> None:
    worth = {"a": 3.0, "b": 1.0, "c": 2.0, "d": 0.0}
    ledger = EvictionLedger(3, worth.__getitem__)
    for name in "abc":
        ledger.add(name, 1)
    assert ledger.add("d", 1) == ("b",)
    ledger.pin("d")
    assert (ledger.room_bytes, "d" in ledger.pins, "c" in ledger.pins) == (2, True, False)
    assert ledger.add("b", 1) == ("c",)
    assert ledger.evicted == 2


def tier(budget_bytes: int = 10) -> LoadedTier[str]:
    return LoadedTier(budget_bytes, len)


def test_threads_that_want_one_value_wait_for_one_load() -> None:
    shelf, reading, gate = tier(), threading.Event(), threading.Event()
    reads: list[int] = []

    def read() -> str:
        reads.append(1)
        reading.set()
        assert gate.wait(HUNG_S)
        return "value"

    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(shelf.load, "a", read)
        assert reading.wait(HUNG_S)
        others = [pool.submit(shelf.load, "a", read) for _ in range(3)]
        gate.set()
        assert first.result() == TierLookup("value", loaded=True)
        assert {each.result() for each in others} == {TierLookup("value", loaded=False)}
    assert len(reads) == 1


def test_a_load_that_fails_is_tried_again() -> None:
    shelf = tier()

    def fails() -> str:
        raise OSError("no disk")

    with pytest.raises(OSError, match="no disk"):
        shelf.load("a", fails)
    assert shelf.load("a", lambda: "value").value == "value"


def test_what_was_removed_meanwhile_is_given_and_not_kept() -> None:
    shelf = tier()
    assert shelf.load("a", lambda: "value", lambda: False).value == "value"
    assert shelf.get("a") is None


def test_a_value_is_kept_within_the_budget_or_while_it_is_pinned() -> None:
    shelf = tier(4)
    assert shelf.load("a", lambda: "aa") == TierLookup("aa", loaded=True)
    with shelf.pinned("b"):
        assert shelf.load("b", lambda: "bbbbb").value == "bbbbb"
        assert (list(shelf), shelf.get("a"), shelf.peek("b")) == (["b"], None, "bbbbb")
    assert (list(shelf), shelf.peek("b"), shelf.size_bytes) == ([], None, 0)
    shelf.keep("c", "cc")
    shelf.keep("d", "dd")
    assert shelf.load("c", lambda: None, ahead=True).value == "cc"
    shelf.keep("e", "ee")
    assert list(shelf) == ["d", "e"], "a load ahead is no use"
    assert shelf.remove("d")
    assert shelf.peek("d") is None


SUFFIX = ".thing.safetensors"


def write(tier: FolderTier, name: str, size_bytes: int = 4) -> None:
    with tier.writing(name) as path:
        path.write_bytes(bytes(size_bytes))


def files(folder: Path) -> set[str]:
    return {path.name.removesuffix(SUFFIX) for path in folder.iterdir()}


def test_the_least_recently_used_file_goes_and_a_pinned_one_stays(tmp_path: Path) -> None:
    tier = FolderTier(tmp_path, 8, SUFFIX)
    for name in "ab":
        write(tier, name)
    assert tier.use("a")
    write(tier, "c")
    assert set(tier) == files(tmp_path) == {"a", "c"}
    with tier.pinned("a"):
        write(tier, "d")
        write(tier, "e", 9)
        assert files(tmp_path) == {"a", "d"}, "what is larger than all goes alone, and at once"
    assert (tier.evicted, tier.size_bytes, tier.size_of("d")) == (3, 8, 4)


def test_a_file_that_could_not_be_written_leaves_nothing_and_the_earlier_one(tmp_path: Path) -> None:
    tier = FolderTier(tmp_path, 8, SUFFIX)
    write(tier, "a")

    def fail() -> None:
        with tier.writing("a") as path:
            path.write_bytes(b"half")
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        fail()
    assert files(tmp_path) == {"a"}
    assert tier.path("a").read_bytes() == bytes(4)


def test_files_of_an_earlier_process_are_taken_over_in_the_order_of_their_use(tmp_path: Path) -> None:
    for age, name in enumerate("cab"):
        path = tmp_path / f"{name}{SUFFIX}"
        path.write_bytes(bytes(4))
        os.utime(path, (1000 + age, 1000 + age))
    (tmp_path / "x.thing.part").write_bytes(b"half")
    (tmp_path / "y").write_bytes(b"another's")
    tier = FolderTier(tmp_path, 8, SUFFIX)
    assert list(tier) == ["a", "b"]
    assert files(tmp_path) == {"a", "b", "y"}


def test_a_removed_file_is_gone_and_a_tier_without_a_folder_holds_nothing(tmp_path: Path) -> None:
    tier = FolderTier(tmp_path, 8, SUFFIX)
    write(tier, "a")
    assert tier.remove("a")
    assert not tier.remove("a")
    assert not list(tmp_path.iterdir())
    empty = FolderTier(None, 8, SUFFIX)
    assert not empty.use("a")
    assert "a" not in empty


@given(st.lists(st.tuples(st.floats(0, 2), st.integers(1, 100)), max_size=50))
def test_planned_loads_that_wait_keep_to_the_bandwidth(loads: list[tuple[float, int]]) -> None:
    allowance, now, spent, last = LoadTokenBucket(100.0), 0.0, 0, 0
    for pause_s, size_bytes in loads:
        now += pause_s
        now += allowance.wait_s(now)
        allowance.spend(size_bytes, now)
        spent, last = spent + size_bytes, size_bytes
    assert spent - last <= 100.0 * (now + 1.0) + 1e-6


def test_demand_never_waits_and_planned_loads_wait_for_what_it_took() -> None:
    allowance = LoadTokenBucket(100.0)
    assert allowance.wait_s(0.0) == 0.0
    allowance.spend(150, 0.0)
    assert allowance.wait_s(0.0) == 0.5
    allowance.spend(1000, 0.0)
    assert allowance.wait_s(0.0) == 1.0  # it owes no more than a second's
    assert allowance.wait_s(2.0) == 0.0


# What a listener knows of a host tier: any loss, doubling and order of its messages ends in the truth.


DIGESTS = tuple(f"{number:064x}" for number in range(6))
CHANGES = st.lists(st.tuples(st.sampled_from(DIGESTS), st.none() | st.integers(1, 9)), max_size=30)


def told(number: int, *changes: TierChange, epoch: int = 1) -> HostTier:
    return HostTier(name="h", epoch=epoch, number=number, changes=changes, budget_bytes=100, used_bytes=0)


def numbered(changes: list[tuple[str, int | None]]) -> list[TierChange]:
    return [
        TierChange(number=number, sha256=digest, size_bytes=size)
        for number, (digest, size) in enumerate(changes, start=1)
    ]


def truth(changes: list[TierChange]) -> dict[str, int]:
    held: dict[str, int] = {}
    for change in changes:
        if change.size_bytes is None:
            held.pop(change.sha256, None)
        else:
            held[change.sha256] = change.size_bytes
    return held


def snapshot(changes: list[TierChange], epoch: int = 1) -> TierSnapshot:
    return TierSnapshot.of("h", epoch, len(changes), truth(changes).items())


@given(CHANGES, st.integers(1, 4))
def test_without_a_loss_changes_alone_tell_the_truth(
    changes: list[tuple[str, int | None]], some: int
) -> None:
    tiers, every = HostTiers(), numbered(changes)
    for first in range(0, len(every), some):
        part = every[first : first + some]
        tiers.observe("i", told(part[-1].number, *part))
        assert tiers.held("h") == truth(every[: first + some])
        assert not tiers.gaps()


@given(CHANGES, st.data())
def test_any_loss_doubling_and_order_ends_in_the_truth_after_a_snapshot(
    changes: list[tuple[str, int | None]], data: st.DataObject
) -> None:
    tiers, every = HostTiers(), numbered(changes)
    messages = [told(change.number, change) for change in every]
    heard = data.draw(st.lists(st.sampled_from(messages), max_size=60)) if messages else []
    early = data.draw(st.integers(0, len(every)))
    for place, message in enumerate(heard):
        tiers.observe("i", message)
        if place == len(heard) // 2:
            tiers.snapshot("i", snapshot(every[:early]))
    tiers.observe("i", told(len(every)))
    if tiers.gaps():
        assert tiers.gaps() == {"h": "i"}
        tiers.snapshot("i", snapshot(every))
    assert tiers.held("h") == truth(every)
    assert not tiers.gaps()


def test_a_restarted_tier_begins_anew_and_its_forerunner_is_passed_over() -> None:
    tiers = HostTiers()
    (first,) = numbered([(DIGESTS[0], 1)])
    (second,) = numbered([(DIGESTS[1], 2)])
    tiers.observe("old", told(1, first, epoch=1))
    tiers.observe("new", told(1, second, epoch=2))
    tiers.observe("old", told(1, first, epoch=1))
    tiers.snapshot("old", snapshot([first], epoch=1))
    assert tiers.held("h") == {DIGESTS[1]: 2}


def test_what_is_forgotten_holds_nothing() -> None:
    tiers = HostTiers()
    tiers.observe("i", told(1, *numbered([(DIGESTS[0], 1)])))
    assert tiers.has("h", DIGESTS[0])
    tiers.forget("i")
    assert not tiers.has("h", DIGESTS[0])
    assert tiers.names() == ()
    assert not tiers.has(None, DIGESTS[0])


def test_changes_that_wait_are_bounded() -> None:
    tiers = HostTiers()
    for number in range(2, KEPT + 100):
        tiers.observe("i", told(number, TierChange(number=number, sha256=DIGESTS[0], size_bytes=1)))
    tiers.snapshot("i", TierSnapshot.of("h", 1, 1, ()))
    assert tiers.gaps() == {"h": "i"}, "the oldest of those after it are gone"


# Uses of adapters, halved with time.


JOBS = st.lists(st.tuples(st.floats(0, 50), st.sets(st.sampled_from("abcd"), max_size=3)), max_size=40)


@given(JOBS)
def test_uses_are_those_of_their_definition(jobs: list[tuple[float, set[str]]]) -> None:
    uses, now, seen = AdapterUsage(half_life_s=100.0), 0.0, list[tuple[float, set[str]]]()
    for pause_s, asked in jobs:
        now += pause_s
        uses.see(asked, now)
        seen.append((now, asked))
    for digest in "abcd":
        expected = sum(0.5 ** ((now - at) / 100.0) for at, asked in seen if digest in asked)
        assert uses.lately(digest, now) == pytest.approx(expected)
