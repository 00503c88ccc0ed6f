"""What reuse costs in picture: accelerated against full computation, on held-out edits.

Full computation has the noise that reuse has, or with ``--beside off`` that of `reuse=off` with the same seed, so that
the last line tells what another seed is apart.
`tokens of full` counts tokens and no time: what a form costs to load, or `hidden` to project again, is not in it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
import torch
from numpy.typing import NDArray

from giornata.planning.cost_model import refresh_interval, refresh_offset
from giornata.wire.models import Sampler
from giornata_denoiser.choices import CacheForm
from giornata_denoiser.config import DenoiserConfig
from giornata_denoiser.engine.step_plan import ReuseOptions
from giornata_denoiser.rows.row import RecordingSpec, Row
from giornata_denoiser.rows.template import CachedTemplate
from giornata_denoiser.templates.identity import form_of, levels_of
from giornata_lab.bench.compute.bench_model import BenchModel, Request, held_out
from giornata_lab.bench.compute.engines import BenchSetting, Teacher
from giornata_lab.bench.compute.rows import changed
from giornata_lab.bench.harness import write
from giornata_lab.flags import option, parsed
from giornata_lab.quality import metrics
from giornata_prepost.images.pictures import Pixels
from giornata_tools.lora_profiler.probes import box_of
from giornata_tools.lora_profiler.profiler import ssim

MODEL: Final = Path("deploy/model/fresco")
STEPS: Final = 20
KEPT_FOR: Final = DenoiserConfig.renew_steps
ANYWHERE: Final = 1.0
"""Tolerance of noise levels."""


def settings(default: BenchSetting, model: BenchModel) -> list[BenchSetting]:
    """Hits by whom they are corrected, hits that are not, the other form where there are two, and misses."""
    found = [replace(default, teacher=teacher) for teacher in Teacher]
    found.append(replace(default, corrected=False))
    other = DenoiserConfig(model="any", template_form=CacheForm.HIDDEN)
    if form_of(other, model.family) is CacheForm.HIDDEN:
        found.append(replace(default, form=CacheForm.HIDDEN))
    return [*found, replace(default, renewed_every=refresh_interval(model.steps, KEPT_FOR))]


@dataclass(frozen=True, eq=False)
class Reference:
    """One edit computed in full, from the noise that reuse has."""

    request: Request
    picture: Pixels
    box: NDArray[np.bool_]


class Comparison:
    """Edits with reuse beside the same edits in full.

    Args:
        model: that computes both.
        requests: the edits.
        off: compare with what `reuse=off` gives for the same seed.
    """

    def __init__(self, model: BenchModel, requests: Sequence[Request], *, off: bool = False) -> None:
        self._model, self._requests, self._off = model, requests, off
        self._full: dict[int | None, list[Reference]] = {}
        self._templates: tuple[object, list[CachedTemplate]] = None, []

    def row(self, switches: BenchSetting) -> dict[str, Any]:
        """A row of the table."""
        model, templates = self._model, [] if switches.renewed_every else self._recorded(switches)
        rows = self._rows(self._requests, switches)
        how = ReuseOptions(correction_bits=switches.correction_bits)
        if switches.teacher is not Teacher.ITSELF:
            taught = model.corrections(self._rows(self._teachers(switches.teacher), switches), how)
            rows = [changed(row, corrections=known) for row, known in zip(rows, taught, strict=True)]
        pictures = [model.decode(row) for row in model.run(rows, how)]
        return {
            **_named(switches),
            **_scores(pictures, self._in_full(None if self._off else switches.halo)),
            "KiB": round(statistics.mean([t.size_bytes for t in templates] or [0]) / 1024, 1),
            "tokens of full": round(statistics.mean(_cost(row, switches) for row in rows), 3),
        }

    def other_seed(self) -> dict[str, Any]:
        """A row of the table: what pictures of other seeds are apart, in full."""
        others = self._model.run(self._model.edit(r, None) for r in self._teachers(Teacher.SEED))
        scores = _scores([self._model.decode(row) for row in others], self._in_full(None))
        text = dict.fromkeys(("bits", "levels", "halo", "corrected", "text", "KiB"), "")
        return {"form": "off, another seed", **text, **scores, "tokens of full": 1.0}

    def _rows(self, requests: Sequence[Request], switches: BenchSetting) -> list[Row]:
        model = self._model
        own_noise = self._off and switches.renewed_every  # as a miss has it
        rows = [
            changed(
                model.edit(request, None if own_noise else switches.halo),
                region=model.region(request, switches.halo),
                keeps_padding=switches.keeps_padding,
            )
            for request in requests
        ]
        if switches.renewed_every:
            every = switches.renewed_every
            later = refresh_offset(0, model.steps, every)
            return [changed(row, renewed_every=every, renewed_later=later) for row in rows]
        return [
            changed(row, template=template, tolerance=ANYWHERE)
            for row, template in zip(rows, self._recorded(switches), strict=True)
        ]

    def _teachers(self, teacher: Teacher) -> list[Request]:
        """Edits of the same pictures and masks: with other seeds, and with each other's prompts where asked."""
        others = [*self._requests[1:], self._requests[0]]
        return [
            replace(
                own,
                seed=own.seed + 1000,
                prompt=other.prompt if teacher is Teacher.PROMPT else own.prompt,
            )
            for own, other in zip(self._requests, others, strict=True)
        ]

    def _in_full(self, halo: int | None) -> list[Reference]:
        """With the noise of this halo; None: their own."""
        if halo not in self._full:
            rows = self._model.run(self._model.edit(request, halo) for request in self._requests)
            self._full[halo] = [
                Reference(request, self._model.decode(row), box_of(request.mask))
                for request, row in zip(self._requests, rows, strict=True)
            ]
        return self._full[halo]

    def _recorded(self, switches: BenchSetting) -> list[CachedTemplate]:
        """Those of the latest form stay."""
        key = switches.form
        if self._templates[0] != key:
            recording = RecordingSpec(frozenset({switches.form}), switches.bits)
            made = [self._model.template(r, recording, switches.levels) for r in self._requests]
            self._templates = key, made
        return self._templates[1]


def _named(switches: BenchSetting) -> dict[str, Any]:
    text = {"text": "padding" if switches.keeps_padding else ""}
    if switches.renewed_every:
        own = f"own, every {switches.renewed_every}"
        return {"form": own, "bits": 32, "levels": "", "halo": switches.halo, "corrected": "", **text}
    return {
        "form": str(switches.form),
        "bits": switches.bits or 32,
        "levels": switches.levels,
        "halo": switches.halo,
        "corrected": str(switches.teacher) if switches.corrected else "",
        **text,
    }


def _scores(pictures: Sequence[Pixels], full: Sequence[Reference]) -> dict[str, float]:
    """Inside the masks' boxes, and over whole pictures."""
    pairs = list(zip(pictures, full, strict=True))
    inside = [ssim(picture, ref.picture, ref.box) for picture, ref in pairs]
    peaks = [metrics.psnr_db(picture, ref.picture, ref.box) for picture, ref in pairs]
    whole = [ssim(picture, ref.picture, np.ones_like(ref.box)) for picture, ref in pairs]
    return {
        "SSIM box": round(statistics.mean(inside), 4),
        "least": round(min(inside), 4),
        "PSNR box": round(statistics.mean(peaks), 2),
        "SSIM": round(statistics.mean(whole), 4),
    }


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


def main() -> None:
    """Print the table and write ``out/bench/reuse_quality.json``."""
    options = parsed(
        __doc__,
        [
            option("--model", type=Path, default=MODEL),
            option("--limit", type=int, default=12, help="held-out edits"),
            option("--side", type=int, default=256, help="of the pictures: 128 or 256"),
            option("--guidance", type=float, help="scale; default the checkpoint's own"),
            option(
                "--sampler", type=click.Choice(list(Sampler)), help="of edits; default the checkpoint's own"
            ),
            option("--steps", type=int, default=STEPS),
            option("--beside", type=click.Choice(["full", "off"]), default="full", help="with which noise"),
        ],
    )
    torch.set_num_threads(2)
    requests = held_out(options.side, options.limit)
    sampler = None if options.sampler is None else Sampler(options.sampler)
    model = BenchModel(options.model, steps=options.steps, guidance=options.guidance, sampler=sampler)
    comparison = Comparison(model, requests, off=options.beside == "off")
    default = BenchSetting(levels=levels_of(DenoiserConfig(model="any"), model.family))
    rows = []
    for switches in settings(default, model):
        rows.append(comparison.row(switches))
        print(rows[-1], flush=True)
    rows.append(comparison.other_seed())
    workload = {"edits": len(requests), "side": options.side, "beside": options.beside}
    workload |= {"steps": model.steps, "guidance": model.guidance, "sampler": model.sampler}
    write("reuse_quality", rows, workload=workload)


if __name__ == "__main__":
    main()
