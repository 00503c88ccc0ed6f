"""What speed costs in picture under the adapters that ship: SSIM and PSNR in the masks' boxes.

``reuse``: the engine takes from templates, against itself in full, under each LoRA and under the ControlNet; beside
templates that are recorded under the LoRA. ``residuals``: ways to make what the ControlNet adds to edits that reuse,
against computing it in each step. ``bounded``: diffusers' pipeline gets the LoRA after K steps, against one that has it
from the first, and K is judged by other edits.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from diffusers import FluxFillPipeline

from giornata_denoiser.controls.controlnets import ControlDispatcher
from giornata_denoiser.controls.local import HELD_STEPS, LocalControls
from giornata_denoiser.rows.row import Adapters, RowLora
from giornata_lab.bench.compute.adapted import LORAS, AdaptedBenchModel, Edits, Way
from giornata_lab.bench.compute.bench_model import Request, box_of
from giornata_lab.bench.compute.setting import DEFAULT
from giornata_lab.bench.reporting.report import write
from giornata_lab.flags import Several, option, parsed
from giornata_lab.model.adapters import card, judging, lessons
from giornata_lab.model.adapters.lessons import swapped_caption
from giornata_lab.model.painting import edits, fill_pipeline
from giornata_lab.model.scenes import Scene
from giornata_lab.quality import metrics
from giornata_lab.quality.cases import QualityCase
from giornata_prepost.images.pictures import Pixels
from giornata_tools.checkout import TRAINED
from giornata_tools.lora_profiler.profiler import JoinStepTrial, joins_within, ssim

PARTS: Final = ("reuse", "residuals", "bounded")
JOINS: Final = (1, 2, 3, 4, 6, 8, 10)
OTHERS: Final = 40
"""Edits that judge K and did not choose it."""

Line = dict[str, Any]


def here(held_steps: int) -> Way:
    """This process computes ControlNets, each time for so many steps."""
    return lambda nets, network: ControlDispatcher(LocalControls(nets, network, held_steps), None)


EACH: Final = "each step's own"
WAYS: Final[Mapping[str, Way]] = {
    EACH: here(1),
    "held for 2 steps": here(2),
    "held for 4 steps": here(4),
}
"""Ways to make what ControlNets add. The first is what the others are compared with."""
SERVED: Final = f"held for {HELD_STEPS} steps"
"""What a denoiser does by default."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write ``out/bench/adapters_quality.json``."""
    options = parsed(
        __doc__,
        [
            option("--parts", type=Several(str), default=list(PARTS), help="of reuse, residuals, bounded"),
            option("--limit", type=int, default=12, help="held-out edits of 128 pixels"),
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
    """Edits from templates, against the same edits in full: under each LoRA and under the ControlNet."""
    model = AdaptedBenchModel(steps)
    for name in LORAS:
        yield from _under_lora(model, name, limit)
    yield from _under_control(model, limit)


def _under_lora(model: AdaptedBenchModel, name: str, limit: int) -> Iterator[Line]:
    """Templates as the product records them, and recorded under the LoRA."""
    requests = [
        _request(case.slot.name, case.scene, _asked(name, case.scene.caption), case.slot.index)
        for case in judging.additions(limit)
    ]
    plain, adapters = model.edits(requests), Adapters((RowLora(name),))
    under, boxes = plain.under(adapters), _boxes(plain)
    without, truth = model.painted(plain), model.painted(under)
    templates = model.templates(plain)
    taken = model.painted(model.reusing(plain, templates))
    yield _line("reuse", "no adapter: reuse against full", taken, without, boxes)
    yield _line("reuse", f"{name}: in full without it", without, truth, boxes)
    for label, recorded in (("", templates), (", template under it", model.templates(plain, adapters))):
        for corrected in (True, False):
            pictures = model.painted(model.reusing(under, recorded), corrected=corrected)
            what = f"{name}: reuse{label}{'' if corrected else ', not corrected'}"
            yield _line("reuse", what, pictures, truth, boxes)


def _under_control(model: AdaptedBenchModel, limit: int) -> Iterator[Line]:
    """In full, what the ControlNet adds is computed in each step."""
    plain, under, scenes = _outlined(model, limit)
    boxes, templates = _boxes(plain), model.templates(plain)
    without, truth = model.painted(plain), model.painted(under, WAYS[EACH])
    taken = model.painted(model.reusing(plain, templates))
    yield _overlapping(_line("reuse", "no adapter: reuse against full", taken, without, boxes), taken, scenes)
    yield _overlapping(_line("reuse", "outline: in full without it", without, truth, boxes), without, scenes)
    masked = model.reusing(under, templates)
    for name in (EACH, SERVED):
        pictures = model.painted(masked, WAYS[name])
        line = _line("reuse", f"outline: reuse, {name}", pictures, truth, boxes)
        yield _overlapping(line, pictures, scenes)


def residuals(limit: int, steps: int) -> Iterator[Line]:
    """Each way to make residuals, all with reuse."""
    model = AdaptedBenchModel(steps)
    plain, under, scenes = _outlined(model, limit)
    boxes, templates = _boxes(plain), model.templates(plain)
    masked = model.reusing(under, templates)
    truth = model.painted(masked, WAYS[EACH])
    ways: dict[str, list[Pixels]] = {"no ControlNet": model.painted(model.reusing(plain, templates))}
    ways |= {name: model.painted(masked, way) for name, way in WAYS.items() if name != EACH}
    for name, pictures in (*ways.items(), (EACH, truth)):
        yield _overlapping(_line("residuals", name, pictures, truth, boxes), pictures, scenes)


def _outlined(model: AdaptedBenchModel, limit: int) -> tuple[Edits, Edits, list[Scene]]:
    """Edits of the scenes that the ControlNet is judged by, without it and under it."""
    scenes = lessons.held_out(limit)
    plain = model.edits(
        [_request(str(index), scene, scene.caption, index) for index, scene in enumerate(scenes)]
    )
    images = [lessons.control_image(scene.asked, len(scene.mask)) for scene in scenes]
    return plain, model.controlled(plain, images), scenes


def _request(name: str, scene: Scene, prompt: str, seed: int) -> Request:
    return Request(name, scene.before, np.asarray(scene.mask), prompt, seed)


def _boxes(of: Edits) -> list[np.ndarray]:
    return [box_of(request.mask) for request in of.requests]


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
        tried: list[JoinStepTrial] = []
        for line, seen in _late(pipeline, name, cases, steps, JOINS):
            tried.append(seen)
            yield line
        chosen = round(joins_within(tried) * steps)
        for line, _ in _late(pipeline, name, others, steps, [chosen] if chosen else []):
            yield {**line, "what": f"{name}: at its K, {len(others)} others"}


def _late(
    pipeline: FluxFillPipeline, name: str, cases: Sequence[QualityCase], steps: int, joins: Sequence[int]
) -> Iterator[tuple[Line, JoinStepTrial]]:
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
        ssims = tuple(ssim(*one) for one in zip(pictures, truth, boxes, strict=True))
        line = _line("bounded", f"{name}: after {step} steps", pictures, truth, boxes)
        yield {**line, "K": step}, JoinStepTrial(step, steps, ssims)


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


def _asked(name: str, caption: str) -> str:
    return swapped_caption(caption) if name == "swapped" else caption


def _line(
    part: str,
    what: str,
    pictures: Sequence[Pixels],
    truth: Sequence[Pixels],
    boxes: Sequence[np.ndarray],
) -> Line:
    scores = [ssim(*one) for one in zip(pictures, truth, boxes, strict=True)]
    peaks = [metrics.psnr_db(*one) for one in zip(pictures, truth, boxes, strict=True)]
    return {
        "part": part,
        "what": what,
        "SSIM": round(statistics.median(scores), 4),
        "mean": round(statistics.mean(scores), 4),
        "worst": round(min(scores), 4),
        "PSNR dB": round(statistics.median(peaks), 2),
        "overlap": "",
        "K": "",
    }


def _overlapping(line: Line, pictures: Sequence[Pixels], scenes: Sequence[Scene]) -> Line:
    """The line with how well what is painted keeps to the outline."""
    overlaps = [lessons.overlap(*pair) for pair in zip(pictures, scenes, strict=True)]
    return {**line, "overlap": judging.mean(overlaps)}


MEASURES: Final = {"reuse": reuse, "residuals": residuals, "bounded": bounded}

if __name__ == "__main__":
    main()
