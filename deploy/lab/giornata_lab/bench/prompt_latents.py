"""Beginning a new seed's picture with an earlier one's latent, of the same words: whose picture that gives.

Nirvana (NSDI '24) begins at step k with the donor's latent. Here that is beside its content at that level under the new
seed's own noise. ``python -m giornata_lab.bench.prompt_latents --help``.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from giornata_denoiser.engine.model_runner import StepReport
from giornata_denoiser.rows.row import Row
from giornata_lab.bench.compute.bench_model import BenchModel, Request, box_of, held_out
from giornata_lab.bench.reporting.report import write
from giornata_lab.flags import option, parsed
from giornata_prepost.images.pictures import Pixels
from giornata_tools.lora_profiler.profiler import ssim

MODEL: Final = Path("deploy/model/fresco")
SHARES: Final = (0.1, 0.2, 0.3, 0.5)
"""Of the steps, that are not computed."""
OTHER: Final = 1000
"""What is added to a donor's seed."""


class EditFromDonor:
    """An edit that begins with latents of its donor: the same edit under another seed."""

    def __init__(self, model: BenchModel, request: Request) -> None:
        self._model, self._box = model, box_of(request.mask)
        self._donor = model.edit(request, None)
        self._own = model.edit(replace(request, seed=request.seed + OTHER), None)
        self._latents = [self._donor.latent]

        def keep(report: StepReport) -> None:
            self._latents += [row.latent.clone() for row in report.advanced]

        (done,) = model.run([self._donor], told=keep)
        self._pictures = model.decode(done), self._painted(self._own)

    def scores(self, step: int, *, own_noise: bool) -> tuple[float, float]:
        """SSIM in the mask's box to the donor's picture, and to the seed's own in full, of a row begun at a step."""
        latent = self._renoised(step) if own_noise else self._latents[step]
        picture = self._painted(replace(self._own, step=step, latent=latent))
        donor, full = (ssim(picture, other, self._box) for other in self._pictures)
        return donor, full

    def _renoised(self, step: int) -> Tensor:
        """The donor's predicted picture at a step, under the other seed's noise of its level."""
        levels, here = self._donor.track.levels, self._latents[step]
        level, drop = float(levels[step]), float(levels[step + 1] - levels[step])
        predicted = here - level * (self._latents[step + 1] - here) / drop
        return (1 - level) * predicted + level * self._own.conditioning["noise"]

    def _painted(self, row: Row) -> Pixels:
        (done,) = self._model.run([row])
        return self._model.decode(done)


def main() -> None:
    """Print the table and write ``out/bench/prompt_latents.json``."""
    options = parsed(
        __doc__,
        [
            option("--model", type=Path, default=MODEL),
            option("--limit", type=int, default=8, help="held-out edits"),
            option("--side", type=int, default=128, help="of the pictures: 128 or 256"),
            option("--steps", type=int, default=20),
        ],
    )
    torch.set_num_threads(1)
    model = BenchModel(options.model, steps=options.steps)
    edits = [EditFromDonor(model, request) for request in held_out(options.side, options.limit)]
    table = []
    for share in SHARES:
        step = round(share * options.steps)
        for noise in ("donor's", "own"):
            found = [edit.scores(step, own_noise=noise == "own") for edit in edits]
            donor, full = (round(statistics.mean(each), 3) for each in zip(*found, strict=True))
            saved = f"{options.steps / (options.steps - step):.2f}x"
            row = {
                "steps saved": step,
                "speed": saved,
                "noise": noise,
                "SSIM to donor": donor,
                "to full": full,
            }
            table.append(row)
    write("prompt_latents", table, workload={"model": str(options.model), "edits": len(edits)})


if __name__ == "__main__":
    main()
