"""A plugin of pytest for a stress run: repeats each test, leaves out tests that start nothing, and counts failures."""

from __future__ import annotations

import inspect
import json
import re
from collections import Counter
from pathlib import Path
from typing import Final

import pytest

STARTS: Final = re.compile(r"Popen|subprocess|Process\(|[Tt]hread|[Ss]erver\b|_stack\(|_stage\(")
"""Words of a test, or of a fixture that it asks for, that start a process, a thread or a server."""
ROUND: Final = "stress_round"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("stress")
    group.addoption("--rounds", type=int, default=1, help="How often each test runs.")
    group.addoption("--rounds-record", type=Path, help="A JSON file: test → [rounds, failures].")


@pytest.fixture
def stress_round() -> None:
    """Parametrized with the number of the round, for tests that do not ask for it."""


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.fixturenames.append(ROUND)
    rounds = range(metafunc.config.option.rounds)
    metafunc.parametrize(ROUND, rounds, ids=[f"{ROUND}{number}" for number in rounds])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests that start nothing, but for those that were named one by one."""
    if not any("::" in argument for argument in config.args):
        items[:] = filter(starts, items)


def starts(item: pytest.Item) -> bool:
    """Whether a test starts a process, a thread or a server, by the words of its source and of its fixtures'."""
    if not isinstance(item, pytest.Function):
        return True
    own = (item.function, *(f.func for found in item._fixtureinfo.name2fixturedefs.values() for f in found))
    return any(STARTS.search(inspect.getsource(function)) for function in own if inspect.isfunction(function))


class Record:
    """How often each test ran and failed; a round with an error in its set-up or its end has failed."""

    def __init__(self) -> None:
        self._rounds, self._failed = set[str](), set[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._rounds.add(report.nodeid)
        if report.failed:
            self._failed.add(report.nodeid)

    def counted(self) -> dict[str, tuple[int, int]]:
        rounds, failed = (Counter(map(_without_round, nodes)) for nodes in (self._rounds, self._failed))
        return {test: (count, failed[test]) for test, count in rounds.items()}


def _without_round(nodeid: str) -> str:
    return re.sub(rf"-?{ROUND}\d+", "", nodeid).removesuffix("[]")


def pytest_configure(config: pytest.Config) -> None:
    if path := config.option.rounds_record:
        record = Record()
        config.pluginmanager.register(record)
        config.add_cleanup(lambda: path.write_text(json.dumps(record.counted())))
