"""Live, at rising rates: this system with its denoisers, beside diffusers' static batching, request-level balanced.

The same requests for both, one after the other on the same cores: masks and step counts as in production, Poisson
arrivals, open loop, from HTTP to HTTP. Both have the model that ships and a thread for each process that computes; a
request of the baseline goes to the server with the fewest in flight. The rates are shares of what saturates the
baseline, which is measured first. Writes ``out/bench/serve.json`` and charts.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from giornata.fleet import Fleet
from giornata.wire.workers import ServiceName, Tier
from giornata_lab.bench.harness import charts, write
from giornata_lab.flags import Several, option, parsed
from giornata_lab.loadgen import workload
from giornata_lab.loadgen.driver import ApiDialect, Send, drive, open_images_api
from giornata_lab.loadgen.outcomes import LoadFigures, RequestOutcome, ServerAnswer, figures
from giornata_lab.loadgen.pictures import WorkloadImages, made, material
from giornata_lab.loadgen.workload import MaskShape, Workload, WorkloadRequest, arrival_times, draw, zipf
from giornata_tools.checkout import TRAINED
from giornata_tools.launcher.models import StackModel
from giornata_tools.launcher.plan import ONE_EACH, StackPlan, socket_folder
from giornata_tools.launcher.stack import Stack, running


class LeastInFlight:
    """Sends every request to the server that has the fewest without an answer; among equals, the one used longest ago.

    Args:
        servers: one or more.
    """

    def __init__(self, servers: Sequence[Send]) -> None:
        self._servers = servers
        self._in_flight = [0] * len(servers)
        self._turns = list(range(-len(servers), 0))
        """When each was last used."""
        self._turn = 0

    async def send(self, request: WorkloadRequest) -> ServerAnswer:
        """Have one of the servers answer."""
        place = min(range(len(self._servers)), key=lambda at: (self._in_flight[at], self._turns[at]))
        self._turn += 1
        self._turns[place] = self._turn
        self._in_flight[place] += 1
        try:
            return await self._servers[place](request)
        finally:
            self._in_flight[place] -= 1


PROMPT: Final = "a red star"
LIMIT_S: Final = 900.0
"""Time limit of one answer."""
IN_FLIGHT: Final = 1000
RECORDED_S: Final = 60.0
DEVICE_MB: Final = 4
"""Room for LoRAs that no row uses: about a dozen of :mod:`giornata_lab.bench.systems.loras`."""


@dataclass(frozen=True)
class LivePictures:
    """What all requests edit."""

    side: int
    """Pixels; a square."""
    seed: int

    def material(self, requests: Sequence[WorkloadRequest]) -> WorkloadImages:
        """The files of `requests`."""
        return material(requests, made(requests, self.side, self.side, self.seed))


def production(templates: int) -> Workload:
    """Masks and step counts as in production, one picture a request, of so many templates by their popularity."""
    return Workload(
        workload.MASK_RATIOS["production"],
        workload.STEPS,
        {1: 1.0},
        zipf(templates, workload.ZIPF),
        MaskShape.BLOB,
    )


def saturation(outcomes: Sequence[RequestOutcome]) -> float:
    """Requests a second where all were there from the start."""
    return len(outcomes) / max(outcome.ended_s for outcome in outcomes)


@asynccontextmanager
async def giornata(
    denoisers: int, templates: Path, loras: Path | None = None, stores: int = 1, *, records: bool = False
) -> AsyncIterator[Stack]:
    """The whole system with the model that ships, a thread a process, ready.

    Args:
        denoisers: how many.
        templates: folder of recorded templates, for all denoisers.
        loras: shared folder of LoRAs, of which devices hold :data:`DEVICE_MB`; None: there are none.
        stores: LoRA stores.
        records: templates are recorded before the first edit of a picture, instead of edits leaving what serves next.
    """
    env = {"GIORNATA_CACHE_FOLDER": str(templates)}
    if records:
        env["GIORNATA_TEMPLATE_POLICY"] = "inline"
    if loras is not None:
        env |= {"GIORNATA_LORA_SHARED_FOLDER": str(loras), "GIORNATA_CACHE_DEVICE_MB": str(2 * DEVICE_MB)}
    with tempfile.TemporaryDirectory(prefix="gio-", dir=socket_folder()) as name:
        folder = Path(name)
        plan = StackPlan(
            state=folder,
            logs=folder / "logs",
            models=(StackModel(str(TRAINED)),),
            replicas={**ONE_EACH, ServiceName.DENOISER: denoisers, ServiceName.LORA_STORE: stores},
            env=env,
        )
        async with running(plan, lambda _: None) as stack:
            await stack.bring_up()
            yield stack


async def record(folder: Path, requests: Sequence[WorkloadRequest], pictures: LivePictures) -> None:
    """Record the templates of `requests` into `folder`, by a system of its own with one denoiser.

    Raises:
        SystemExit: some were not recorded.
    """
    few = {request.template: replace(request, steps=8, at_s=0.0) for request in requests}
    async with giornata(1, folder, records=True) as stack:
        for _ in range(2):  # a template is recorded at its second edit
            await served([stack.url], list(few.values()), pictures)

        def recorded(fleet: Fleet) -> bool:
            told = [state.worker for state in fleet.ready(ServiceName.DENOISER) if state.worker]
            return any(len((worker.resident or {}).get(Tier.DISK, ())) == len(few) for worker in told)

        await stack.watch.until(recorded, RECORDED_S, lambda _: "templates have not been recorded")


@asynccontextmanager
async def static_batching(count: int, batch: int) -> AsyncIterator[list[str]]:
    """Addresses of so many of diffusers' pipelines with the same model, a thread each, ready."""
    command = (
        "-m",
        "giornata_tools.cli",
        "bench",
        "baseline",
        "--model",
        str(TRAINED),
        "--port",
        "0",
        "--torch-threads",
        "1",
    )
    async with AsyncExitStack() as stack:
        urls = []
        for _ in range(count):
            process = await asyncio.create_subprocess_exec(
                sys.executable, *command, "--batch", str(batch), stdout=asyncio.subprocess.PIPE
            )
            stack.push_async_callback(_ended, process)
            assert process.stdout is not None
            said = (await process.stdout.readline()).decode()
            found = re.search(r"http://[\w.]+:\d+", said)
            if found is None:
                raise SystemExit(f"the baseline has not started: {said!r}")
            urls.append(found[0])
        yield urls


async def _ended(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    await process.wait()


async def served(
    urls: Sequence[str], requests: Sequence[WorkloadRequest], pictures: LivePictures
) -> list[RequestOutcome]:
    """Send every request when it is due, to the server with the fewest in flight, and wait for all answers.

    Raises:
        SystemExit: one of them failed.
    """
    files = await asyncio.to_thread(pictures.material, requests)
    outcomes: list[RequestOutcome] = []
    async with AsyncExitStack() as stack:
        apis = [
            await stack.enter_async_context(
                open_images_api(
                    url, files, {"prompt": PROMPT}, api=ApiDialect.GIORNATA, api_key=None, timeout_s=LIMIT_S
                )
            )
            for url in urls
        ]
        balanced = LeastInFlight([api.send for api in apis])
        await drive(requests, balanced.send, outcomes.append, limit=IN_FLIGHT)
    failed = [outcome.answer for outcome in outcomes if outcome.answer.code is not None]
    if failed:
        raise SystemExit(f"{len(failed)} of {len(outcomes)} edits failed, the first with {failed[0]}")
    return outcomes


OURS: Final = "giornata"
STATIC: Final = "static batching"


async def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    options = parsed(
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
