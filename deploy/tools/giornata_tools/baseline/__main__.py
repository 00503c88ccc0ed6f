"""Serve a checkpoint by diffusers' own pipeline with static batching: ``giornata bench baseline``."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from functools import partial

import torch

from giornata.checkpoints import DTYPES
from giornata_tools.baseline.batching import Rule
from giornata_tools.baseline.pipeline import Pipeline
from giornata_tools.baseline.server import Baseline, serving
from giornata_tools.launcher import program
from giornata_tools.launcher.model import TRAINED
from giornata_tools.launcher.program import count


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="giornata bench baseline", description=__doc__)
    made.add_argument(
        "--model",
        default=os.environ.get("GIORNATA_MODEL") or str(TRAINED),
        help="a diffusers folder or a hub id, also GIORNATA_MODEL (the one that ships)",
    )
    made.add_argument("--host", default="127.0.0.1", help="(%(default)s)")
    made.add_argument("--port", type=int, default=8100, help="0 for any free one (%(default)s)")
    made.add_argument(
        "--batch", type=count, default=8, metavar="N", help="most pictures of a batch (%(default)s)"
    )
    made.add_argument(
        "--window-ms",
        type=float,
        default=100.0,
        metavar="MS",
        help="longest wait of a picture for others, while the pipeline is free (%(default)s)",
    )
    made.add_argument(
        "--queue", type=count, default=1000, metavar="N", help="most pictures that wait (%(default)s)"
    )
    made.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (%(default)s)")
    made.add_argument("--dtype", default="auto", choices=["auto", *DTYPES], help="auto: bfloat16 on a GPU")
    made.add_argument(
        "--torch-threads", type=count, default=os.cpu_count(), metavar="N", help="(%(default)s)"
    )
    return made


async def main(flags: argparse.Namespace) -> int:
    """Serve until cancelled."""
    gpu = flags.device != "cpu" and torch.cuda.is_available()
    device = torch.device(("cuda" if gpu else "cpu") if flags.device == "auto" else flags.device)
    dtype = DTYPES[
        ("bfloat16" if device.type == "cuda" else "float32") if flags.dtype == "auto" else flags.dtype
    ]
    torch.set_num_threads(flags.torch_threads)
    pipeline = await asyncio.to_thread(Pipeline, flags.model, device, dtype)
    baseline = Baseline(pipeline, Rule(flags.batch, flags.window_ms / 1000), flags.queue)
    async with serving(baseline, pipeline.name, flags.host, flags.port) as url:
        print(f"{pipeline.name} at {url}: up to {flags.batch} pictures a batch", flush=True)
        await asyncio.Event().wait()
    return 0


if __name__ == "__main__":
    sys.exit(program.run("baseline", partial(main, parser().parse_args())))
