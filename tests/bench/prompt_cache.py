"""What beginning an edit with the latent of another prompt's edit costs in picture, on the model that ships.

Half of the held-out edits choose how many steps may be saved, by the cosine of both prompts; the other half judges
that. Diffusers' pipeline makes both, with `latents` and `sigmas[k:]`. ``python -m tests.bench.prompt_cache --help``.
"""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from giornata.approximate.table import SkipTable
from giornata.wire.approximate import kept_steps
from giornata_tools.checkout import TRAINED
from giornata_tools.model.adapters.judging import GUIDANCE, SIDE, STEPS, additions
from giornata_tools.model.painting import Pixels
from giornata_tools.quality.cases import Case, digest
from giornata_tools.quality.checker import check
from giornata_tools.quality.metrics import ssim
from tests.bench.compute import similar_prompts as similar
from tests.bench.compute.begun_edits import BegunEdits, posterior_modes
from tests.bench.compute.similar_prompts import Begun
from tests.bench.reporting.begun_sheet import Sample, sheet
from tests.bench.reporting.report import OUT, write
from tests.flags import Several, option, parsed

LEAST_CASES: Final = 24
AT_ONCE: Final = 4
"""Edits that are made together, each with the latents of all of its sources."""
OTHER_NOISE: Final = 100_000
"""Added to an edit's seed: that of the edits whose latents it begins with."""
SHOWN: Final = ("paraphrase", "other colour", "other shape")
"""Sources of the sheet, an edit each."""


class Comparison:
    """Edits that begin with others' latents beside whole ones."""

    def __init__(self, model: BegunEdits) -> None:
        self._model = model
        self._chance = random.Random(0)  # noqa: S311 - a workload
        self.largest_gap = 0
        """Of edits that begin with their own latents to themselves in whole, in 8-bit levels."""
        self.samples: list[Sample] = []

    def edits(self, cases: Sequence[Case], after: Collection[int]) -> Iterator[Begun]:
        """Begun after each of these numbers of steps with the latents of each source."""
        for first in range(0, len(cases), AT_ONCE):
            yield from self._together(cases[first : first + AT_ONCE], after)
            print(f"{min(first + AT_ONCE, len(cases))} of {len(cases)}", flush=True)

    def _together(self, cases: Sequence[Case], after: Collection[int]) -> list[Begun]:
        asked = [case.scene.caption for case in cases]
        seeds = [case.slot.index + OTHER_NOISE for case in cases]
        whole = self._model.painted(cases, asked, seeds)
        prompts = [similar.sources(case.slot.colour, case.slot.shape, self._chance) for case in cases]
        found, made = list[Begun](), dict[tuple[str, int], list[Pixels]]()
        for source in prompts[0]:
            theirs = [each[source] for each in prompts]
            for step, latents in self._model.latents(cases, theirs, seeds, after).items():
                painted = made[source, step] = self._model.painted(cases, asked, seeds, (step, latents))
                for case, prompt, one, full in zip(cases, theirs, painted, whole, strict=True):
                    cosine = self._model.cosine(case.scene.caption, prompt)
                    found.append(_judged(case, one, full, source, cosine, step / self._model.steps))
        gaps = [
            _gap(one, full)
            for step in after
            for one, full in zip(made[similar.SAME, step], whole, strict=True)
        ]
        self.largest_gap = max(self.largest_gap, *gaps)
        for place, source in list(enumerate(SHOWN[: len(cases)]))[len(self.samples) :]:
            words = f"{asked[place]}, from {prompts[place][source]}"
            pictures = [
                cases[place].scene.before,
                whole[place],
                *(made[source, step][place] for step in after),
            ]
            self.samples.append(Sample(words, pictures))
        return found


def _gap(one: Pixels, other: Pixels) -> int:
    return int(np.abs(one.astype(int) - other).max())


def _judged(case: Case, made: Pixels, whole: Pixels, source: str, cosine: float, share: float) -> Begun:
    wanted, mask = (case.slot.colour, case.slot.shape), case.scene.mask
    return Begun(
        source,
        cosine,
        share,
        check(made, case.bare, mask).is_a(*wanted),
        check(whole, case.bare, mask).is_a(*wanted),
        ssim(made, whole, mask),
    )


def lines_of(edits: Sequence[Begun]) -> list[dict[str, Any]]:
    """The table: by how the prompt differs, then by cosine."""
    found: list[dict[str, Any]] = []
    for source in dict.fromkeys(each.source for each in edits):
        by_share = similar.shares(each for each in edits if each.source == source)
        found += [similar.line(source, group) for group in by_share.values()]
    for floor in similar.FLOORS:
        by_share = similar.shares(
            each for each in edits if each.source != similar.SAME and similar.floor_of(each.cosine) == floor
        )
        found += [similar.line(similar.group_name(floor), group) for group in by_share.values()]
    return found


def written(path: Path, lines: Sequence[dict[str, float]], measured: dict[str, Any]) -> None:
    """The checkpoint's table. Where nothing may be saved there is none, and one of before has to go."""
    if not lines:
        path.unlink(missing_ok=True)
        print(f"no step may be saved at any cosine: {path} is not written")
        return
    told = {"schema": 1, "table": list(lines), "measured": measured}
    SkipTable.model_validate(told)
    path.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    print(f"written to {path}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables and write ``out/bench/prompt_cache.json``."""
    options = parsed(
        __doc__,
        [
            option("--model", type=Path, default=TRAINED),
            option(
                "--cases", type=int, default=LEAST_CASES, help="held-out edits that choose; as many judge"
            ),
            option("--steps", type=int, default=STEPS),
            option("--saved", type=Several(int), help="steps; by default those after which latents are kept"),
            option("--threads", type=int, default=1),
            option("--write", is_flag=True, help="the table into the checkpoint's approximate.json"),
            option("--sheet", type=Path, default=OUT / "prompt_cache.jpg", help="pictures by steps saved"),
        ],
        arguments,
    )
    torch.set_num_threads(options.threads)
    cases = additions(2 * options.cases)
    random.Random(0).shuffle(cases)  # noqa: S311 - the set lies by colour and shape
    choosing, others = cases[: options.cases], cases[options.cases :]
    after = options.saved or kept_steps(options.steps)
    with posterior_modes():
        comparison = Comparison(BegunEdits(options.model, options.steps))
        found = list(comparison.edits(choosing, after))
        table = similar.table(found)
        taken = sorted({round(line["share"] * options.steps) for line in table})
        judged = similar.judged(list(comparison.edits(others, taken)), table) if taken else []
    measured = {"edits": options.cases, "side": SIDE, "steps": options.steps, "guidance": GUIDANCE}
    measured |= {"set": digest(cases), "most_points_lost": similar.MOST_LOST, "other_edits": judged}
    write("prompt_cache", lines_of(found), workload=measured | {"table": table})
    print(f"begun with their own latents: largest difference {comparison.largest_gap} of 255")
    print("table:", *table, "with other edits:", *judged, sep="\n")
    if options.write:
        written(options.model / "approximate.json", table, measured)
    sheet(comparison.samples, after, options.steps).save(options.sheet, quality=88)
    print(f"written to {options.sheet}")


if __name__ == "__main__":
    main()
