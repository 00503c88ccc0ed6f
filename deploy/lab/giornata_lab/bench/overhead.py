"""What serving adds to computing. ``make bench`` prints a table and writes ``out/bench/overhead.json``.

Five measurements, those that FlashPS (EuroSys '26, section 6.6) has too beside the paper's figure, on its machine:

* *request overhead*: a client's whole HTTP request on a quiet stack, minus the compute spans that the services report
  for the same edit (inspect, encode, engine steps, decode, paste);
* *router decision*: choosing a worker of a busy fleet (paper: 0.6 ms);
* *batch assembly*: putting eight unequal rows together, when the batch changes and when it does not (paper: 1.2 ms),
  in full and masked, with the layouts of live tokens that masked rows ask for;
* *step bookkeeping*: admission, plans and the order of loads for eight masked rows that take from templates, when they
  join and in the steps after;
* *latent hand-over*: final latents of a 1024x1024 picture from the denoiser to prepost, packed, handed over, fetched,
  verified, unpacked: in the memory of one host, and through the blob store alone, as between hosts (paper: 2.4 ms).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import torch
import uvloop

from giornata import tensors
from giornata.blobs import BlobStore, intermediate, open_blobs
from giornata.families import Family
from giornata.scheduling.demand import JobDemand, RowShape
from giornata.scheduling.placement import Placement
from giornata.scheduling.policies import finish_time
from giornata.scheduling.scheduler import LOOKED_AT
from giornata.wire.values import Intermediate
from giornata.wire.workers import RowProgress, ServiceName, ServiceState, WorkerState
from giornata_lab.bench.compute.engine import MASKED_STEPS, assembly_times, bookkeeping_times, opened
from giornata_lab.bench.compute.setting import DEFAULT
from giornata_lab.bench.reporting.report import Measurement, measured, write
from giornata_lab.bench.systems.deciding import CARD
from giornata_lab.bench.systems.edit_forms import box, edit_form, file, scene
from giornata_lab.bench.systems.servers import embedded
from giornata_tools.launcher.models import StackModel
from giornata_tools.launcher.plan import StackPlan
from giornata_tools.launcher.stack import running
from giornata_tools.model.random.build import build

SEED = 0
EDITS = 40
WARM_UP = 8
STEPS = 8
SIZE = 256
HAND_OVERS = 200
WARM_HAND_OVERS = 20
WORKERS = 64
ROWS_PER_WORKER = 8
PAPER_MS = {"router decision": 0.6, "batch assembly": 1.2, "latent hand-over": 2.4}
AIM_MS = {"batch assembly": 0.5, "latent hand-over": 1.0}
"""Ours."""
BOOKKEEPING = "step bookkeeping: admission, plans, loads"


async def request_overhead(model: Path, state: Path) -> tuple[Measurement, Measurement]:
    """Milliseconds of (whole requests, requests minus their compute spans), sequential edits on a quiet stack."""
    plan = StackPlan(state=state, logs=state / "logs", models=(StackModel(str(model)),))
    image, mask = file(scene(SIZE, SIZE)), file(box(SIZE, SIZE))
    whole, overhead = [], []
    async with running(plan) as stack:
        await stack.bring_up()
        async with aiohttp.ClientSession(stack.url) as http:
            for i in range(WARM_UP + EDITS):
                form = edit_form(image, mask, num_inference_steps=STEPS, seed=SEED)
                began = time.perf_counter()
                async with http.post("/v1/images/edits", data=form) as answer:
                    body = await answer.json()
                total_ms = (time.perf_counter() - began) * 1000
                if answer.status != 200:
                    raise SystemExit(f"the benchmark's edit failed: {body}")
                if i >= WARM_UP:
                    whole.append(total_ms)
                    overhead.append(total_ms - sum(body["giornata"]["compute_ms"].values()))
    return measured(whole), measured(overhead)


def router_decisions() -> Measurement:
    """Milliseconds to choose among a busy fleet, with as many assignments that telemetry does not show yet."""
    placement = Placement()
    for worker in range(WORKERS):
        rows = tuple(
            RowProgress(job_id=f"j{worker}-{i}", attempt=1, index=0, step=i, steps=30, tokens=4096)
            for i in range(ROWS_PER_WORKER)
        )
        state = ServiceState(
            service=ServiceName.DENOISER,
            instance=f"d{worker}",
            host="h",
            version="0",
            ready=True,
            models=(CARD,),
            worker=WorkerState(capacity_rows=64, capacity_tokens=1 << 20, running=rows),
        )
        placement.observe(state, 0)
    demand = JobDemand(CARD.name, CARD.digest, (RowShape(text=512, image=4096, computed=600, steps=30),))
    times = []
    for i in range(500):
        began = time.perf_counter()
        chosen = finish_time(placement.candidates(demand, LOOKED_AT), demand)
        times.append((time.perf_counter() - began) * 1000)
        if chosen is not None and i < WORKERS:
            placement.assign(f"new{i}", 1, chosen.instance, demand, 0)
    return measured(times[100:])


async def hand_overs() -> dict[str, Measurement]:
    """Milliseconds from a denoiser's tensor to prepost's by case."""
    times: dict[str, list[float]] = {}
    generator = torch.Generator().manual_seed(SEED)
    async with AsyncExitStack() as stack:
        _, url = stack.enter_context(embedded())
        denoiser, prepost = [
            await stack.enter_async_context(open_blobs(url)) for _ in ("denoiser", "prepost")
        ]
        for dtype, name in ((torch.bfloat16, "bfloat16 (0.5 MiB)"), (torch.float32, "float32 (1 MiB)")):
            latents = torch.randn(4096, 64, generator=generator).to(dtype)
            for i in range(WARM_HAND_OVERS + HAND_OVERS):
                took_ms = await hand_over(latents, denoiser, prepost, f"latents-{i}")
                if i >= WARM_HAND_OVERS:
                    times.setdefault(name, []).append(took_ms)
    return {case: measured(values) for case, values in times.items()}


async def hand_over(latents: torch.Tensor, denoiser: BlobStore, prepost: BlobStore, key: str) -> float:
    """Milliseconds from a denoiser's (tokens, channels) to prepost's, as the services do it."""
    began = time.perf_counter()
    ref = await denoiser.put(key, tensors.pack({"latents": latents}), 60)
    received = tensors.unpack(await intermediate(prepost, ref, Intermediate.LATENTS))["latents"]
    took_ms = (time.perf_counter() - began) * 1000
    if not torch.equal(received, latents) or not await denoiser.has(ref):
        raise SystemExit("the hand-over changed the latents, or the store did not get them")
    await denoiser.delete(ref)
    return took_ms


def rows(
    whole: Measurement,
    overhead: Measurement,
    decision: Measurement,
    assembly: dict[str, Measurement],
    bookkeeping: dict[str, Measurement],
    handed_over: dict[str, Measurement],
) -> Iterator[dict[str, object]]:
    """The table: ours, the paper's figure, and how many times ours is below it."""
    nothing: dict[str, object] = {"aim_ms": "-", "paper_ms": "-", "paper ÷ ours": "-"}
    yield {"measure": "whole request", "ours_ms": whole.as_dict(), **nothing}
    yield {"measure": "request overhead", "ours_ms": overhead.as_dict(), **nothing}
    found = {
        "batch assembly": assembly,
        "latent hand-over": handed_over,
        "router decision": {"": decision},
        BOOKKEEPING: bookkeeping,
    }
    for what, cases in found.items():
        paper = PAPER_MS.get(what)
        for case, value in cases.items():
            yield {
                "measure": f"{what}, {case}" if case else what,
                "ours_ms": value.as_dict(),
                "aim_ms": AIM_MS.get(what, "-"),
                "paper_ms": "-" if paper is None else paper,
                "paper ÷ ours": "-" if paper is None else paper / value.p50_ms,
            }


async def main() -> None:
    """Measure one after the other, so that nothing competes for the cores."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="gio-") as folder:
        model = Path(folder) / "tiny"
        build(Family.FLUX_FILL, model, seed=SEED)
        whole, overhead = await request_overhead(model, Path(folder) / "state")
        checkpoint = opened(model)
        assembly = assembly_times(checkpoint, SEED)
        bookkeeping = bookkeeping_times(checkpoint, SEED)
    decision = router_decisions()
    handed_over = await hand_overs()
    workload = {
        "request": f"{EDITS} sequential edits after {WARM_UP}, {SIZE}x{SIZE}, {STEPS} steps, tiny flux-fill, float32",
        "router": f"{WORKERS} workers with {ROWS_PER_WORKER} rows each",
        "assembly": "8 rows of 512 to 1024 image tokens and 48 text tokens",
        "bookkeeping": f"the same rows masked, {MASKED_STEPS} steps, as if loads took as long as computing",
        "setting": DEFAULT.as_dict(),
        "latents": "(4096, 64); the store is Valkey over a unix socket, append-only",
        "seed": SEED,
        "paper": "FlashPS (EuroSys '26) section 6.6; its figures, not measured here",
    }
    write(
        "overhead",
        list(rows(whole, overhead, decision, assembly, bookkeeping, handed_over)),
        workload=workload,
    )


if __name__ == "__main__":
    uvloop.run(main())
