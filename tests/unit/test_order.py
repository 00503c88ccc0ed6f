"""The order of the run: recorded groups exist and come first, and what shares a stack is one group."""

from __future__ import annotations

from pathlib import Path

import pytest

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
