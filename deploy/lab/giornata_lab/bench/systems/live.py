"""Whole systems on this machine for live benchmarks: ours as the launcher starts it, and diffusers' static batching."""

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
from typing import Final

from giornata.fleet import Fleet
from giornata.wire.workers import ServiceName, Tier
from giornata_lab.bench.systems.balancing import LeastInFlight
from giornata_lab.loadgen import workload
from giornata_lab.loadgen.driver import ApiDialect, drive, open_images_api
from giornata_lab.loadgen.outcomes import RequestOutcome
from giornata_lab.loadgen.pictures import WorkloadImages, made, material
from giornata_lab.loadgen.workload import MaskShape, Workload, WorkloadRequest, zipf
from giornata_tools.checkout import TRAINED
from giornata_tools.launcher.models import StackModel
from giornata_tools.launcher.plan import ONE_EACH, StackPlan, socket_folder
from giornata_tools.launcher.stack import Stack, running

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
