"""Flags that several benchmarks share, and what they open."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from math import isqrt

import torch

from giornata_denoiser.families.flux.inpaint import FluxInpaint
from tests.bench.compute.models import SHAPES, flux
from tests.bench.compute.rows import Rows

AUTO = "auto"


def parser(doc: str | None, *, tokens: int, text: int, repeats: int) -> argparse.ArgumentParser:
    """A parser of the shared flags; the defaults that differ are given."""
    made = argparse.ArgumentParser(description=(doc or "").split("\n\n", maxsplit=1)[0])
    made.add_argument(
        "--model",
        default="mid",
        choices=list(SHAPES),
        help="mid: 160 M parameters; real: FLUX.1-dev, 12 B; tiny: to try out (default mid)",
    )
    made.add_argument("--tokens", type=int, default=tokens, help=f"of a picture, a square (default {tokens})")
    made.add_argument("--text", type=int, default=text, help=f"tokens of a prompt (default {text})")
    made.add_argument("--device", default="cpu")
    made.add_argument(
        "--dtype",
        default=AUTO,
        choices=[AUTO, "bfloat16", "float32", "float16"],
        help="default: bfloat16, but float32 on a CPU that multiplies it faster",
    )
    made.add_argument("--threads", type=int, default=os.cpu_count(), help="of torch (default: all cores)")
    made.add_argument("--repeats", type=int, default=repeats, help=f"default {repeats}")
    made.add_argument(
        "--processor-time",
        action="store_true",
        help="what this process computed, in all of its threads, not the clock: for machines that others share, with "
        "--threads 1",
    )
    made.add_argument("--seed", type=int, default=0, help="of the workload")
    return made


def clock_of(options: argparse.Namespace) -> Callable[[], float]:
    """Seconds, as the flags ask for them."""
    return time.process_time if options.processor_time else time.perf_counter


def opened(options: argparse.Namespace) -> FluxInpaint:
    """The transformer that the flags name."""
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    dtype = fastest(device) if options.dtype == AUTO else getattr(torch, options.dtype)
    return flux(SHAPES[options.model], dtype, device)


def rows_of(options: argparse.Namespace) -> Rows:
    """Rows for the transformer that the flags name, in the sizes that they name."""
    return Rows(opened(options), isqrt(options.tokens), options.text)


def fastest(device: torch.device) -> torch.dtype:
    """bfloat16, but float32 where a CPU has no instructions for it."""
    if device.type != "cpu":
        return torch.bfloat16
    times = {dtype: _product_s(dtype) for dtype in (torch.bfloat16, torch.float32)}
    return min(times, key=lambda dtype: times[dtype])


def wait_for(device: torch.device) -> None:
    """Until `device` has done what it was told to."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _product_s(dtype: torch.dtype) -> float:
    """The quickest of some matrix products."""
    left, right = torch.ones(256, 768, dtype=dtype), torch.ones(768, 768, dtype=dtype)
    times = []
    for _ in range(5):
        began = time.perf_counter()
        left @ right
        times.append(time.perf_counter() - began)
    return min(times)
