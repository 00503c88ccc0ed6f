"""What concerns the whole run."""

from __future__ import annotations

import gc
import os
import shlex
import sys
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import structlog
from xdist.remote import Producer
from xdist.scheduler import LoadGroupScheduling

import tests.examples  # noqa: F401 - the profiles of properties
from tests import forked_programs
from tests.ending import end_with_run
from tests.order import ByGroup, longest_first
from tests.patience import HUNG_S, VARIABLE
from tests.rewriting import compile_tests
from tests.shared_files import SharedFolders, shared_root
from tests.skips import told

os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
"""Threads of torch in workers and processes that tests start; OpenMP reads these when torch is imported.

More processes compute than there are processors. Threads that wait for each other by spinning then take most of the
time: files that repaint took 422 s of two processors with them, and 113 s like this.
"""

os.environ["GIORNATA_STATE"] = "/nowhere/giornata"
"""No test finds the stack that somebody runs in the checkout. One that runs `giornata up` names a folder of its own."""

if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"
    """Triton's kernels run on the CPU; Triton reads it when it is imported."""

gc.disable()
"""While tests are collected hardly anything becomes garbage; see :func:`pytest_runtestloop`."""

structlog.get_config()["processors"][-1].exception_formatter = structlog.dev.plain_traceback
"""A traceback in the log of a test is plain: one in colours, with the values of its variables, takes half a second."""

pytest_plugins = ["pytester"]


@pytest.fixture(autouse=True)
def _logs_of_one_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a program that ran within a test wanted logged concerns no other test, nor the loggers that it used."""
    configure = structlog.configure

    def uncached(**settings: Any) -> None:
        configure(**settings | {"cache_logger_on_first_use": False})

    monkeypatch.setattr(structlog, "configure", uncached)
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


@pytest.fixture(scope="session")
def shared_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedFolders]:
    """Folders that all workers of the run read, and no test changes."""
    folders = SharedFolders(shared_root(tmp_path_factory.getbasetemp()))
    yield folders
    folders.check()


LONG_TIMEOUT_S = 1_200
"""Limit of a test marked `long`: on slow, shared processors training takes ten times what it takes alone."""


def pytest_configure(config: pytest.Config) -> None:
    config.add_cleanup(end_with_run())
    if len(config.getoption("tx", None) or ()) > 1 and not config.option.collectonly:
        os.environ[forked_programs.ADDRESS] = forked_programs.server().address
        command = shlex.join([sys.executable, "-I", "-S", str(Path(__file__).with_name("forked_worker.py"))])
        config.option.tx = [f"popen//python={command}" for _ in config.option.tx]
        compile_tests(config)  # the server imports meanwhile


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    longest_first(items)
    for item in items:
        if item.get_closest_marker("long") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LONG_TIMEOUT_S))


def pytest_xdist_auto_num_workers() -> int:
    """Two more than there are processors: the longest groups wait for a live stack or a browser most of the time."""
    return len(os.sched_getaffinity(0)) + 2


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadGroupScheduling | None:
    return ByGroup(config, log) if config.getoption("dist") == "loadgroup" else None


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Collections look from now on at what tests make alone: of all modules and tests each would take a second."""
    gc.freeze()
    gc.enable()


def pytest_report_header() -> str:
    return f"patience: what has not come after {HUNG_S} s hangs ({VARIABLE})"


def pytest_unconfigure(config: pytest.Config) -> None:
    """Say in the last lines what was skipped, and how to run it."""
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is None:  # a worker
        return
    for line in told(str(report.longrepr) for report in terminal.stats.get("skipped", [])):
        terminal.write_line(line, yellow=True)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """End the servers that programs, ranks and image processes are forked from; they would outlive this process."""
    forked_programs.end()
    forkserver._forkserver._stop()  # type: ignore[attr-defined]  # made for tests, and the only way to wait for its end
