"""Faults, and the copy of the checkout in which they are put and tests are run: never the checkout itself."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, Self

ROOT: Final = Path(__file__).parents[2]
FAULTS: Final = Path(__file__).with_name("faults.toml")


@dataclass(frozen=True)
class Mutant:
    """A faulty text for one file, by its path from the checkout's root."""

    name: str
    file: str
    text: str
    tests: tuple[str, ...]
    """Test files, by their path from the checkout's root."""


class StaleFaultError(ValueError):
    """The text that an entry of the list replaces is not in its file, or is there more than once."""


@dataclass(frozen=True)
class Fault:
    """An entry of the list: `new` in the place of `old`, which occurs exactly once in `file`."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def mutant(self, root: Path = ROOT) -> Mutant:
        """The faulty file.

        Raises:
            StaleFaultError: the file has changed since the entry was written.
        """
        path = root / self.file
        text = path.read_text() if path.exists() else ""
        count = text.count(self.old)
        if count != 1:
            raise StaleFaultError(
                f'the fault "{self.name}" of {FAULTS.name} replaces a text that occurs {count} times in {self.file}; '
                f"accepted: once. Write the entry for the code as it is now:\n{self.old}"
            )
        return Mutant(self.name, self.file, text.replace(self.old, self.new), self.tests)


def listed(path: Path = FAULTS) -> list[Fault]:
    """The hand-written faults. Their texts are whole lines."""
    entries: Sequence[dict[str, str | list[str]]] = tomllib.loads(path.read_text())["fault"]
    return [Fault(**(entry | {"tests": tuple(entry["tests"])})) for entry in entries]  # type: ignore[arg-type]  # TOML's


SERVICES: Final = sorted(
    str(path.parent.relative_to(ROOT)) for path in ROOT.glob("services/*/pyproject.toml")
)
SOURCES: Final = ("shared", "deploy/lab", "deploy/tools", *SERVICES)
"""Folders that hold packages: they precede those of the environment's editable installs."""
LIMIT_S: Final = 600.0
"""A run with a fault that takes longer hangs."""

_STAMPS: Final = itertools.count(int(time.time()))
"""Times of change, each used once: Python knows its compiled files by the second and by the size of the source."""


class TestsFailedError(RuntimeError):
    """Tests fail without a fault, or did not run: what they say of faults is worth nothing."""

    __test__ = False


class Result(NamedTuple):
    """What tests say of a mutant."""

    caught: bool
    by: str
    """The test that failed first; or what happened instead."""
    took_s: float


class Tree:
    """A copy of the tracked and the new files of the checkout, and a process that runs tests there; a context."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._sound: set[str] = set()
        """Tests that pass without a fault."""

    def __enter__(self) -> Self:
        named = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],  # noqa: S607 - git of the path
            cwd=ROOT,
            capture_output=True,
            check=True,
        )
        for name in os.fsdecode(named.stdout).split("\0"):
            if name and (ROOT / name).is_file():
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.folder / name)
        if (ROOT / ".venv").exists():
            (self.folder / ".venv").symlink_to(ROOT / ".venv")
        path = os.pathsep.join(str(self.folder / name) for name in (*SOURCES, "."))
        env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        if not Path("/dev/nvidiactl").exists():
            env["TRITON_INTERPRET"] = (
                "1"  # as in tests/conftest.py, which is read after torch is imported here
            )
        self._worker = subprocess.Popen(
            [sys.executable, "tests/mutants/worker.py"],
            cwd=self.folder,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *raised: object) -> None:
        with self._worker as worker:
            worker.terminate()

    def judge(self, mutant: Mutant) -> Result:
        """Run a mutant's tests with its fault, and the first that fails without it, too.

        Raises:
            TestsFailedError: the one that fails does so either way, or they do not run.
        """
        with self._faulty(mutant):
            status, took_s, failed = self._run(mutant.tests)
        if status is None:
            return Result(caught=True, by="hung, or ended by a signal", took_s=took_s)
        if status and failed not in self._sound:
            tests = [failed] if failed else mutant.tests  # a conftest that cannot be imported names no test
            if self._run(tests)[0] != 0:
                raise TestsFailedError(f"{' '.join(tests)} fail or do not run without a fault, too")
            self._sound.add(failed)
        return Result(caught=status != 0, by=failed, took_s=took_s)

    @contextmanager
    def _faulty(self, mutant: Mutant) -> Iterator[None]:
        path = self.folder / mutant.file
        whole = path.read_text()
        try:
            _write(path, mutant.text)
            yield
        finally:
            _write(path, whole)

    @property
    def _log(self) -> Path:
        return self.folder / "mutant.log"

    def _run(self, tests: Sequence[str]) -> tuple[int | None, float, str]:
        if self._worker.stdin is None or self._worker.stdout is None:
            raise RuntimeError("the worker has no pipes")
        asked = {"tests": tests, "limit_s": LIMIT_S, "log": str(self._log)}
        self._worker.stdin.write(json.dumps(asked) + "\n")
        self._worker.stdin.flush()
        answer = self._worker.stdout.readline()
        if not answer:
            raise TestsFailedError(f"the process that runs tests has ended: {self._worker.wait()}")
        told = json.loads(answer)
        failed = re.search(
            r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", self._log.read_text(errors="replace"), re.MULTILINE
        )
        return told["status"], told["took_s"], failed[1] if failed else ""


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    stamp = next(_STAMPS)
    os.utime(path, (stamp, stamp))
