"""Flags that several benchmarks share, and what they open."""

from __future__ import annotations

import os
import time
from functools import lru_cache
from math import isqrt
from types import SimpleNamespace

import click
import torch

from giornata.runtime import keep_freed
from giornata_denoiser.families.network import ModelFamily
from giornata_lab.bench.compute.models import FAMILIES, SHAPES, family, flux
from giornata_lab.bench.compute.rows import Rows
from giornata_lab.flags import option

AUTO = "auto"
FLUX = "flux"


def shared(
    *, tokens: int, text: int, repeats: int, model: str = "mid", device: str = "cpu"
) -> list[click.Option]:
    """The shared flags; the defaults that differ are given."""
    return [
        option(
            "--model",
            type=click.Choice(list(SHAPES)),
            default=model,
            help="mid: 160 M parameters; real: FLUX.1-dev, 12 B; tiny: to try out",
        ),
        option("--tokens", type=int, default=tokens, help="of a picture, a square"),
        option("--text", type=int, default=text, help="tokens of a prompt"),
        option("--device", default=device),
        option(
            "--dtype",
            type=click.Choice([AUTO, "bfloat16", "float32", "float16"]),
            default=AUTO,
            help="default: bfloat16, but float32 on a CPU that multiplies it faster",
        ),
        option("--threads", type=int, default=os.cpu_count(), help="of torch"),
        option("--repeats", type=int, default=repeats),
        option(
            "--processor-time",
            is_flag=True,
            help="what this process computed, in all of its threads, not the clock: for machines that others "
            "share, with --threads 1",
        ),
        option("--seed", type=int, default=0, help="of the workload"),
    ]


def family_option() -> click.Option:
    """For benchmarks of any family."""
    names = [FLUX, *FAMILIES]
    return option(
        "--family",
        type=click.Choice(names),
        default=FLUX,
        help="others than Flux are mid-size, or published with --model real",
    )


def opened(options: SimpleNamespace) -> ModelFamily:
    """The network that the flags name."""
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    if device.type == "cpu":
        keep_freed()  # as a denoiser does
    dtype = fastest(device) if options.dtype == AUTO else getattr(torch, options.dtype)
    name = vars(options).get("family", FLUX)
    if name != FLUX:
        return family(name, published=options.model == "real", dtype=dtype, device=device)
    return _flux(options.model, dtype, device)


@lru_cache(maxsize=1)
def _flux(model: str, dtype: torch.dtype, device: torch.device) -> ModelFamily:
    """Kept, since programs may run one after the other in one process, and 12 B weights take their time."""
    return flux(SHAPES[model], dtype, device)


def rows_of(options: SimpleNamespace) -> Rows:
    """Rows for the transformer that the flags name, in the sizes that they name."""
    rows = Rows(opened(options), isqrt(options.tokens), options.text)
    rows.padding_tokens = vars(options).get("padding", 0)
    return rows


def padding_option() -> click.Option:
    """For benchmarks of edits that keep their prompts' padding from step to step."""
    return option("--padding", type=int, default=0, help="of a prompt's tokens, those that most steps take")


def fastest(device: torch.device) -> torch.dtype:
    """bfloat16, but float32 where a CPU has no instructions for it."""
    if device.type != "cpu":
        return torch.bfloat16
    times = {dtype: _product_s(dtype) for dtype in (torch.bfloat16, torch.float32)}
    return min(times, key=lambda dtype: times[dtype])


def _product_s(dtype: torch.dtype) -> float:
    """The quickest of some matrix products."""
    left, right = torch.ones(256, 768, dtype=dtype), torch.ones(768, 768, dtype=dtype)
    times = []
    for _ in range(5):
        began = time.perf_counter()
        left @ right
        times.append(time.perf_counter() - began)
    return min(times)
