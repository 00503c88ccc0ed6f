"""Live, at rising rates: this system with its denoisers, beside diffusers' static batching, request-level balanced.

The same requests for both, one after the other on the same cores: masks and step counts as in production, Poisson
arrivals, open loop, from HTTP to HTTP. Both have the model that ships and a thread for each process that computes; a
request of the baseline goes to the server with the fewest in flight. The rates are shares of what saturates the
baseline, which is measured first. Writes ``out/bench/serve.json`` and charts.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from giornata_lab.bench.reporting.report import charts, write
from giornata_lab.bench.systems.live import (
    PROMPT,
    LivePictures,
    giornata,
    production,
    record,
    saturation,
    served,
    static_batching,
)
from giornata_lab.flags import Several, option, parsed
from giornata_lab.loadgen.outcomes import LoadFigures, figures
from giornata_lab.loadgen.workload import WorkloadRequest, arrival_times, draw

OURS: Final = "giornata"
STATIC: Final = "static batching"


def options_of(arguments: Sequence[str] | None = None) -> SimpleNamespace:
    """Flags."""
    return parsed(
        __doc__,
        [
            option("--denoisers", type=int, default=2, help="and as many baselines"),
            option("--batch", type=int, default=8, help="of the baseline, at most"),
            option("--side", type=int, default=256, help="of the pictures, in pixels"),
            option("--templates", type=int, default=4, help="distinct pictures"),
            option("--seconds", type=float, default=60.0, help="of arrivals at each rate"),
            option("--shares", type=Several(float), default=[0.5, 1.0, 2.0, 3.0], help="of saturation"),
            option("--burst", type=int, default=32, help="requests that measure saturation"),
            option("--slo", type=float, default=10.0, help="seconds"),
            option("--seed", type=int, default=0),
        ],
        arguments,
    )


async def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    options = options_of(arguments)
    work = production(options.templates)
    pictures = LivePictures(options.side, options.seed)
    burst = draw([0.0] * options.burst, work, options.seed + 1)
    lines: list[dict[str, Any]] = []
    async with AsyncExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="gio-")))
        await record(folder, burst, pictures)
        stack = await opened.enter_async_context(giornata(options.denoisers, folder))
        urls = await opened.enter_async_context(static_batching(options.denoisers, options.batch))
        systems = {STATIC: urls, OURS: [stack.url]}
        most = {}
        for name, addresses in systems.items():
            outcomes = await served(addresses, burst, pictures)
            most[name] = saturation(outcomes)
            print(f"{name}: saturated at {most[name]:.3f} requests/s", flush=True)
        for share in options.shares:
            rate = share * most[STATIC]
            requests = draw(arrival_times(rate, options.seconds, options.seed), work, options.seed)
            found = {
                name: await _measured(addresses, requests, pictures, options)
                for name, addresses in systems.items()
            }
            for name, told in found.items():
                lines.append(_line(share, rate, name, told, found[STATIC]))
                print(*(f"{key} {value}" for key, value in lines[-1].items()), sep=", ", flush=True)
    charts("serve", lines, ("mean", "P95"), "{} latency of a request")
    workload = {
        **vars(options),
        "model": "fresco, float32",
        "masks and steps": "production",
        "prompt": PROMPT,
        "saturation_per_s": {name: round(value, 4) for name, value in most.items()},
        "saturation": f"{options.burst} requests at once, over the time until the last has ended",
        "static": "pictures of one size and step count share a batch; a window of 100 ms while the pipeline is free",
        "templates": "recorded before, on disk for every denoiser",
    }
    write("serve", lines, workload=workload)


async def _measured(
    urls: Sequence[str], requests: Sequence[WorkloadRequest], pictures: LivePictures, options: SimpleNamespace
) -> LoadFigures:
    outcomes = await served(urls, requests, pictures)
    return figures(requests, outcomes, warmup_s=0.0, seconds=options.seconds, slo_s=options.slo)


def _line(share: float, rate: float, name: str, told: LoadFigures, baseline: LoadFigures) -> dict[str, Any]:
    own, other = told.latency_s, baseline.latency_s
    assert own is not None
    assert other is not None
    return {
        "of saturation": share,
        "requests/s": round(rate, 4),
        "system": name,
        "mean ratio": round(other.mean / own.mean, 2),
        "P95 ratio": round(other.p95 / own.p95, 2),
        "mean s": round(own.mean, 3),
        "P50 s": round(own.p50, 3),
        "P95 s": round(own.p95, 3),
        "within SLO": round(told.slo_share or 0.0, 3),
        "requests": told.requests,
        "late P99 ms": round(1e3 * (told.late_s.p99 if told.late_s else 0.0), 1),
    }


if __name__ == "__main__":
    asyncio.run(main())
