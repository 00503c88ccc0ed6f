"""How long edits take while they arrive by chance, at rising rates, in real time.

Open loop: the same Poisson arrivals for every system, from pixels to pixels, prompts as embeddings. The rates are
shares of what saturates diffusers' static batching, which is measured first: a full batch over its time. Writes
``out/bench/latency.json`` and two charts, ``latency_p50.svg`` and ``latency_p95.svg``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Final

import click
import numpy as np
import torch

from giornata_lab.bench.compute.models import TOKEN_PIXELS, described
from giornata_lab.bench.compute.static_batching import StaticBatching, in_batches
from giornata_lab.bench.compute.workload import IMAGES, MIXES, Arrival, WorkloadEdit, arrivals, edits
from giornata_lab.bench.harness import charts, write
from giornata_lab.bench.options import rows_of, shared
from giornata_lab.bench.systems.serving import SYSTEMS, Coder, Parts, coder_process
from giornata_lab.flags import Several, option, parsed
from giornata_lab.loadgen.outcomes import percentile
from giornata_lab.loadgen.workload import arrival_times

STATIC: Final = next(iter(SYSTEMS))
DISTINCT: Final = 64
"""Edits of the workload before it begins again."""
PATIENCE_S: Final = 1800.0
"""Longest wait after the last arrival."""


class Tally:
    """When which edit was done."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._ended: dict[int, float] = {}

    def done(self, edit: WorkloadEdit) -> None:
        """From any thread."""
        now = time.perf_counter()
        with self._changed:
            self._ended[edit.index] = now
            self._changed.notify()

    def all_of(self, count: int) -> Mapping[int, float]:
        """Wait until so many are done; when each was.

        Raises:
            TimeoutError: they are not within `PATIENCE_S`.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._ended) >= count, PATIENCE_S):
                raise TimeoutError(f"{len(self._ended)} of {count} edits were done after {PATIENCE_S:g} s")
            return dict(self._ended)


def served(name: str, parts: Parts, trace: Sequence[Arrival]) -> list[float]:
    """Seconds of every request, from when it was to arrive until the last of its pictures was done."""
    tally = Tally()
    with SYSTEMS[name](parts, tally.done) as system:
        began = time.perf_counter()
        for arrival in trace:
            time.sleep(max(0.0, began + arrival.at_s - time.perf_counter()))
            system.submit(arrival.edits)
        ended = tally.all_of(sum(len(arrival.edits) for arrival in trace))
    return [max(ended[edit.index] for edit in arrival.edits) - began - arrival.at_s for arrival in trace]


def saturation(parts: Parts, drawn: Sequence[WorkloadEdit]) -> float:
    """Edits a second of static batching with full batches."""
    batches = in_batches(drawn[: parts.batch], parts.batch)
    took = []
    for _ in range(2):  # the first one warms up
        began = time.perf_counter()
        for batch, steps in batches:
            pictures = torch.stack([torch.from_numpy(parts.picture(edit)) for edit in batch])
            parts.static.edited(batch, steps, pictures)
        took.append(time.perf_counter() - began)
    return parts.batch / took[-1]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    options = parsed(
        __doc__,
        [
            *shared(tokens=256, text=32, repeats=1),
            option("--batch", type=int, default=8, help="rows of a step"),
            option("--seconds", type=float, default=40.0, help="of arrivals at each rate"),
            option("--shares", type=Several(float), default=[0.3, 0.6, 0.95], help="of saturation"),
            option("--mix", type=click.Choice(list(MIXES)), default="production", help="of step counts"),
            option("--divide", type=int, default=4, help="step counts by this"),
            option("--images", type=click.Choice(list(IMAGES)), default="one", help="a request"),
            option("--templates", type=int, default=2, help="distinct pictures"),
            option("--systems", type=Several(click.Choice(list(SYSTEMS))), default=list(SYSTEMS)),
        ],
        arguments,
    )
    rows = rows_of(options)
    family = rows.family
    drawn = edits(
        DISTINCT, MIXES[options.mix], templates=options.templates, seed=options.seed, divide=options.divide
    )
    coder = Coder(family.dtype, family.device)
    with coder_process(family.dtype, family.device, rows.side * TOKEN_PIXELS) as process:
        parts = Parts(rows, StaticBatching(rows, coder.model), coder, process, options.batch)
        for index in range(options.templates):
            rows.template(index)
        full = saturation(parts, drawn)
        for name in options.systems:
            served(name, parts, [Arrival(0.0, (drawn[0],))])  # warms up
        lines = _measured(parts, drawn, full, options)
    charts("latency", lines, ("P50", "P95"))
    workload = {
        **vars(options),
        "model": described(family),
        "setting": rows.setting.as_dict(),
        "saturation_per_s": round(full, 4),
        "static": "no window: whoever waits when the pipeline is free, padded to the longest",
        "autoencoder": "Flux's at a quarter of its width; in this process for static batching and the strawman, in one "
        "of its own with one thread for the others",
    }
    write("latency", lines, workload=workload)


def _measured(
    parts: Parts, drawn: Sequence[WorkloadEdit], full: float, options: SimpleNamespace
) -> list[dict[str, Any]]:
    images = IMAGES[options.images]
    mean_images = sum(many * weight for many, weight in images.items()) / sum(images.values())
    lines = []
    for share in options.shares:
        rate = share * full / mean_images
        windows: dict[str, list[list[float]]] = {name: [] for name in options.systems}
        for repeat in range(options.repeats):
            seed = options.seed + repeat
            times = arrival_times(rate, options.seconds, seed) or [0.0]
            trace = arrivals(times, drawn, images, seed)
            turn = options.systems[:: 1 if repeat % 2 == 0 else -1]  # so that none has the quicker machine
            for name in turn:
                windows[name].append(served(name, parts, trace))
        lines += [
            _line(share, rate, name, found, windows[options.systems[0]]) for name, found in windows.items()
        ]
    return lines


_Windows = Sequence[Sequence[float]]


def _line(share: float, rate: float, name: str, found: _Windows, baseline: _Windows) -> dict[str, Any]:
    """Ratios are medians, with the quartiles, over windows of the same arrivals: one slow minute spoils one of them."""
    figures: dict[str, Any] = {}
    for percent in (50, 95):
        own, other = ([percentile(window, percent) for window in of] for of in (found, baseline))
        low, middle, high = np.percentile(np.array(other) / own, (25, 50, 75)).round(3)
        figures |= {f"P{percent} ratio": float(middle), f"P{percent} quartiles": f"{low:g} to {high:g}"}
        figures[f"P{percent} s"] = round(percentile([one for window in found for one in window], percent), 3)
    slower = figures["P50 ratio"] < 1
    return {
        "of saturation": share,
        "requests/s": round(rate, 4),
        "system": name,
        **figures,
        "requests": sum(map(len, found)),
        "note": "slower than the baseline" if slower else "",
    }


if __name__ == "__main__":
    main()
