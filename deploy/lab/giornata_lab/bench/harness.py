"""What every benchmark shares: turns, medians and spreads, the machine, a table, JSON in ``out/bench``."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, TypeVar

import torch

from giornata_lab.loadgen.charts import Chart
from giornata_lab.loadgen.drawing import figure, svg
from giornata_tools.cli.extras import installed
from giornata_tools.terminal import show, table

OUT = Path(os.environ.get("GIORNATA_BENCH_OUT", "out/bench"))
CPU: Final = torch.device("cpu")
Key = TypeVar("Key")


def clock_of(options: SimpleNamespace) -> Callable[[], float]:
    """Seconds: of this process's computing where the flags ask for that, else by the clock."""
    return time.process_time if options.processor_time else time.perf_counter


def in_turns(
    runs: Mapping[Key, Callable[[], object]],
    repeats: int,
    *,
    clock: Callable[[], float] = time.perf_counter,
    device: torch.device = CPU,
    warm_up: int = 1,
) -> dict[Key, list[float]]:
    """Milliseconds of every run, `repeats` times.

    Baseline and ours take turns, so that a machine that grows warm or busy meets both alike; `warm_up` turns before
    do not count.
    """
    times: dict[Key, list[float]] = {key: [] for key in runs}
    for turn in range(repeats + warm_up):
        for key, run in runs.items():
            wait_for(device)
            began = clock()
            run()
            wait_for(device)
            if turn >= warm_up:
                times[key].append((clock() - began) * 1e3)
    return times


def compared(name: str, base: Sequence[float], own: Sequence[float]) -> dict[str, Any]:
    """Two columns: the median of base ÷ own, turn by turn, by its `name`, and the spread."""
    ratios = [one / other for one, other in zip(base, own, strict=True)]
    return {name: round(statistics.median(ratios), 3), "spread": f"{min(ratios):.2f}-{max(ratios):.2f}"}


def median_ms(times: Sequence[float]) -> float:
    """For a table."""
    return round(statistics.median(times), 2)


@dataclass(frozen=True)
class Measurement:
    """Repeated measurements of one thing, in milliseconds."""

    p50_ms: float
    p95_ms: float
    p99_ms: float
    least_ms: float
    count: int

    def as_dict(self) -> dict[str, float]:
        """For JSON."""
        return {
            "p50": round(self.p50_ms, 4),
            "p95": round(self.p95_ms, 4),
            "p99": round(self.p99_ms, 4),
            "min": round(self.least_ms, 4),
            "count": self.count,
        }


def measured(times_ms: Sequence[float]) -> Measurement:
    """Median and upper percentiles of at least two measurements."""
    cuts = statistics.quantiles(times_ms, n=100, method="inclusive")
    return Measurement(statistics.median(times_ms), cuts[94], cuts[98], min(times_ms), len(times_ms))


def machine() -> dict[str, object]:
    """Return where the numbers were measured, without naming the host."""
    packages = ("torch", "diffusers", "nats-py", "redis", "uvloop", "pydantic")
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": {name: installed(name) for name in packages},
        "accelerator": accelerator(),
    }


def accelerator() -> dict[str, object] | None:
    """The GPU that this process has used, and how much of its memory; None where it has used none.

    `out_of_memory` counts allocations that failed: an engine that lacks memory computes its rows alone, and goes on.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's is not typed
        return None
    properties, stats = torch.cuda.get_device_properties(0), torch.cuda.memory_stats()
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
        "memory_mib": properties.total_memory >> 20,
        "peak_allocated_mib": torch.cuda.max_memory_allocated() >> 20,
        "peak_reserved_mib": torch.cuda.max_memory_reserved() >> 20,
        "out_of_memory": stats.get("num_ooms", 0),
        "allocation_retries": stats.get("num_alloc_retries", 0),
    }


def write(name: str, rows: Sequence[Mapping[str, Any]], *, workload: Mapping[str, object]) -> Path:
    """Print `rows` as a table and write them with workload and machine to ``out/bench/<name>.json``."""
    OUT.mkdir(parents=True, exist_ok=True)
    path = OUT / f"{name}.json"
    path.write_text(
        json.dumps({"rows": rows, "workload": workload, "machine": machine()}, indent=2) + "\n",
        encoding="utf-8",
    )
    drawn = table(*rows[0], title=name)
    for row in rows:
        drawn.add_row(*(_shown(value) for value in row.values()))
    show(drawn, f"written to {path}")
    return path


def charts(
    name: str, lines: Sequence[Mapping[str, Any]], measures: Sequence[str], title: str = "{} of a request"
) -> None:
    """A chart of each measure over rates, a curve for every system: ``out/bench/<name>_<measure>.svg``.

    Args:
        name: of the benchmark.
        lines: with `system`, `requests/s`, and each measure in seconds.
        measures: names of columns, without their unit.
        title: of the charts, around the measure.
    """
    OUT.mkdir(parents=True, exist_ok=True)
    for measure in measures:
        curves: dict[str, list[tuple[float, float]]] = {}
        for line in lines:
            curves.setdefault(line["system"], []).append((line["requests/s"], line[f"{measure} s"]))
        chart = Chart(title.format(measure), "requests a second", "seconds", curves, logarithmic=True)
        (OUT / f"{name}_{measure.lower()}.svg").write_text(svg(figure(chart)), encoding="utf-8")


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        return f"{value['p50']:.3f} (p95 {value['p95']:.3f})"
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
    return str(value)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def wait_for(device: torch.device) -> None:
    """Until `device` has done what it was told to."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
