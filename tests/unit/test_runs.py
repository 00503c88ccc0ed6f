"""Runs of the tests: the stress run, the order of groups, and compiled tests of several workers."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.assertion import rewrite

from tests.rewriting import compile_tests
from tests.stress import disturbing
from tests.stress.disturbing import disturb

TESTS = """
import threading
import pytest

ran = []

@pytest.fixture
def thread():
    threading.Thread(target=int).start()

@pytest.mark.parametrize("number", [1, 2])
def test_starts(thread, number):
    ran.append(number)
    assert ran.count(2) != 2 or number != 2

def test_starts_nothing():
    pass

def test_asks(request, tmp_path):
    assert request.getfixturevalue("tmp_path") == tmp_path
"""


def counted(pytester: pytest.Pytester, record: Path, *arguments: str) -> dict[str, list[int]]:
    pytester.makepyfile(test_it=TESTS)
    pytester._monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.inline_run(
        "-p", "tests.stress.rounds", "--rounds", "3", "--rounds-record", str(record), *arguments
    )
    return dict(json.loads(record.read_text()))


def test_tests_that_start_something_are_repeated_and_their_failures_counted(
    pytester: pytest.Pytester, tmp_path: Path
) -> None:
    assert counted(pytester, tmp_path / "record.json") == {
        "test_it.py::test_starts[1]": [3, 0],
        "test_it.py::test_starts[2]": [3, 1],
        "test_it.py::test_starts_nothing": [1, 0],
        "test_it.py::test_asks": [1, 0],
    }


@pytest.mark.parametrize("seed", [0, 1])
def test_what_is_stopped_goes_on_until_the_run_ends(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(disturbing, "RUN_S", (0.0, 0.01))
    monkeypatch.setattr(disturbing, "STOP_S", (0.0, 0.01))
    sent: list[tuple[int, int]] = []
    kill = os.kill

    def send(process: int, number: int) -> None:
        sent.append((process, number))
        kill(process, number)

    monkeypatch.setattr(os, "kill", send)
    run = subprocess.Popen([sys.executable, "-I", "-S", "-c", "input()"], stdin=subprocess.PIPE)
    assert run.stdin is not None
    looks = 0

    def processes() -> Iterator[int]:
        nonlocal looks
        looks += 1
        if looks == 5:
            run.stdin.write(b"\n")  # type: ignore[union-attr]  # it is a pipe
            run.stdin.close()  # type: ignore[union-attr]  # likewise
        yield run.pid

    stops = disturb(run, processes, random.Random(seed))  # noqa: S311 - no secret
    assert run.returncode == 0
    assert stops >= 5
    assert sent[:2] == [(run.pid, signal.SIGSTOP), (run.pid, signal.SIGCONT)]


# The order of the run: recorded groups exist and come first, and what shares a stack is one group.


ROOT = Path(__file__).parents[2]
ORDERED = """
import pytest
from tests import order

def pytest_collection_modifyitems(items):
    order.longest_first(items)

@pytest.fixture(scope="session")
def stack():
    pass

@pytest.fixture(scope="session")
def pairs():
    pass
"""
SHARING = "def test_alone(): pass\ndef test_shares(stack): pass\ndef test_shares_another(pairs): pass\n"
OWN = "import pytest\n@pytest.fixture\ndef stack(): pass\ndef test_own(stack): pass\n"


def test_the_longest_groups_come_first_and_each_shared_stack_is_one(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    times = tmp_path / "longest.txt"
    times.write_text("# seconds group\n40 pairs\n30 stack\n20 test_own.py\n")
    monkeypatch.setattr("tests.order.RECORDED", times)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makeconftest(ORDERED)
    pytester.makepyfile(test_a=SHARING, test_b=SHARING, test_own=OWN)
    run = pytester.inline_run("--collect-only")
    items = run.getcalls("pytest_collection_finish")[0].session.items
    assert [item.nodeid for item in items] == [
        "test_a.py::test_shares_another",
        "test_b.py::test_shares_another",
        "test_a.py::test_shares",
        "test_b.py::test_shares",
        "test_own.py::test_own",
        "test_a.py::test_alone",
        "test_b.py::test_alone",
    ]


SPREAD = """
import os, pathlib
from tests import order

def pytest_xdist_make_scheduler(config, log):
    return order.ByGroup(config, log)

@pytest.fixture(scope="session")
def stack():
    with pathlib.Path("started").open("a") as started:
        started.write(os.environ["PYTEST_XDIST_WORKER"] + " ")
"""


def test_a_shared_stack_is_started_by_one_worker_alone(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makeconftest(ORDERED + SPREAD)
    pytester.makepyfile(**{f"test_{name}": "def test_shares(stack): pass\n" for name in "abcd"})
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    run = pytester.runpytest_subprocess("-p", "xdist.plugin", "-n", "2", "--dist", "loadgroup")
    run.assert_outcomes(passed=4)
    assert len((pytester.path / "started").read_text().split()) == 1


# Compiled tests of a run of several workers.


def test_what_a_run_collects_is_compiled_for_its_workers_and_what_it_ignores_is_not(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    # Modules that plugins import would be other ones afterwards.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    names = ("tests/test_it", "tests/helping", "tests/test_wrong", "tests/lab/test_that")
    pytester.makepyfile(**dict.fromkeys(names, "def") | dict.fromkeys(names[:2], "assert 7 == 8"))
    config = pytester.parseconfig("tests", "none/test_it.py", "--ignore", "tests/lab")
    compile_tests(config)
    kept = {path.name.partition(".")[0]: path for path in pytester.path.rglob("*.pyc")}
    assert kept.keys() == {"test_it", "helping"}
    code = rewrite._read_pyc(pytester.path / "tests/test_it.py", kept["test_it"])
    assert code is not None, "pytest makes it again"
    assert "@pytest_ar" in code.co_names, "its asserts tell nothing"
    made = kept["test_it"].stat().st_mtime_ns
    compile_tests(config)
    assert kept["test_it"].stat().st_mtime_ns == made
