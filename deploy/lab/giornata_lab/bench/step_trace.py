"""One masked step as torch's profiler sees it: kernels and copies by stream, and a Chrome trace to look at.

``python -m giornata_lab.bench.step_trace`` lets the engine denoise rows of one picture, which learn their corrections
in a first step in full, and profiles a later one while the loader brings what follows: its thread and its copy stream
run beside the computing. The trace goes to ``out/bench/step_trace.json.gz``; Perfetto opens it as it is. On a CPU
there are operations of the engine's thread, and no kernels. `busy` is the share of the step in which a stream
computes or copies.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from torch.profiler import ProfilerActivity, profile, record_function

from giornata_denoiser.engine.engine import Engine
from giornata_lab.bench import harness
from giornata_lab.bench.compute.batches import MASK
from giornata_lab.bench.compute.engines import engine_with
from giornata_lab.bench.compute.models import described
from giornata_lab.bench.compute.rows import Rows
from giornata_lab.bench.compute.workload import WorkloadEdit
from giornata_lab.bench.harness import wait_for
from giornata_lab.bench.options import rows_of, shared
from giornata_lab.flags import option, parsed

STEP: Final = "the step"
"""Marks it in the trace."""
KINDS: Final = {"kernel": "kernel", "gpu_memcpy": "copy", "gpu_memset": "fill", "cpu_op": "operation"}
"""Categories of events that are counted."""
SHOWN: Final = 3


def main(arguments: Sequence[str] | None = None) -> None:
    """Profile, print, write ``out/bench/step_trace.json`` and the trace beside it."""
    options = parsed(
        __doc__,
        [
            *shared(tokens=256, text=32, repeats=1),
            option("--batch", type=int, default=8, help="rows of the step"),
            option(
                "--step", type=int, default=2, help="which is profiled; the first one, 0, is computed in full"
            ),
        ],
        arguments,
    )
    rows = rows_of(options)
    harness.OUT.mkdir(parents=True, exist_ok=True)
    path = harness.OUT / "step_trace.json.gz"
    _profiled(rows, options, path)
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    lines = summary(events)
    workload = {
        **vars(options),
        "model": described(rows.family),
        "mask": MASK,
        "setting": rows.setting.as_dict(),
        "trace": path.name,
        "trace_mib": round(path.stat().st_size / 2**20, 2),
    }
    harness.write("step_trace", lines, workload=workload)


def _profiled(rows: Rows, options: SimpleNamespace, path: Path) -> None:
    """Writes the trace of one step of the engine."""
    levels = rows.setting.levels
    count = options.batch
    places = [(index + 0.5) / count for index in range(count)]
    edits = [WorkloadEdit(index, 0, MASK, place, 1 - place, levels) for index, place in enumerate(places)]
    device = rows.family.device
    with engine_with(rows.family, rows=count) as engine:
        engine.batch.submit([rows.row(edit, reuse=True) for edit in edits])
        for _ in range(options.step):
            _step(engine)
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
            with profile(activities=activities):  # the first one initialises the device's own
                wait_for(device)
        wait_for(device)
        with profile(activities=activities) as profiler, record_function(STEP):
            _step(engine)
            wait_for(device)
    profiler.export_chrome_trace(str(path))


def _step(engine: Engine) -> None:
    done = engine.step()
    if done is None:
        raise ValueError("the rows are done before the step that is to be profiled")
    if done.failed:
        raise done.failed[0].error


def summary(events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A line for each kind of event and where it ran, the longest first.

    Args:
        events: of a Chrome trace; times are in microseconds.
    """
    known = [event for event in events if event.get("ph") == "X"]
    began_us, ended_us = _step_of(known)
    spans: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for event in known:
        kind = KINDS.get(str(event.get("cat")))
        if kind is not None and began_us <= event["ts"] <= ended_us:
            spans[kind, _where(kind, event)].append(event)
    whole_us = ended_us - began_us
    lines = [_line(kind, where, found, whole_us) for (kind, where), found in spans.items()]
    return sorted(lines, key=lambda line: -line["busy"])


def _where(kind: str, event: Mapping[str, Any]) -> str:
    if kind == "operation":
        return f"thread {event.get('tid')}"
    return f"stream {event.get('args', {}).get('stream', event.get('tid'))}"


def _line(kind: str, where: str, events: Sequence[Mapping[str, Any]], whole_us: float) -> dict[str, Any]:
    by_name: Counter[str] = Counter()
    for event in events:
        by_name[str(event["name"])[:48]] += event.get("dur", 0.0)
    busy_us = _covered_us([(event["ts"], event["ts"] + event.get("dur", 0.0)) for event in events])
    return {
        "what": kind,
        "where": where,
        "count": len(events),
        "ms": round(sum(by_name.values()) / 1e3, 3),
        "busy": round(busy_us / whole_us, 3),
        "step ms": round(whole_us / 1e3, 3),
        "most": "; ".join(f"{name} {us / 1e3:.2f} ms" for name, us in by_name.most_common(SHOWN)),
    }


def _step_of(events: Iterable[Mapping[str, Any]]) -> tuple[float, float]:
    """Begin and end of what is marked as the step, on the host."""
    for event in events:
        if event["name"] == STEP and event.get("cat") == "user_annotation":
            return event["ts"], event["ts"] + event["dur"]
    raise ValueError(f"the trace has no event {STEP!r}")


def _covered_us(spans: Iterable[tuple[float, float]]) -> float:
    """Return what intervals cover together."""
    covered, reached = 0.0, float("-inf")
    for began, ended in sorted(spans):
        covered += max(0.0, ended - max(began, reached))
        reached = max(reached, ended)
    return covered


if __name__ == "__main__":
    main()
