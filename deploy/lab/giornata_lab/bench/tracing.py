"""What tracing costs: off, where it should be nothing, and on, where every edit is traced (aim 1 %).

Two whole systems run side by side on this machine, one with tracing and one without. Edits go to each in turn, one at a
time, so that both see the same machine; the order changes with every pair. Latency is what a client sees; processor
time is that of all services, which tracing also spends beside the edit. Off is measured by itself, too: what one call
takes, times the calls of an edit, against the edit's time.

Writes ``out/bench/tracing.json``, and one edit's trace as ``out/bench/trace.svg``.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import aiohttp
import psutil

from giornata import tracing
from giornata.tracing import NO_STEPS
from giornata.wire.workers import ServiceName
from giornata_lab.bench.reporting.report import OUT, write
from giornata_lab.bench.systems.collector import CollectedSpan, Collector, collecting
from giornata_lab.bench.systems.edit_forms import box, edit_form, file, scene
from giornata_lab.bench.systems.traces import timeline
from giornata_lab.flags import option, parsed
from giornata_lab.loadgen.drawing import svg
from giornata_lab.loadgen.drawing import timeline as drawn
from giornata_tools.checkout import TRAINED
from giornata_tools.launcher.models import StackModel
from giornata_tools.launcher.plan import ONE_EACH, StackPlan, socket_folder
from giornata_tools.launcher.stack import Stack, running

OFF: Final = "off"
ON: Final = "on"
WARM_UP: Final = 6
"""Pairs that are not counted."""
CALLS: Final = 200_000
AIM: Final = 0.01


def options_of(arguments: Sequence[str] | None = None) -> SimpleNamespace:
    """Flags."""
    return parsed(
        __doc__,
        [
            option("--edits", type=int, default=40, help="counted, of each system"),
            option("--steps", type=int, default=20, help="of an edit"),
            option("--side", type=int, default=256, help="of the pictures, in pixels"),
        ],
        arguments,
    )


class TracedSystem:
    """A running system, and what its edits took."""

    def __init__(self, stack: Stack, http: aiohttp.ClientSession) -> None:
        self._stack, self._http = stack, http
        self.ms: list[float] = []
        self.cpu_ms: list[float] = []

    async def edit(self, options: SimpleNamespace, index: int, *, counted: bool) -> None:
        """One edit; SystemExit where it fails."""
        image = file(scene(options.side, options.side, seed=index % 4))
        form = edit_form(
            image,
            file(box(options.side, options.side)),
            num_inference_steps=options.steps,
            padding_mask_crop=88,
        )
        cpu_s, began = self._cpu_s(), time.perf_counter()
        async with self._http.post("/v1/images/edits", data=form) as answer:
            body = await answer.read()
        took_ms = (time.perf_counter() - began) * 1e3
        if answer.status != 200:
            raise SystemExit(f"the benchmark's edit failed: {body[:500]!r}")
        if counted:
            self.ms.append(took_ms)
            self.cpu_ms.append((self._cpu_s() - cpu_s) * 1e3)

    def _cpu_s(self) -> float:
        names = (name for service in ServiceName for name in self._stack.instances(service))
        times = (psutil.Process(self._stack.process(name).pid).cpu_times() for name in names)
        return sum(one.user + one.system for one in times)


@asynccontextmanager
async def system(traces_url: str | None) -> AsyncIterator[TracedSystem]:
    """The whole system with the model that ships, ready."""
    env = {} if traces_url is None else {"GIORNATA_TRACES_URL": traces_url}
    with tempfile.TemporaryDirectory(prefix="gio-", dir=socket_folder()) as name:
        folder = Path(name)
        plan = StackPlan(
            state=folder,
            logs=folder / "logs",
            models=(StackModel(str(TRAINED)),),
            replicas={**ONE_EACH, ServiceName.LORA_STORE: 0},
            env=env,
        )
        async with running(plan, lambda _: None) as stack:
            await stack.bring_up()
            async with aiohttp.ClientSession(stack.url) as http:
                yield TracedSystem(stack, http)


def call_ns() -> float:
    """Nanoseconds of one span where tracing is off, attributes included."""
    began = time.perf_counter()
    for index in range(CALLS):
        with tracing.span("a", job="j", attempt=index):
            pass
    return (time.perf_counter() - began) / CALLS * 1e9


def check_ns() -> float:
    """Nanoseconds that a step takes to see that its attempt is not traced."""
    attempt = SimpleNamespace(traced=NO_STEPS)
    began = time.perf_counter()
    found = sum(attempt.traced is not NO_STEPS for _ in range(CALLS))
    return (time.perf_counter() - began) / CALLS * 1e9 + found


def of_one_edit(collector: Collector) -> list[CollectedSpan]:
    """The last whole trace, in order of its spans' begin."""
    jobs = [one for one in collector.spans if one.name == "job"]
    last = max(jobs[:-1], key=lambda one: one.began_ns)
    return collector.until(last.trace, lambda seen: any(one.name == "POST /v1/images/edits" for one in seen))


def rows_of(off: TracedSystem, on: TracedSystem, traced: Sequence[CollectedSpan]) -> list[dict[str, Any]]:
    """A line for each measurement, with its baseline, the ratio and the quartiles of the pairs' ratios."""
    rows = []
    for what, baseline, ours in (("latency", off.ms, on.ms), ("processor time", off.cpu_ms, on.cpu_ms)):
        pairs = sorted(after / before for before, after in zip(baseline, ours, strict=True))
        low, _, high = statistics.quantiles(pairs, n=4, method="inclusive")
        ratio = sum(ours) / sum(baseline)
        rows.append(
            {
                "what": f"on, {what} of an edit",
                "off ms": round(statistics.median(baseline), 2),
                "on ms": round(statistics.median(ours), 2),
                "ratio of sums": round(ratio, 4),
                "pairs": f"{low:.3f} to {high:.3f}",
                "spans": len(traced),
                "note": "above the aim" if ratio > 1 + AIM else "",
            }
        )
    steps = sum(one.name == "step" for one in traced)
    off_ms = ((len(traced) - steps) * call_ns() + steps * check_ns()) / 1e6
    whole_ms = statistics.median(off.ms)
    rows.append(
        {
            "what": "off, calls of an edit",
            "off ms": round(whole_ms, 2),
            "on ms": round(whole_ms + off_ms, 2),
            "ratio of sums": round(1 + off_ms / whole_ms, 6),
            "pairs": f"{call_ns():.0f} ns a span, {check_ns():.0f} ns a step",
            "spans": 0,
            "note": "",
        }
    )
    return rows


async def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    options = options_of(arguments)
    with collecting() as collector:
        async with AsyncExitStack() as stack:
            off = await stack.enter_async_context(system(None))
            on = await stack.enter_async_context(system(collector.url))
            for index in range(WARM_UP + options.edits):
                for one in (off, on) if index % 2 else (on, off):
                    await one.edit(options, index, counted=index >= WARM_UP)
        traced = of_one_edit(collector)
    OUT.mkdir(parents=True, exist_ok=True)
    picture = timeline(traced, f"One edit of {options.steps} steps, as its trace tells it")
    (OUT / "trace.svg").write_text(svg(drawn(picture)), encoding="utf-8")
    write("tracing", rows_of(off, on, traced), workload=vars(options))


if __name__ == "__main__":
    asyncio.run(main())
