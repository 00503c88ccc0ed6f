"""What speed costs in picture, on the model that ships: reuse at its default setting beside the first-block cache.

Each is compared with the same computation without it: reuse with the engine in full and the same noise, the cache with
diffusers' own `FluxFillPipeline`. SSIM and PSNR are those of the mask's box. Every switch of reuse: `reuse_quality`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, TypeVar

import click
import numpy as np
import torch
from diffusers import FluxFillPipeline
from diffusers.hooks import FirstBlockCacheConfig
from PIL import Image

from giornata_denoiser.rows.row import RecordingSpec
from giornata_prepost.images.geometry import Size
from giornata_prepost.images.pictures import Pixels
from giornata_tools.quality import metrics
from tests.bench.compute.bench_model import BenchModel, Request, box_of, held_out
from tests.bench.compute.setting import DEFAULT
from tests.bench.compute.static_batching import skipped_share
from tests.bench.reporting.options import wait_for
from tests.bench.reporting.report import write
from tests.flags import Several, option, parsed

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
            option("--thresholds", type=Several(float), default=[0.05, 0.1, 0.2], help="of the cache"),
            option("--device", default="cpu"),
            option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32"),
            option("--threads", type=int, default=2),
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
    lines = [_reuse(model, requests), *_first_block_cache(model, requests, options.thresholds)]
    write("pictures", lines, workload={**vars(options), "model": options.model.name, **DEFAULT.as_dict()})


def _reuse(model: BenchModel, requests: Sequence[Request]) -> dict[str, Any]:
    recording = RecordingSpec(frozenset({DEFAULT.form}), DEFAULT.bits)
    templates = [model.template(request, recording, DEFAULT.levels) for request in requests]
    full = [model.edit(request, DEFAULT.halo) for request in requests]
    masked = [
        replace(row, region=model.region(request, DEFAULT.halo), template=template)
        for request, row, template in zip(requests, full, templates, strict=True)
    ]
    device = model.family.device
    slow, slow_s = _timed(lambda: model.run(full), device)
    fast, fast_s = _timed(lambda: model.run(masked), device)
    size = statistics.mean(template.size_bytes for template in templates) / 1024
    pictures = [[model.decode(row) for row in rows] for rows in (fast, slow)]
    return _line("ours, reuse", slow_s / fast_s, requests, pictures, kib=round(size), skipped="")


def _first_block_cache(
    model: BenchModel, requests: Sequence[Request], thresholds: Sequence[float]
) -> list[dict[str, Any]]:
    diffusers = Diffusers(model)

    def every() -> list[Pixels]:
        return [diffusers.edited(request) for request in requests]

    device = model.family.device
    slow, slow_s = _timed(every, device)
    lines = []
    for threshold in thresholds:
        diffusers.transformer.enable_cache(FirstBlockCacheConfig(threshold=threshold))
        fast, fast_s = _timed(every, device)
        share = skipped_share(diffusers.transformer, every)
        diffusers.transformer.disable_cache()
        name = f"first-block cache, {threshold}"
        lines.append(_line(name, slow_s / fast_s, requests, [fast, slow], kib="", skipped=f"{share:.0%}"))
    return lines


def _timed(run: Callable[[], list[T]], device: torch.device) -> tuple[list[T], float]:
    """What `run` returns, and the seconds of its second call on `device`: the first one warms up."""
    run()
    wait_for(device)
    began = time.perf_counter()
    found = run()
    wait_for(device)
    return found, time.perf_counter() - began


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
    scores = [metrics.ssim(a, b, box) for a, b, box in zip(fast, slow, boxes, strict=True)]
    peaks = [metrics.psnr_db(a, b, box) for a, b, box in zip(fast, slow, boxes, strict=True)]
    return {
        "system": name,
        "ratio": round(ratio, 3),
        "SSIM": round(statistics.mean(scores), 4),
        "least": round(min(scores), 4),
        "PSNR dB": round(statistics.mean(peaks), 2),
        "KiB a template": kib,
        "steps skipped": skipped,
        "note": "slower than in full" if ratio < 1 else "",
    }


if __name__ == "__main__":
    main()
