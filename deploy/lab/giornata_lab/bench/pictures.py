"""What speed costs in picture, on the model that ships: reuse at its default setting, and step caches beside it.

Each is compared with the same computation in full: ours with the engine's and the same noise, diffusers' caches with
its own `FluxFillPipeline`. SSIM and PSNR are those of the mask's box. Every switch of reuse: `reuse_quality`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, TypeVar

import click
import numpy as np
import torch
from diffusers import FluxFillPipeline, TaylorSeerCacheConfig
from PIL import Image

from giornata.wire.models import WARMUP, TaylorSeerSchedule
from giornata_denoiser.engine.model_runner import StepReport
from giornata_denoiser.rows.row import RecordingSpec
from giornata_denoiser.rows.step_cache import TaylorRule
from giornata_lab.bench.compute.bench_model import BenchModel, Request, box_of, held_out
from giornata_lab.bench.compute.engines import DEFAULT
from giornata_lab.bench.harness import wait_for, write
from giornata_lab.flags import Several, option, parsed
from giornata_lab.quality import metrics
from giornata_prepost.images.geometry import Size
from giornata_prepost.images.pictures import Pixels
from giornata_tools.lora_profiler.profiler import ssim

MODEL: Final = Path("deploy/model/fresco")
T = TypeVar("T")


def options_of(arguments: Sequence[str] | None = None) -> SimpleNamespace:
    """Flags."""
    return parsed(
        __doc__,
        [
            option("--model", type=Path, default=MODEL),
            option("--limit", type=int, default=8, help="held-out edits"),
            option("--side", type=int, default=256, help="of the pictures: 128 or 256"),
            option("--steps", type=int, default=20),
            option("--guidance", type=float, default=30.0),
            option(
                "--taylorseer",
                type=Several(str),
                default=["5/1", "3/1"],
                help="interval/order of each setting; three first steps are computed",
            ),
            option("--device", default="cpu"),
            option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32"),
            option("--threads", type=int, default=2),
            option(
                "--processor-time", is_flag=True, help="on a CPU that others share; else times are wall time"
            ),
        ],
        arguments,
    )


class Diffusers:
    """The unmodified pipeline over the same modules, one edit a call."""

    def __init__(self, model: BenchModel) -> None:
        family: Any = model.checkpoint.family
        self.transformer = family.network.transformer
        kind: Any = FluxFillPipeline
        images: Any = model.images
        self._pipeline = kind(**{**images.pipeline.components, "transformer": self.transformer})
        self._pipeline.set_progress_bar_config(disable=True)
        self._model = model
        self._runs = 0

    def edited(self, request: Request) -> Pixels:
        """(height, width, 3) uint8."""
        height, width = request.mask.shape
        encoded = self._model.images.encode_text(request.prompt, Size(width, height))
        device = self.transformer.device
        text = {name: encoded[name].to(device) for name in ("prompt_embeds", "pooled_prompt_embeds")}
        self._runs += 1
        with self.transformer.cache_context(f"run {self._runs}"):
            (picture,) = self._pipeline(
                image=Image.fromarray(request.image),
                mask_image=Image.fromarray(request.mask.astype(np.uint8) * np.uint8(255)),
                height=height,
                width=width,
                num_inference_steps=self._model.steps,
                guidance_scale=self._model.guidance,
                generator=torch.Generator().manual_seed(request.seed),
                **{name: tensor[None] for name, tensor in text.items()},
            ).images
        return np.asarray(picture)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write ``out/bench/pictures.json``."""
    options = options_of(arguments)
    torch.set_num_threads(options.threads)
    requests = held_out(options.side, options.limit)
    model = BenchModel(
        options.model,
        steps=options.steps,
        guidance=options.guidance,
        device=options.device,
        dtype=getattr(torch, options.dtype),
    )
    caches = [_taylor(told) for told in options.taylorseer]
    timed = partial(
        _timed, model.family.device, time.process_time if options.processor_time else time.perf_counter
    )
    lines = [*_ours(model, requests, caches, timed), *_diffusers(model, requests, caches, timed)]
    write("pictures", lines, workload={**vars(options), "model": options.model.name, **DEFAULT.as_dict()})


def _taylor(told: str) -> TaylorRule:
    interval, order = map(int, told.split("/"))
    return TaylorRule(TaylorSeerSchedule(interval, WARMUP), order)


def _name(rule: TaylorRule | None) -> str:
    return "no cache" if rule is None else f"TaylorSeer, {rule.steps.interval}/{rule.order}"


def _ours(
    model: BenchModel, requests: Sequence[Request], caches: Sequence[TaylorRule], timed: Callable[..., Any]
) -> list[dict[str, Any]]:
    """Without reuse and with it, without a cache and with each."""
    recording = RecordingSpec(frozenset({DEFAULT.form}), DEFAULT.bits)
    templates = [model.template(request, recording, DEFAULT.levels) for request in requests]
    full = [model.edit(request, DEFAULT.halo) for request in requests]
    masked = [
        replace(row, region=model.region(request, DEFAULT.halo), template=template)
        for request, row, template in zip(requests, full, templates, strict=True)
    ]
    size = round(statistics.mean(template.size_bytes for template in templates) / 1024)
    slow, slow_s = timed(partial(model.run, full))
    wanted = [model.decode(row) for row in slow]
    lines = []
    for rows, what, kib in ((full, "in full", ""), (masked, "reuse", size)):
        for rule in (None, *caches):
            if rule is None and rows is full:
                continue
            cached = [replace(row, step_cache=rule) for row in rows]
            counted = [0, 0]
            count = partial(_count, counted)
            fast, fast_s = timed(partial(model.run, cached, told=count))
            pictures = [[model.decode(row) for row in fast], wanted]
            name = f"ours, {what}, {_name(rule)}"
            skipped = "" if rule is None else f"{counted[1] / sum(counted):.0%}"
            lines.append(_line(name, slow_s / fast_s, requests, pictures, kib=kib, skipped=skipped))
    return lines


def _count(blocks: list[int], report: StepReport) -> None:
    blocks[0] += report.cached.computed_blocks
    blocks[1] += report.cached.skipped_blocks


def _diffusers(
    model: BenchModel, requests: Sequence[Request], caches: Sequence[TaylorRule], timed: Callable[..., Any]
) -> list[dict[str, Any]]:
    diffusers = Diffusers(model)

    def every() -> list[Pixels]:
        return [diffusers.edited(request) for request in requests]

    transformer = diffusers.transformer
    slow, slow_s = timed(every)
    lines = []
    for rule in caches:
        transformer.enable_cache(_config(rule, model.family.dtype))
        fast, fast_s = timed(every)
        transformer.disable_cache()
        share = f"{rule.steps.skipped(model.steps) / model.steps:.0%}"
        pictures = [fast, slow]
        name = f"diffusers, {_name(rule)}"
        lines.append(_line(name, slow_s / fast_s, requests, pictures, kib="", skipped=share))
    return lines


def _config(rule: TaylorRule, dtype: torch.dtype) -> Any:
    return TaylorSeerCacheConfig(
        cache_interval=rule.steps.interval,
        disable_cache_before_step=rule.steps.warmup,
        max_order=rule.order,
        taylor_factors_dtype=dtype,
        use_lite_mode=True,
    )


def _timed(
    device: torch.device, clock: Callable[[], float], run: Callable[[], list[T]]
) -> tuple[list[T], float]:
    """Return what `run` returns, and the seconds of its second call on `device`: the first one warms up."""
    run()
    wait_for(device)
    began = clock()
    found = run()
    wait_for(device)
    return found, clock() - began


def _line(
    name: str,
    ratio: float,
    requests: Sequence[Request],
    pictures: Sequence[Sequence[Pixels]],
    *,
    kib: object,
    skipped: str,
) -> dict[str, Any]:
    boxes = [box_of(request.mask) for request in requests]
    fast, slow = pictures
    scores = [ssim(a, b, box) for a, b, box in zip(fast, slow, boxes, strict=True)]
    peaks = [metrics.psnr_db(a, b, box) for a, b, box in zip(fast, slow, boxes, strict=True)]
    return {
        "system": name,
        "ratio": round(ratio, 3),
        "SSIM": round(statistics.mean(scores), 4),
        "least": round(min(scores), 4),
        "PSNR dB": round(statistics.mean(peaks), 2),
        "KiB a template": kib,
        "blocks skipped": skipped,
        "note": "slower than in full" if ratio < 1 else "",
    }


if __name__ == "__main__":
    main()
