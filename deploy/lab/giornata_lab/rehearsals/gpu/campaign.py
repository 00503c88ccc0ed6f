"""Carrying out the campaign: one part after the other in a process that they share, with a record each."""

from __future__ import annotations

import json
import os
import select
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
from typing import Any, Final, Self

from giornata_lab.rehearsals.gpu import needs
from giornata_lab.rehearsals.gpu.parts import Part

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
        """Return what is there, by part."""
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
    with SharedProcess() as process:
        for part in parts:
            left_s = float("inf") if seconds is None else seconds - (clock() - began)
            if left_s <= 0:
                return
            record = run(part, process, folder.path, min(part.limit_s, left_s))
            folder.keep(record)
            yield record


def run(part: Part, process: SharedProcess, out: Path, limit_s: float) -> Record:
    """Run a part to its end, or to the limit; whatever happens to it is in the record.

    Its report and its output are in the record; other files that it leaves are moved to `out`, under its name.
    """
    command = ["python", "-m", part.module, *part.arguments]
    began = time.monotonic()
    if lacking := needs.missing(part.name):
        return _record(part, Status.MISSING, began, limit_s, command, None, f"missing: {', '.join(lacking)}")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        log = folder / "log"
        ended = process.ended(part, folder, log, limit_s)
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
        " ".join(command),
        datetime.now(UTC).isoformat(timespec="seconds"),
        report,
        output,
    )


class SharedProcess:
    """Runs parts in one process, as long as none fails: what a failure left on the device is nobody's to judge."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def ended(self, part: Part, folder: Path, log: Path, limit_s: float) -> int | None:
        """The exit status of a part; None if it had to be ended, with all that it has started."""
        log.touch()
        if part.alone:
            self.end()
        process = self._process or self._started()
        order = {
            "module": part.module,
            "arguments": part.arguments,
            "log": str(log),
            "out": str(folder),
        }
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(order) + "\n")
        process.stdin.flush()
        # No limit is longer than an hour, and `select` takes no infinity.
        ready, _, _ = select.select([process.stdout], [], [], min(limit_s, 3600.0))
        answer = process.stdout.readline() if ready else ""
        status = int(answer) if answer else None
        if ready and status is None:  # it died
            process.wait()
            status = process.returncode or 1
        if status != 0 or part.alone or part.last:
            self.end()
        return status

    def _started(self) -> subprocess.Popen[str]:
        paths = [*needs.FOLDERS, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            "OMP_WAIT_POLICY": "PASSIVE",  # threads that wait keep no core busy
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONUNBUFFERED": "1",
            "COLUMNS": "160",
            "TQDM_DISABLE": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "giornata_lab.rehearsals.gpu.shared_process"],
            cwd=needs.ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        return self._process

    def end(self) -> None:
        """SIGTERM to its group, and SIGKILL to what is left."""
        process, self._process = self._process, None
        if process is None:
            return
        for how in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, how)
                process.wait(GRACE_S)
            except ProcessLookupError:
                break
            except subprocess.TimeoutExpired:
                continue
        with process:  # closes its pipes
            pass


def _report(path: Path) -> object:
    """Return what a part wrote, as far as it did."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
