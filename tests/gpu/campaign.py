"""Carrying out the campaign: one part after the other, each in a process of its own, with a record each."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from tests.gpu import needs
from tests.gpu.parts import Part

LOG_LINES: Final = 40
"""Lines of a part's output in its record, the last ones."""
GRACE_S: Final = 10.0
"""Between asking a part to end and killing it."""
Clock = Callable[[], float]


class Status(StrEnum):
    """What became of a part."""

    DONE = "done"
    FAILED = "failed"
    MISSING = "packages missing"
    CUT = "cut short"
    """The campaign's time was up before the part's was."""


@dataclass(frozen=True)
class Record:
    """One part's run, as its JSON file holds it."""

    part: str
    shows: str
    status: Status
    seconds: float
    limit_s: float
    command: str
    when: str
    report: Any = None
    """What the part wrote; None where it wrote nothing."""
    output: str = ""
    """The end of what it printed, the traceback of a failure included."""


class Folder:
    """Where records are kept, a file a part, and what else a part leaves."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def records(self) -> dict[str, Record]:
        """What is there, by part."""
        found = {}
        for path in sorted(self.path.glob("*.json")):
            values = json.loads(path.read_text(encoding="utf-8"))
            found[path.stem] = Record(**{**values, "status": Status(values["status"])})
        return found

    def keep(self, record: Record) -> None:
        """At once, so that an end of this process loses nothing."""
        self.path.mkdir(parents=True, exist_ok=True)
        text = json.dumps(asdict(record), indent=2) + "\n"
        (self.path / f"{record.part}.json").write_text(text, encoding="utf-8")


def due(parts: Sequence[Part], records: dict[str, Record], *, again: bool) -> list[Part]:
    """The parts that are to run, those first that never failed."""
    if again:
        return list(parts)
    left = [part for part in parts if part.name not in records or records[part.name].status != Status.DONE]
    return sorted(left, key=lambda part: part.name in records and records[part.name].status != Status.CUT)


def carried_out(
    parts: Iterable[Part], folder: Folder, seconds: float | None, clock: Clock = time.monotonic
) -> Iterable[Record]:
    """The record of every part as it ends; no part begins after so many `seconds`, and none lasts beyond."""
    began = clock()
    for part in parts:
        left_s = float("inf") if seconds is None else seconds - (clock() - began)
        if left_s <= 0:
            return
        record = run(part, folder.path, min(part.limit_s, left_s))
        folder.keep(record)
        yield record


def run(part: Part, out: Path, limit_s: float) -> Record:
    """Run a part to its end, or to the limit; whatever happens to it is in the record.

    Its report and its output are in the record; other files that it leaves are moved to `out`, under its name.
    """
    command = [sys.executable, "-m", part.module, *part.arguments]
    began = time.monotonic()
    if lacking := needs.missing(part.name):
        return _record(part, Status.MISSING, began, limit_s, command, None, f"missing: {', '.join(lacking)}")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        log = folder / "log"
        ended = _ended(command, folder, log, limit_s)
        report = _report(folder / f"{part.report}.json")
        for extra in folder.glob("*.gz"):
            out.mkdir(parents=True, exist_ok=True)
            shutil.move(extra, out / f"{part.name}.json.gz")
        output = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:])
    if ended is None:
        status = Status.CUT if limit_s < part.limit_s else Status.FAILED
        output += f"\nended after {limit_s:.0f} s"
    else:
        status = Status.FAILED if ended or report is None else Status.DONE
    return _record(part, status, began, limit_s, command, report, output)


def _record(
    part: Part,
    status: Status,
    began_s: float,
    limit_s: float,
    command: Sequence[str],
    report: object,
    output: str,
) -> Record:
    return Record(
        part.name,
        part.shows,
        status,
        round(time.monotonic() - began_s, 1),
        limit_s,
        " ".join(["python", *command[1:]]),
        datetime.now(UTC).isoformat(timespec="seconds"),
        report,
        output,
    )


def _ended(command: Sequence[str], folder: Path, log: Path, limit_s: float) -> int | None:
    """The exit status; None if it had to be ended, with all that it has started."""
    paths = [*needs.FOLDERS, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        "OMP_WAIT_POLICY": "PASSIVE",  # threads that wait keep no core busy
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "GIORNATA_BENCH_OUT": str(folder),
        "COLUMNS": "160",
        "TQDM_DISABLE": "1",
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=needs.ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(process)


def _end(process: subprocess.Popen[Any]) -> None:
    """SIGTERM to its group, and SIGKILL to what is left."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, how)
            process.wait(GRACE_S)
        except ProcessLookupError:
            break
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def _report(path: Path) -> object:
    """What a part wrote, as far as it did."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
