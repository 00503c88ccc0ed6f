"""The baseline server as a program: its pipeline on a device, and the server around it until the end."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import torch

from giornata.checkpoints import DTYPES
from giornata_tools.baseline.batching import Rule
from giornata_tools.baseline.pipeline import Pipeline
from giornata_tools.baseline.server import Baseline, serving


@dataclass(frozen=True)
class BaselineOptions:
    """Flags of ``giornata bench baseline``."""

    model: str
    host: str
    port: int
    batch: int
    window_ms: float
    queue: int
    device: str
    dtype: str
    torch_threads: int


async def serve(options: BaselineOptions) -> int:
    """Load the checkpoint, print the address, serve until cancelled."""
    gpu = options.device != "cpu" and torch.cuda.is_available()
    device = torch.device(("cuda" if gpu else "cpu") if options.device == "auto" else options.device)
    usual = "bfloat16" if device.type == "cuda" else "float32"
    torch.set_num_threads(options.torch_threads)
    pipeline = await asyncio.to_thread(
        Pipeline, options.model, device, DTYPES[usual if options.dtype == "auto" else options.dtype]
    )
    baseline = Baseline(pipeline, Rule(options.batch, options.window_ms / 1000), options.queue)
    async with serving(baseline, pipeline.name, options.host, options.port) as url:
        print(f"{pipeline.name} at {url}: up to {options.batch} pictures a batch", flush=True)
        await asyncio.Event().wait()
    return 0
