"""Tests and measurements on a GPU: ``python -m giornata_lab.rehearsals.gpu``.

Parts run one after the other in a process that they share, so that a model of 12 B weights is made once. Every part
writes ``out/gpu/NAME.json`` when it ends, and ``out/gpu/results.md`` has them all as tables. After a part that fails or
reaches its limit the next one runs in a new process. A second call runs what is not done yet. Without a GPU, `--device
cpu --size tiny` rehearses all parts; its figures say nothing.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import StrEnum
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import click
import torch

from giornata_tools.terminal import show, table

TINY, FLUX = "tiny", "flux"
SHAPES: Final[Mapping[tuple[str, str], str]] = {
    (FLUX, "flux"): "--model real --tokens 4096 --text 512",
    (FLUX, "sdxl"): "--model real --tokens 1024 --text 77 --family sdxl",
    (FLUX, "flux2-klein"): "--model real --tokens 4096 --text 512 --family flux2-klein",
    (TINY, "flux"): "--model tiny --tokens 256 --text 16 --threads 1",
    (TINY, "sdxl"): "--model mid --tokens 256 --text 16 --family sdxl",
    (TINY, "flux2-klein"): "--model mid --tokens 256 --text 16 --family flux2-klein",
}
"""Flags of a picture of 1024², and of one to rehearse with, by size and family. A UNet's tokens are tiles."""
FLAGS: Final[Mapping[tuple[str, str], str]] = {
    (FLUX, "step_time"): "--forms kv --ratios 0.05,0.11,0.2,0.5 --repeats 10",
    (FLUX, "step_rows"): "--rows 1,4,8 --repeats 5",
    (FLUX, "throughput"): "--batch 8 --steps 7 --templates 1 --repeats 1 --mixes=",
    (FLUX, "loading"): "--repeats 3",
    (TINY, "step_time"): "--repeats 1",
    (TINY, "step_rows"): "--rows 1,2 --repeats 1",
    (TINY, "throughput"): "--batch 2 --steps 2 --templates 1 --repeats 1 --mixes=",
    (TINY, "loading"): "--repeats 1 --loads 1.0",
}
ORACLES: Final = (
    "tests/lab/gpu/test_attention.py",
    "tests/lab/gpu/test_low_rank.py",
    "tests/lab/gpu/test_published_shape.py",
)
KERNELS: Final = ("tests/unit/packed/test_elementwise.py", "tests/unit/packed/test_pages.py")
"""Of Triton's kernels, which need a device."""
TESTS: Final = (
    "tests/lab/gpu",
    "tests/unit/denoiser/engine/test_packing.py",
    "tests/unit/denoiser/attempts/test_previews.py",
    "tests/contract/control_link/test_samples.py",
    "tests/contract/control_link/test_losses.py",
)
OUTPUT_LINES: Final = 40
"""Of a part in its record, the last ones."""
LIMIT_S: Final = 240.0
GRACE_S: Final = 10.0
"""Between asking a process to end and killing it."""


class Status(StrEnum):
    """What became of a part."""

    DONE = "done"
    FAILED = "failed"
    CUT = "cut short"
    """The campaign's time was up before the part's was."""


@dataclass(frozen=True)
class CampaignPart:
    """One program of the campaign, ended after `limit_s`; tests have a process of their own."""

    name: str
    module: str
    arguments: tuple[str, ...]
    limit_s: float = LIMIT_S

    @property
    def is_test(self) -> bool:
        """Return whether it measures nothing."""
        return self.module == "pytest"


@dataclass(frozen=True)
class Record:
    """One part's run, as its JSON file holds it."""

    part: str
    status: Status
    seconds: float
    command: str
    when: str
    report: Any
    """What the benchmark wrote; None where it wrote nothing."""
    output: str
    """The end of what it printed, the traceback of a failure included."""

    @property
    def rows(self) -> Sequence[Mapping[str, Any]]:
        """Return its figures."""
        found: Sequence[Mapping[str, Any]] = self.report["rows"] if self.report else ()
        return found


def parts(size: str, device: str) -> tuple[CampaignPart, ...]:
    """All parts, those first that tell most: on an H100 nine minutes bring them up to the tests."""

    def measured(benchmark: str, family: str = "flux", more: str = "") -> CampaignPart:
        dtype = "float32" if device == "cpu" else "bfloat16"
        flags = f"{SHAPES[size, family]} --device {device} --dtype {dtype} {FLAGS[size, benchmark]} {more}"
        name = benchmark if family == "flux" else f"{benchmark}_{family}"
        return CampaignPart(name, f"giornata_lab.bench.{benchmark}", tuple(flags.split()))

    def tested(name: str, files: Sequence[str]) -> CampaignPart:
        flags = ("--config-file", "tests/lab/gpu/campaign.ini", "--rootdir", ".", "-p", "no:cacheprovider")
        return CampaignPart(name, "pytest", (*flags, *files))

    kernels = () if device == "cpu" else KERNELS
    return (
        tested("oracles", (*ORACLES, *kernels)),
        *(measured(benchmark) for benchmark in ("step_time", "step_rows", "throughput", "loading")),
        measured("step_time", "sdxl"),
        measured("throughput", "flux2-klein", "--batch 1,8 --steps 4"),  # whole edits of four steps
        *(measured(benchmark, "flux2-klein") for benchmark in ("step_rows", "step_time")),
        tested("tests", (*TESTS, *kernels)),
    )


class SharedProcess:
    """Runs parts in one process for as long as none fails."""

    def __init__(self) -> None:
        self._context = get_context("spawn")
        self._process: Any = None
        self._to_child: Connection

    def ended(self, part: CampaignPart, folder: Path, limit_s: float) -> int | None:
        """The exit status of a part whose report and log go to `folder`; None where it had to be ended."""
        if part.is_test:
            self.end()
        if self._process is None:
            self._to_child, own = self._context.Pipe()
            self._process = self._context.Process(target=_serve, args=(own,))
            self._process.start()
            own.close()
        self._to_child.send((part, folder))
        try:
            status = self._to_child.recv() if self._to_child.poll(min(limit_s, 3600.0)) else None
        except EOFError:  # it died
            status = 1
        if status != 0 or part.is_test:
            self.end()
        return status

    def end(self) -> None:
        """SIGTERM to its group, and SIGKILL to what is left."""
        process, self._process = self._process, None
        if process is None:
            return
        for how in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, how)
            process.join(GRACE_S)
        self._to_child.close()


def _serve(orders: Connection) -> None:
    """In the process of the parts: run each that is sent, and answer with what ``python -m`` would end with."""
    os.setsid()
    with suppress(EOFError):
        while True:
            part, folder = orders.recv()
            with Path(folder, "log").open("ab", buffering=0) as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            importlib.import_module("giornata_lab.bench.harness").OUT = folder  # type: ignore[attr-defined]
            status = _status(part)
            sys.stdout.flush()
            gc.collect()
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's is not typed
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            orders.send(status)


def _status(part: CampaignPart) -> int:
    sys.argv = [part.module, *part.arguments]
    try:
        runpy.run_module(part.module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return int(end.code) if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - whatever a part raises is in its log
        traceback.print_exc()
        return 1
    return 0


def run(part: CampaignPart, process: SharedProcess, limit_s: float, scratch: Path) -> Record:
    """Run a part to its end, or to the limit; whatever happens to it is in the record."""
    began = time.monotonic()
    folder = scratch / part.name
    folder.mkdir(parents=True)
    (folder / "log").touch()
    status = process.ended(part, folder, limit_s)
    output = "\n".join((folder / "log").read_text(errors="replace").splitlines()[-OUTPUT_LINES:])
    report = folder / f"{part.module.rpartition('.')[2]}.json"
    if status is None:
        became = Status.CUT if limit_s < part.limit_s else Status.FAILED
        output += f"\nended after {limit_s:.0f} s"
    else:
        became = Status.FAILED if status or not (part.is_test or report.exists()) else Status.DONE
    return Record(
        part.name,
        became,
        round(time.monotonic() - began, 1),
        " ".join(["python", "-m", part.module, *part.arguments]),
        datetime.now(UTC).isoformat(timespec="seconds"),
        json.loads(report.read_text()) if report.exists() else None,
        output,
    )


def carried_out(todo: Iterable[CampaignPart], out: Path, seconds: float) -> Iterator[Record]:
    """The record of every part as it ends, kept in `out`; no part begins after `seconds`, and none lasts beyond."""
    began, process = time.monotonic(), SharedProcess()
    with TemporaryDirectory() as scratch:
        try:
            for part in todo:
                left_s = seconds - (time.monotonic() - began)
                if left_s <= 0:
                    return
                record = run(part, process, min(part.limit_s, left_s), Path(scratch))
                out.mkdir(parents=True, exist_ok=True)
                text = json.dumps(asdict(record), indent=2) + "\n"
                (out / f"{record.part}.json").write_text(text, encoding="utf-8")
                yield record
        finally:
            process.end()


def records(out: Path) -> dict[str, Record]:
    """Return what earlier calls left, by part."""
    found = {}
    for path in sorted(out.glob("*.json")):
        values = json.loads(path.read_text(encoding="utf-8"))
        found[path.stem] = Record(**{**values, "status": Status(values["status"])})
    return found


def due(every: Sequence[CampaignPart], known: Mapping[str, Record]) -> list[CampaignPart]:
    """The parts that are not done, those last that failed."""
    became = {name: record.status for name, record in known.items()}
    left = [part for part in every if became.get(part.name) is not Status.DONE]
    return sorted(left, key=lambda part: became.get(part.name) is Status.FAILED)


def page(every: Iterable[Record]) -> str:
    """A section for each part: its figures as a table, or why there are none."""
    sections = ["## On a GPU"]
    for record in every:
        sections.append(f"### {record.part}: {record.status}")
        sections.append(f"{record.when[:10]}, {record.seconds:.0f} s, `{record.command}`")
        if record.rows:
            gpu = record.report.get("machine", {}).get("accelerator")
            sections += [str(gpu["name"])] if gpu else []
            sections.append(_markdown(record.rows))
        else:
            sections.append(f"```text\n{record.output}\n```")
    return "\n\n".join(sections) + "\n"


def _markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table; columns are those of all rows, in the order in which they come up."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    cells = [[str(row.get(column, "")) for column in columns] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in [columns, ["---"] * len(columns), *cells])


@click.command(help=__doc__, context_settings={"show_default": True})
@click.option("--device", default="cuda")
@click.option("--size", type=click.Choice([FLUX, TINY]), default=FLUX, help="FLUX.1-dev's, or tiny")
@click.option(
    "--only",
    multiple=True,
    metavar="PART",
    help="this part, also where it is done; may be given several times",
)
@click.option(
    "--minutes", type=float, default=60.0, help="begin no part after so many, and end the one that runs"
)
@click.option("--out", type=click.Path(path_type=Path), default=Path("out/gpu"))
def main(device: str, size: str, only: tuple[str, ...], minutes: float, out: Path) -> None:
    """Begin the campaign. Exit status: 0 where all parts are done, 1 where one is not, 2 where there is no device."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise click.UsageError(
            f"This machine has no CUDA device that torch {torch.__version__} can use, so nothing was measured. With an "
            "NVIDIA GPU, `make setup TORCH_INDEX=https://download.pytorch.org/whl/cu130` installs torch for it. "
            f"Without one, `python -m giornata_lab.rehearsals.gpu --device cpu --size {TINY}` rehearses the campaign."
        )
    every = parts(size, device)
    if unknown := set(only) - {part.name for part in every}:
        names = ", ".join(part.name for part in every)
        raise click.UsageError(f"There is no part {', '.join(sorted(unknown))}; there are {names}.")
    chosen = [part for part in every if part.name in only] or list(every)
    for record in carried_out(chosen if only else due(chosen, records(out)), out, 60 * minutes):
        click.echo(f"{record.output}\n{record.part}: {record.status}, {record.seconds:.0f} s")
        known = records(out)  # after every part: whatever ends this process, the page tells of all before
        text = page(known[part.name] for part in every if part.name in known)
        (out / "results.md").write_text(text, encoding="utf-8")
    known = records(out)
    summary = table("part", "status", "s", numbers=("s",), title="campaign")
    for part in chosen:
        kept = known.get(part.name)
        summary.add_row(
            part.name, str(kept.status) if kept else "to be run", f"{kept.seconds:.0f}" if kept else ""
        )
    show(summary, f"records and results.md are in {out}")
    sys.exit(
        int(any(part.name not in known or known[part.name].status is not Status.DONE for part in chosen))
    )


if __name__ == "__main__":
    main()
