"""What fuzzers have found stays mended: every kept input is read, or refused with an error that can be told."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

import pytest

from giornata.wire import codec
from giornata.wire.errors import UnknownField
from tests.lab.fuzz import cost
from tests.lab.fuzz.cost import (
    FLOOR_BYTES,
    TooCostlyError,
    check_calls,
    check_memory,
    check_time,
)
from tests.lab.fuzz.seeds import CORPORA, GIANTS, seeds
from tests.lab.fuzz.targets import TARGETS

KEPT_BYTES = 1 << 20


@pytest.mark.filterwarnings("ignore")  # libraries warn of what they refuse
@pytest.mark.parametrize("name", TARGETS)
def test_kept_inputs_and_giants(name: str) -> None:
    kept = {path.name: path.read_bytes() for path in sorted((CORPORA / name).iterdir())}
    assert kept
    target, giants = TARGETS[name], GIANTS[name]()
    for data in (*list(kept.values())[:1], *list(giants.values())[:1]):
        target(data)  # the first one of a kind imports what it needs
    for path, data in [*kept.items(), *giants.items()]:
        try:
            check_memory(target, data)  # apart from the calls: what counts them would take memory
            check_calls(target, data)
        except (Exception, TooCostlyError) as error:
            raise AssertionError(f"{name}, {path} breaks it, or costs too much") from error


def test_what_costs_too_much_is_found_whatever_the_reader_catches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "CALLS", 10_000)
    monkeypatch.setattr(cost, "LONGEST_S", 0.01)

    def lists(data: bytes) -> None:
        assert len([[] for _ in data]) == len(data)

    def calls(data: bytes) -> None:
        for _ in data:
            with suppress(Exception):
                abs(0)

    def in_a_thread(data: bytes) -> None:
        asyncio.run(asyncio.to_thread(calls, data))

    def slow(_: bytes) -> None:
        began_s = time.process_time()
        while time.process_time() < began_s + 2 * cost.LONGEST_S:
            pass

    many = bytes(FLOOR_BYTES // 16)
    with pytest.raises(TooCostlyError, match="bytes of memory"):
        check_memory(lists, many)
    for target in (calls, in_a_thread):
        with pytest.raises(TooCostlyError, match="calls of functions"):
            check_calls(target, many)
        check_calls(target, bytes(10))
    with pytest.raises(TooCostlyError, match="ms of processor time"):
        check_time(slow, b"")
    check_memory(lists, bytes(10))


def test_corpora_are_small_and_begin_with_good_inputs() -> None:
    assert {path.name for path in CORPORA.iterdir()} == TARGETS.keys() == seeds().keys() == GIANTS.keys()
    assert sum(path.stat().st_size for path in CORPORA.rglob("*")) < KEPT_BYTES


def test_what_is_no_unicode_can_be_told() -> None:
    name = b"n\xac".decode(errors="surrogateescape")
    body = UnknownField(f"Unknown field: {name}.", field=name, received=name, accepted=name).body()
    assert body.received == "n\\udcac"
    assert codec.encode(body)
    assert body.model_dump_json()
