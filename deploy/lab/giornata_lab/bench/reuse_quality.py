"""What reuse costs in picture and gains in time: held-out edits with production's masks, beside full computation.

Answers are compared with those that `reuse=off` gives for the same seed, and beside reuse stand TeaCache, one like
FISEdit, and another seed in full. With ``--beside full`` what the model paints is compared, with the noise of reuse.
`tokens of full` counts tokens and no time: what a form costs to load, or `hidden` to project again, is not in it.
`full ÷` is processor time of denoising, one edit at a time; its spread is over edits.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import click
import numpy as np
import torch

from giornata.families import Family
from giornata.planning.cost_model import refresh_interval, refresh_offset
from giornata.wire.models import Sampler
from giornata_denoiser.choices import EXACT, CacheForm
from giornata_denoiser.config import DenoiserConfig
from giornata_denoiser.engine.step_plan import ReuseOptions
from giornata_denoiser.rows.row import RecordingSpec, Row
from giornata_denoiser.rows.template import CachedTemplate
from giornata_denoiser.templates.runs import form_of, levels_of
from giornata_lab.bench.compute.bench_model import (
    BenchModel,
    Request,
    TeaCache,
    TeaCachePolynomial,
    calibrate,
    fisedit_like,
    held_out,
    with_teacache,
)
from giornata_lab.bench.compute.engines import BenchSetting, Teacher
from giornata_lab.bench.compute.rows import changed
from giornata_lab.bench.harness import compared, write
from giornata_lab.flags import option, parsed
from giornata_lab.quality import metrics
from giornata_prepost.images.masks import effective_alpha, paste
from giornata_prepost.images.pictures import Pixels
from giornata_tools.lora_profiler.probes import box_of
from giornata_tools.lora_profiler.profiler import ssim

MODEL: Final = Path("deploy/model/fresco")
STEPS: Final = 20
KEPT_FOR: Final = DenoiserConfig.renew_steps
ANYWHERE: Final = 1.0
"""Tolerance of noise levels."""
TEACACHE: Final = (0.03, 0.1, 0.25)
"""SD.Next's port names the last one for Flux; on the model that ships it computes 3 steps of 20."""
FISEDIT: Final = (0.1, 0.3)
"""Shares of the largest difference."""
FIRST_STEPS: Final = 4
"""Steps in full by which one like FISEdit finds its tokens."""
CALIBRATED: Final = 5
"""TeaCache's polynomial is fitted to so many held-out edits, less those that are measured."""
EditScores = dict[str, float]
"""Columns of the table, of one edit."""
EditWay = tuple[dict[str, Any], Callable[["Comparison"], EditScores]]
"""A row's first columns, and how an edit is made for it."""


def settings(default: BenchSetting, model: BenchModel) -> list[BenchSetting]:
    """Hits by whom they are corrected, hits that are not, the other form where there are two, and misses."""
    found = [replace(default, teacher=teacher) for teacher in Teacher]
    found.append(replace(default, corrected=False))
    other = DenoiserConfig(model="any", template_form=CacheForm.HIDDEN)
    if form_of(other, model.family) is CacheForm.HIDDEN:
        found.append(replace(default, form=CacheForm.HIDDEN))
    return [*found, replace(default, renewed_every=refresh_interval(model.steps, KEPT_FOR))]


class TimedRow(NamedTuple):
    """A row when it is done, the picture of it, and the processor time of its denoising."""

    row: Row
    picture: Pixels
    ms: float


class Comparison:
    """One edit in full and, beside it, by other means.

    Args:
        model: that computes all of them.
        request: the edit.
        prompt: of another edit, by which an earlier one may have been made.
        off: compare answers, with what `reuse=off` gives for the same seed; else pictures, with the noise of reuse.
    """

    def __init__(self, model: BenchModel, request: Request, prompt: str, *, off: bool) -> None:
        self._model, self._request, self._off = model, request, off
        other = replace(request, seed=request.seed + 1000)
        self._teachers = {Teacher.SEED: other, Teacher.PROMPT: replace(other, prompt=prompt)}
        self._full: dict[int | None, TimedRow] = {}
        self._templates: dict[CacheForm, CachedTemplate] = {}
        began = time.process_time()
        self._plain = model.edit(request, None)
        model.decode(self._plain)
        self._coding_ms = (time.process_time() - began) * 1e3

    def reused(self, switches: BenchSetting) -> EditScores:
        """With a template, or without as a miss."""
        row, how = self._row(self._request, switches), ReuseOptions(correction_bits=switches.correction_bits)
        if (teacher := self._teachers.get(switches.teacher)) and switches.corrected:
            known = self._model.begun(self._row(teacher, switches), 1, how)
            row = changed(row, corrections=known.reuse.corrections)
        made = self._timed(lambda: self._model.run([row], how)[0])
        noise = None if self._off else switches.halo
        return self._scored(made, _cost(row, switches), row.reuse.template, noise)

    def teacache(self, polynomial: TeaCachePolynomial, threshold: float) -> EditScores:
        """Compute the edit by TeaCache's rule."""
        rule, row = TeaCache(polynomial, threshold), self._plain
        model = with_teacache(self._model, rule)
        made = self._timed(lambda: model.run([row])[0])
        return self._scored(made, rule.computed / row.steps)

    def fisedit_like(self, threshold: float) -> EditScores:
        """With the exact keys and values of a run of its own noise and steps: what FISEdit has of an earlier edit."""
        row, template = self._plain, self._earlier_run
        made = self._timed(lambda: fisedit_like(self._model, row, template, threshold, FIRST_STEPS))
        text, first = row.inputs.prompts[0].joint_tokens, FIRST_STEPS / row.steps
        masked = (text + made.row.computed_tokens) / (text + row.image_tokens)
        return self._scored(made, first + (1 - first) * masked, template)

    def other_seed(self) -> EditScores:
        """With another seed, in full: how far apart pictures of one request are anyway."""
        row = self._model.edit(self._teachers[Teacher.SEED], None)
        return self._scored(self._timed(lambda: self._model.run([row])[0]), 1.0)

    @cached_property
    def _earlier_run(self) -> CachedTemplate:
        recording, noise = (
            RecordingSpec(frozenset({CacheForm.KV}), EXACT),
            self._plain.inputs.conditioning["noise"],
        )
        return self._model.template(self._request, recording, self._model.steps, noise=noise)

    def _row(self, request: Request, switches: BenchSetting) -> Row:
        model, every = self._model, switches.renewed_every
        own_noise = self._off and every  # as a miss has it
        row = changed(
            model.edit(request, None if own_noise else switches.halo),
            region=model.region(request, switches.halo),
            keeps_padding=switches.keeps_padding,
        )
        if every:
            return changed(row, renewed_every=every, renewed_later=refresh_offset(0, model.steps, every))
        if switches.form not in self._templates:
            recording = RecordingSpec(frozenset({switches.form}), switches.bits)
            self._templates[switches.form] = model.template(self._request, recording, switches.levels)
        return changed(row, template=self._templates[switches.form], tolerance=ANYWHERE)

    def _timed(self, run: Callable[[], Row]) -> TimedRow:
        """Its picture is the answer, or what the model painted for it."""
        began = time.process_time()
        done = run()
        ms = (time.process_time() - began) * 1e3
        picture, request = self._model.decode(done), self._request
        if self._off:
            picture = paste(request.image, effective_alpha(request.mask, 0, None), picture)
        return TimedRow(done, picture, ms)

    def _in_full(self, halo: int | None) -> TimedRow:
        """With the noise of this halo; None: its own."""
        if halo not in self._full:
            row = self._plain if halo is None else self._model.edit(self._request, halo)
            self._full[halo] = self._timed(lambda: self._model.run([row])[0])
        return self._full[halo]

    def _scored(
        self, made: TimedRow, tokens: float, template: CachedTemplate | None = None, halo: int | None = None
    ) -> EditScores:
        full, box = self._in_full(halo), box_of(self._request.mask)
        return {
            "KiB": template.size_bytes / 1024 if template else 0.0,
            "SSIM box": ssim(made.picture, full.picture, box),
            "PSNR box": metrics.psnr_db(made.picture, full.picture, box),
            "SSIM": ssim(made.picture, full.picture, np.ones_like(box)),
            "tokens of full": tokens,
            "full ms": full.ms,
            "own ms": made.ms,
            "coding ms": self._coding_ms,
        }


def _named(switches: BenchSetting) -> dict[str, Any]:
    own = switches.renewed_every
    return {
        "form": f"own, every {own}" if own else str(switches.form),
        "bits": switches.bits or 32,
        "levels": "" if own else switches.levels,
        "halo": switches.halo,
        "corrected": str(switches.teacher) if switches.corrected and not own else "",
    }


def _summary(edits: Sequence[EditScores]) -> dict[str, Any]:
    """Means over edits, and how far they spread; ratios are medians of each edit's own."""
    each = {name: [edit[name] for edit in edits] for name in edits[0]}
    inside, full, own, coding = (each[name] for name in ("SSIM box", "full ms", "own ms", "coding ms"))
    means = {name: round(statistics.mean(values), 4) for name, values in each.items()}
    whole = [(a + c) / (b + c) for a, b, c in zip(full, own, coding, strict=True)]
    spread = {"sd": round(statistics.pstdev(inside), 4), "least": round(min(inside), 4)}
    spread |= {"with coding": round(statistics.median(whole), 3)}
    return means | spread | compared("full ÷", full, own)


def _cost(row: Row, switches: BenchSetting) -> float:
    """Tokens that the edit computes, text included, over those of full computation; the same for every form."""
    text, padding, steps = row.inputs.prompts[0].joint_tokens, row.padding[0], row.steps
    full, masked = text + row.image_tokens, text + row.computed_tokens
    if switches.renewed_every:
        whole = math.ceil(steps / switches.renewed_every)
    else:
        whole = int(switches.corrected and switches.teacher is Teacher.ITSELF)
    # The first step computes the padding, whatever else.
    tokens = whole * full + (steps - whole) * masked - (steps - max(1, whole)) * padding
    return tokens / (steps * full)


def ways(
    model: BenchModel, polynomial: TeaCachePolynomial | None, switches: Sequence[BenchSetting]
) -> list[EditWay]:
    """Reuse by `switches`, another seed and, where its polynomial is known, TeaCache and one like FISEdit."""
    found: list[EditWay] = [(_named(each), partial(Comparison.reused, switches=each)) for each in switches]
    empty = dict.fromkeys(found[0][0], "")
    found.append(({**empty, "form": "off, another seed"}, Comparison.other_seed))
    if polynomial is not None:
        for threshold in TEACACHE:
            tea = partial(Comparison.teacache, polynomial=polynomial, threshold=threshold)
            found.append(({**empty, "form": f"TeaCache, {threshold}"}, tea))
        for threshold in FISEDIT:
            name = {**empty, "form": f"like FISEdit, {threshold}", "bits": 32, "levels": model.steps}
            found.append((name, partial(Comparison.fisedit_like, threshold=threshold)))
    return found


def main() -> None:
    """Print the table and write ``out/bench/reuse_quality.json``."""
    options = parsed(
        __doc__,
        [
            option("--model", type=Path, default=MODEL),
            option("--limit", type=int, default=12, help="held-out edits"),
            option("--seeds", type=int, default=1, help="of each edit"),
            option("--side", type=int, default=256, help="of the pictures: 128 or 256"),
            option("--guidance", type=float, help="scale; default the checkpoint's own"),
            option(
                "--sampler", type=click.Choice(list(Sampler)), help="of edits; default the checkpoint's own"
            ),
            option("--steps", type=int, default=STEPS),
            option("--beside", type=click.Choice(["off", "full"]), default="off", help="with which noise"),
        ],
    )
    torch.set_num_threads(1)
    drawn, off = held_out(options.side, options.limit), options.beside == "off"
    requests = [replace(each, seed=each.seed + 10_000 * k) for k in range(options.seeds) for each in drawn]
    sampler = None if options.sampler is None else Sampler(options.sampler)
    model = BenchModel(options.model, steps=options.steps, guidance=options.guidance, sampler=sampler)
    workload = {"edits": len(drawn), "seeds": options.seeds, "side": options.side, "beside": options.beside}
    workload |= {"mask ratio": round(float(np.mean([each.mask.mean() for each in drawn])), 3)}
    workload |= {"steps": model.steps, "guidance": model.guidance, "sampler": model.sampler}
    tea, names = None, {each.name for each in drawn}
    if off and model.checkpoint.card.family == Family.FLUX_FILL:
        others = [each for each in held_out(options.side, CALIBRATED) if each.name not in names]
        tea = calibrate(model, (model.edit(each, None) for each in others))
    workload["TeaCache"] = tea and tea._asdict()
    levels = levels_of(DenoiserConfig(model="any"), model.family)
    table = [
        (*way, list[EditScores]()) for way in ways(model, tea, settings(BenchSetting(levels=levels), model))
    ]
    for request, other in zip(requests, (*requests[1:], requests[0]), strict=True):
        comparison = Comparison(model, request, other.prompt, off=off)
        for _, way, edits in table:
            edits.append(way(comparison))
        latest = [(round(edits[-1]["SSIM box"], 3), round(edits[-1]["own ms"])) for *_, edits in table]
        print(request.name, request.seed, latest, flush=True)
    rows = [{**name, **_summary(edits)} for name, _, edits in table]
    write("reuse_quality", rows, workload=workload)


if __name__ == "__main__":
    main()
