"""A plugin of pytest for a stress run: repeats the tests that start something, and counts failures."""

from __future__ import annotations

import json
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

import pytest

STARTS: Final = frozenset(
    {
        *("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn"),
        *("socket.bind", "socket.connect"),  # a server here, or one that a fixture of many tests has started
    }
)
"""Python's audit events of who starts a process or a server, or talks to one; it has none for threads before 3.12."""

TIMES: Final = 4
"""How much longer than elsewhere a test may wait, and last as a whole: five loops on two cores leave it a third."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("stress")
    group.addoption("--rounds", type=int, default=1, help="How often each test runs.")
    group.addoption("--rounds-record", type=Path, help="A JSON file: test → [rounds, failures].")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Multiply the time that each test may take."""
    for item in items if config.pluginmanager.hasplugin("timeout") else ():
        marker = item.get_closest_marker("timeout")
        limit_s = float(marker.args[0] if marker else config.getini("timeout"))
        item.add_marker(pytest.mark.timeout(TIMES * limit_s), append=False)


@cache
def events() -> Counter[str]:
    """How often each event of :data:`STARTS` came; counted from the first call on, for an audit hook never ends."""
    found = Counter[str]()

    def count(event: str, _arguments: tuple[Any, ...]) -> None:
        if event in STARTS:
            found[event] += 1

    sys.addaudithook(count)
    return found


@contextmanager
def threads_counted() -> Iterator[None]:
    """Count the threads that are started while inside among the events."""
    start = threading.Thread.start

    def counting(thread: threading.Thread) -> None:
        events()["thread"] += 1
        start(thread)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", counting)
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run all tests once, and those again and again that start something then, or were named one by one."""
    if session.config.option.collectonly:
        return None
    rounds = session.config.option.rounds
    named = any("::" in argument for argument in session.config.args)
    chosen = list(session.items)
    with threads_counted():
        for number in range(rounds):
            starting = chosen if number else []
            for item, following in zip_longest(chosen, chosen[1:]):
                before = events().total()
                goes_on = starting and number + 1 < rounds  # with it what many tests share
                # A copy, for one test alone would keep its own fixtures.
                again = copy(starting[0]) if goes_on else None
                item.ihook.pytest_runtest_protocol(item=item, nextitem=following or again)
                if not number and (named or events().total() > before):
                    starting.append(item)
            chosen = starting
    return True


class Record:
    """How often each test ran and failed; a round with an error in its set-up or its end has failed.

    A failure is told at once: a run lasts for hours.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._rounds = Counter[str]()
        self._failed = set[tuple[str, int]]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._rounds[report.nodeid] += report.when == "setup"
        if report.failed:
            self._failed.add((report.nodeid, self._rounds[report.nodeid]))
            self._config.get_terminal_writer().line(f"\n{report.nodeid}\n{report.longreprtext}")

    def counted(self) -> dict[str, tuple[int, int]]:
        failed = Counter(test for test, _ in self._failed)
        return {test: (count, failed[test]) for test, count in self._rounds.items()}


def pytest_configure(config: pytest.Config) -> None:
    if path := config.option.rounds_record:
        record = Record(config)
        config.pluginmanager.register(record)
        config.add_cleanup(lambda: path.write_text(json.dumps(record.counted())))
