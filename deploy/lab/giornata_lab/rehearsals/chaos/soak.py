"""Under constant load memory, files and streams stay flat: ``python -m giornata_lab.rehearsals.chaos.soak``.

Edits arrive at a constant rate through both doors while nothing is disturbed. Results live for two minutes, so that
what is kept reaches its level early. Writes ``out/soak.json`` and charts; ends with status 1 where anything has grown,
or an edit has not ended in its picture.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, Final

from rich.console import Console
from rich.table import Table

import giornata.client
from giornata.families import Family
from giornata.wire import subjects
from giornata.wire.jobs import JobState
from giornata_lab.bench.harness import machine
from giornata_lab.flags import option, parsed
from giornata_lab.loadgen.charts import Chart
from giornata_lab.loadgen.drawing import figure, svg
from giornata_lab.rehearsals.chaos import look
from giornata_lab.rehearsals.chaos.doors import RestClient
from giornata_lab.rehearsals.chaos.edits import VARIANTS, ChaosEdit, Outcome, edits, variants
from giornata_lab.rehearsals.chaos.load import Load
from giornata_lab.rehearsals.chaos.run import ENV, REPLICAS
from giornata_tools.checkout import MODELS
from giornata_tools.launcher.models import choose
from giornata_tools.launcher.plan import StackPlan, socket_folder
from giornata_tools.launcher.stack import Stack, running

SHARE: Final = 0.15
"""Growth between the second quarter of a run and its last one that is noise."""
LEAST: Final = {"MiB": 24.0, "files": 16.0, "threads": 8.0, "": 40.0}
"""Likewise, by unit, the last token of a measure's name."""


@dataclass(frozen=True)
class Sample:
    """What everything holds at one moment."""

    at_s: float
    """Since the load began."""
    values: Mapping[str, float]
    """By measure, such as ``router-1 memory, MiB``."""


@dataclass(frozen=True)
class Trend:
    """How one measure has changed."""

    measure: str
    early: float
    """Median of the second quarter of the run; the first one fills caches."""
    late: float
    """Median of the last quarter."""
    most: float

    @property
    def flat(self) -> bool:
        """Return whether it has not grown by more than noise."""
        unit = self.measure.rpartition(", ")[2] if ", " in self.measure else ""
        return self.late - self.early <= max(SHARE * self.early, LEAST[unit])


def trends(samples: Sequence[Sample]) -> list[Trend]:
    """The trend of every measure that was there from the second quarter to the end, by name.

    Raises:
        ValueError: there are fewer samples than two a quarter.
    """
    if len(samples) < 8:
        raise ValueError(f"a trend takes at least 8 samples, received {len(samples)}")
    quarter = len(samples) // 4
    early, late = samples[quarter : 2 * quarter], samples[-quarter:]
    return [
        Trend(
            name,
            early=median(sample.values[name] for sample in early if name in sample.values),
            late=median(sample.values[name] for sample in late if name in sample.values),
            most=max(sample.values.get(name, 0.0) for sample in samples),
        )
        for name in sorted({name for sample in early for name in sample.values} & set(late[-1].values))
    ]


OUT: Final = Path("out") / "soak.json"
LOGS: Final = OUT.parent / "soak-logs"
RESULT_TTL_S: Final = 120


def options_of(arguments: Sequence[str] | None = None) -> SimpleNamespace:
    """Flags."""
    return parsed(
        __doc__,
        [
            option("--seconds", type=float, default=3600.0, help="of load"),
            option("--rate", type=float, default=0.5, help="edits a second"),
            option("--every", type=float, default=20.0, help="seconds between two looks"),
            option("--seed", type=int, default=0),
        ],
        arguments,
    )


async def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write; the exit status."""
    options = options_of(arguments)
    model = await choose({}, Family.FLUX_FILL, MODELS, print)
    with tempfile.TemporaryDirectory(prefix="gio-soak-", dir=socket_folder()) as folder:
        plan = StackPlan(
            state=Path(folder),
            logs=LOGS,
            models=(replace(model, name="tiny"),),
            ready_s=240.0,
            replicas=REPLICAS,
            env={**ENV, "GIORNATA_RESULT_TTL_S": str(RESULT_TTL_S)},
        )
        async with running(plan) as stack:
            await stack.bring_up()
            print(f"{options.rate:g} edits a second for {options.seconds:g} s.", flush=True)
            outcomes, samples = await _soaked(stack, options)
    found = trends(samples)
    wrong = _wrong(outcomes)
    _write(options, outcomes, samples, found, wrong)
    _show(outcomes, found, wrong)
    return 1 if wrong or not all(trend.flat for trend in found) else 0


async def _soaked(stack: Stack, options: SimpleNamespace) -> tuple[list[Outcome], list[Sample]]:
    """The outcomes of all edits, and a sample for every look."""
    samples: list[Sample] = []
    async with (
        look.watching(stack.nats_url, stack.nats_password_file, lambda _: None) as records,
        RestClient.opened(lambda: stack.urls) as rest,
        giornata.client.connect(stack.nats_url) as nats,
    ):
        load = Load(variants(), rest, nats, records)
        due = edits(options.seed, int(options.rate * options.seconds))
        began_s = time.monotonic()

        async def looks() -> None:
            for turn in itertools.count(1):
                samples.append(await _sample(stack, records, time.monotonic() - began_s))
                await asyncio.sleep(began_s + turn * options.every - time.monotonic())

        async with asyncio.TaskGroup() as tasks:
            looking = tasks.create_task(looks())
            outcomes = await _carried(load, due, options.rate)
            looking.cancel()
    return outcomes, samples


async def _carried(load: Load, due: Sequence[ChaosEdit], rate: float) -> list[Outcome]:
    """Every edit at its time, however many are in progress."""
    began_s = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        running_edits = []
        for number, edit in enumerate(due):
            await asyncio.sleep(began_s + number / rate - time.monotonic())
            every = replace(edit, key=f"soak-{edit.key}", variant=number % VARIANTS)
            running_edits.append(tasks.create_task(load.carry(every)))
    return [task.result() for task in running_edits]


async def _sample(stack: Stack, records: look.Records, at_s: float) -> Sample:
    values: dict[str, float] = {}
    for one in look.usage({name: stack.process(name).pid for name in stack.names}):
        values[f"{one.name} memory, MiB"] = one.rss_mib
        values[f"{one.name} open, files"] = one.descriptors
        values[f"{one.name} running, threads"] = one.threads
    for name in (subjects.JOBS, *subjects.STREAMS):
        state = (await records.jetstream.stream_info(name)).state
        values[f"stream {name} size, MiB"] = state.bytes / 2**20
        values[f"stream {name} consumers"] = state.consumer_count
        values[f"stream {name} messages"] = state.messages
    kept = await look.blobs(stack.blobs_url)
    for folder in ("nats", "valkey"):
        files = [path for path in (stack.plan.state / folder).rglob("*") if path.is_file()]
        values[f"{folder} on disk, MiB"] = sum(map(_size, files)) / 2**20
    values["blobs"] = len(kept)
    values["blobs' size, MiB"] = sum(blob.size_bytes for blob in kept) / 2**20
    return Sample(at_s, values)


def _size(path: Path) -> int:
    """Bytes of a file; 0 where its server has just removed it."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _wrong(outcomes: Sequence[Outcome]) -> list[str]:
    """Edits that did not end in their pictures, as sentences."""
    found = []
    for outcome in outcomes:
        record = outcome.record
        if record is None or record.state is not JobState.COMPLETED or outcome.flaws or outcome.unexpected:
            told = (record.state, record.code) if record else outcome.gave_up
            found.append(f"Edit {outcome.edit.number}: {told}; {outcome.flaws} {outcome.unexpected}")
    return found


def _write(
    options: SimpleNamespace,
    outcomes: Sequence[Outcome],
    samples: Sequence[Sample],
    found: Sequence[Trend],
    wrong: Sequence[str],
) -> None:
    OUT.parent.mkdir(parents=True, exist_ok=True)
    content: dict[str, Any] = {
        "workload": vars(options),
        "machine": machine(),
        "edits": len(outcomes),
        "wrong": list(wrong),
        "asked again": dict(sum((outcome.again for outcome in outcomes), Counter[str]())),
        "trends": [{**vars(trend), "flat": trend.flat} for trend in found],
        "samples": [{"at_s": round(one.at_s, 1), **one.values} for one in samples],
    }
    OUT.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    curves: defaultdict[str, dict[str, list[tuple[float, float]]]] = defaultdict(dict)
    for trend in found:
        unit = trend.measure.rpartition(", ")[2] if ", " in trend.measure else "number"
        points = [
            (one.at_s / 60, one.values[trend.measure]) for one in samples if trend.measure in one.values
        ]
        curves[unit][trend.measure.partition(", ")[0]] = points
    for unit, lines in curves.items():
        drawn = svg(figure(Chart(f"Under constant load: {unit}", "minutes", unit, lines)))
        (OUT.parent / f"soak_{unit.lower()}.svg").write_text(drawn, encoding="utf-8")


def _show(outcomes: Sequence[Outcome], found: Sequence[Trend], wrong: Sequence[str]) -> None:
    table = Table(title=f"soak, {len(outcomes)} edits")
    for column in ("measure", "early", "late", "most", "flat"):
        table.add_column(column, justify="left" if column == "measure" else "right")
    for trend in found:
        numbers = (f"{value:.1f}" for value in (trend.early, trend.late, trend.most))
        table.add_row(trend.measure, *numbers, "yes" if trend.flat else "NO")
    console = Console(width=120)
    console.print(table, f"written to {OUT}")
    for sentence in wrong[:20]:
        console.print(f"  - {sentence}", markup=False, highlight=False)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
