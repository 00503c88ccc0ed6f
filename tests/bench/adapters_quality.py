"""What speed costs in picture under the adapters that ship: SSIM and PSNR in the masks' boxes.

``reuse``: the engine reuses templates recorded with and without a LoRA, against itself in full under it; PEFT applies
the LoRA to the engine's modules. ``bounded``: diffusers' pipeline gets the LoRA after K steps, against one that has it
from the first, and K is judged by other edits. ``stale``: residuals of the ControlNet are kept for some steps or are
those of the step before.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from diffusers import FluxControlNetModel, FluxFillPipeline
from torch import nn

from giornata_denoiser.engine.sources import ReuseOptions
from giornata_denoiser.rows.row import RecordingSpec
from giornata_prepost.images.pictures import Pixels
from giornata_tools.checkout import TRAINED
from giornata_tools.joining.shares import Tried, joins_within
from giornata_tools.model.adapters import card, judging, silhouettes
from giornata_tools.model.adapters.looks import swapped_caption
from giornata_tools.model.painting import controlled, edits, fill_pipeline
from giornata_tools.model.scenes import Scene
from giornata_tools.quality import metrics
from giornata_tools.quality.cases import Case
from tests.bench.compute.bench_model import BenchModel, Request, box_of
from tests.bench.compute.setting import DEFAULT
from tests.bench.reporting.report import write
from tests.flags import Several, option, parsed

LORAS: Final = ("outlined", "swapped")
PARTS: Final = ("reuse", "bounded", "stale")
JOINS: Final = (1, 2, 3, 4, 6, 8, 10)
KEPT: Final = (2, 3, 4, 7)
OTHERS: Final = 40
"""Edits that judge K and did not choose it."""

Line = dict[str, Any]
Residuals = tuple[list[torch.Tensor] | None, list[torch.Tensor] | None]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write ``out/bench/adapters_quality.json``."""
    options = parsed(
        __doc__,
        [
            option("--parts", type=Several(str), default=list(PARTS), help="of reuse, bounded, stale"),
            option("--limit", type=int, default=8, help="held-out edits of 128 pixels"),
            option("--steps", type=int, default=judging.STEPS),
            option("--threads", type=int, default=1),
        ],
        arguments,
    )
    torch.set_num_threads(options.threads)
    lines: list[Line] = []
    for part in options.parts:
        for line in MEASURES[part](options.limit, options.steps):
            lines.append(line)
            print(line, flush=True)
    write("adapters_quality", lines, workload=vars(options) | DEFAULT.as_dict())


def reuse(limit: int, steps: int) -> Iterator[Line]:
    """Every LoRA: no LoRA at all, and templates recorded with and without it."""
    for name in LORAS:
        yield from _reuse(name, limit, steps)


def _reuse(name: str, limit: int, steps: int) -> Iterator[Line]:
    model = BenchModel(TRAINED, steps=steps, guidance=judging.GUIDANCE)
    network: Any = model.family.network
    lora = _applied(network.transformer, name)
    requests = [
        Request(case.slot.name, case.scene.before, np.asarray(case.scene.mask), prompt, case.slot.index)
        for case in judging.additions(limit)
        for prompt in [_asked(name, case.scene.caption)]
    ]
    boxes = [box_of(request.mask) for request in requests]
    full = [model.edit(request, DEFAULT.halo) for request in requests]
    truth = [model.decode(row) for row in model.run(full)]
    with _without(lora):
        plain = [model.decode(row) for row in model.run(full)]
    yield _line("reuse", f"{name}: no LoRA at all", plain, truth, boxes)
    recording = RecordingSpec(frozenset({DEFAULT.form}), DEFAULT.bits)
    for label in ("with", "without"):
        with _without(lora, acts=label == "with"):
            templates = [model.template(request, recording, DEFAULT.levels) for request in requests]
        rows = [
            replace(row, region=model.region(request, DEFAULT.halo), template=template)
            for request, row, template in zip(requests, full, templates, strict=True)
        ]
        for bits in (DEFAULT.correction_bits, None):
            pictures = [model.decode(row) for row in model.run(rows, ReuseOptions(correction_bits=bits))]
            corrected = "not corrected" if bits is None else "corrected"
            yield _line("reuse", f"{name}: template {label} it, {corrected}", pictures, truth, boxes)


def bounded(limit: int, steps: int) -> Iterator[Line]:
    """Every LoRA: how alike pictures stay whose LoRA acts after some steps alone; then, at the K that follows, others.

    K is chosen as the profiler chooses it, with the scenes' own captions, and judged by edits that did not choose it.
    """
    cases = judging.additions(limit)
    known = {case.slot.name for case in cases}
    others = [case for case in judging.additions(limit + OTHERS) if case.slot.name not in known][:OTHERS]
    for name in LORAS:
        one, pipeline = card.read(name), fill_pipeline(TRAINED)
        pipeline.load_lora_weights(one.file.parent, weight_name=one.file.name, adapter_name=name)
        tried: list[Tried] = []
        for line, seen in _late(pipeline, name, cases, steps, JOINS):
            tried.append(seen)
            yield line
        chosen = round(joins_within(tried) * steps)
        for line, _ in _late(pipeline, name, others, steps, [chosen] if chosen else []):
            yield {**line, "what": f"{name}: at its K, {len(others)} others"}


def _late(
    pipeline: FluxFillPipeline, name: str, cases: Sequence[Case], steps: int, joins: Sequence[int]
) -> Iterator[tuple[Line, Tried]]:
    """Edits whose LoRA joins after each of `joins` steps, beside those that have it from the first."""
    scenes, seeds = [case.scene for case in cases], [case.slot.index for case in cases]
    prompts = [scene.caption for scene in scenes]
    how = {**judging.OPTIONS, "num_inference_steps": steps}
    boxes = [box_of(scene.mask) for scene in scenes]

    def made(step: int) -> list[Pixels]:
        pictures: list[Pixels] = []
        for first in range(0, len(scenes), judging.AT_ONCE):
            part = slice(first, first + judging.AT_ONCE)
            given = {**how, "seeds": seeds[part], "prompts": prompts[part]}
            pictures += _joined(pipeline, scenes[part], step, given)
        return pictures

    truth = made(0)
    for step in joins:
        pictures = made(step)
        ssims = tuple(metrics.ssim(*one) for one in zip(pictures, truth, boxes, strict=True))
        line = _line("bounded", f"{name}: after {step} steps", pictures, truth, boxes)
        yield {**line, "K": step}, Tried(step, steps, ssims)


def _joined(
    pipeline: FluxFillPipeline, scenes: Sequence[Scene], joins: int, how: dict[str, Any]
) -> list[Pixels]:
    """Edits whose LoRA is switched on when `joins` steps are done."""

    def switch(pipe: FluxFillPipeline, step: int, _time: object, _given: object) -> dict[str, Any]:
        if step + 1 == joins:
            pipe.transformer.enable_adapters()
        return {}

    if joins:
        pipeline.transformer.disable_adapters()
    else:
        pipeline.transformer.enable_adapters()
    return edits(pipeline, scenes, **how, callback_on_step_end=switch)


def stale(limit: int, steps: int) -> Iterator[Line]:
    """Residuals kept for some steps; those of the step before (Katz, ATC '25, §5)."""
    pipeline, scenes = fill_pipeline(TRAINED), silhouettes.held_out(limit)
    net = FluxControlNetModel.from_pretrained(card.read("outline").file.parent, dtype=torch.float32).eval()
    images = [silhouettes.control_image(scene.asked, len(scene.mask)) for scene in scenes]
    boxes = [box_of(scene.mask) for scene in scenes]
    options = {**judging.OPTIONS, "num_inference_steps": steps}

    def painted(computes: nn.Module) -> list[Pixels]:
        with torch.inference_mode(), controlled(pipeline, computes, images):
            return edits(pipeline, scenes, range(limit), **options)

    truth = painted(net)
    plain = edits(pipeline, scenes, range(limit), **options)
    ways: dict[str, nn.Module | None] = {"no ControlNet": None, "the step before's": Before(net)}
    ways |= {f"kept for {n} steps": Kept(net, n) for n in KEPT}
    for label, computes in ways.items():
        pictures = plain if computes is None else painted(computes)
        overlaps = [silhouettes.overlap(*pair) for pair in zip(pictures, scenes, strict=True)]
        yield {**_line("stale", label, pictures, truth, boxes), "overlap": judging.mean(overlaps)}
    overlaps = [silhouettes.overlap(*pair) for pair in zip(truth, scenes, strict=True)]
    yield {**_line("stale", "each step's own", truth, truth, boxes), "overlap": judging.mean(overlaps)}


class Kept(nn.Module):
    """A ControlNet that computes one step in `steps`, and answers the others with what it has."""

    def __init__(self, net: FluxControlNetModel, steps: int) -> None:
        super().__init__()
        self._net, self._steps, self._step = net, steps, 0
        self._last: Residuals = None, None

    def forward(self, **given: Any) -> Residuals:
        """As the ControlNet."""
        if self._step % self._steps == 0:
            self._last = self._net(**given)
        self._step += 1
        return self._last


class Before(nn.Module):
    """A ControlNet that answers with the residuals of the step before; in the first step with its own."""

    def __init__(self, net: FluxControlNetModel) -> None:
        super().__init__()
        self._net = net
        self._last: Residuals | None = None

    def forward(self, **given: Any) -> Residuals:
        """As the ControlNet."""
        now: Residuals = self._net(**given)
        answer, self._last = self._last or now, now
        return answer


def _applied(transformer: nn.Module, name: str) -> Any:
    """`transformer` with the LoRA injected into its modules."""
    one = card.read(name)
    network: Any = transformer
    network.load_lora_adapter(
        FluxFillPipeline.lora_state_dict(one.file), prefix="transformer", adapter_name=name
    )
    return network


@contextmanager
def _without(lora: Any, *, acts: bool = False) -> Iterator[None]:
    if not acts:
        lora.disable_adapters()
    try:
        yield
    finally:
        lora.enable_adapters()


def _asked(name: str, caption: str) -> str:
    return swapped_caption(caption) if name == "swapped" else caption


def _line(
    part: str,
    what: str,
    pictures: Sequence[Pixels],
    truth: Sequence[Pixels],
    boxes: Sequence[np.ndarray],
) -> Line:
    scores = [metrics.ssim(*one) for one in zip(pictures, truth, boxes, strict=True)]
    peaks = [metrics.psnr_db(*one) for one in zip(pictures, truth, boxes, strict=True)]
    return {
        "part": part,
        "what": what,
        "SSIM": round(statistics.mean(scores), 4),
        "least": round(min(scores), 4),
        "PSNR dB": round(statistics.mean(peaks), 2),
    }


MEASURES: Final = {"reuse": reuse, "bounded": bounded, "stale": stale}

if __name__ == "__main__":
    main()
