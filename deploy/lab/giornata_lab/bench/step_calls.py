"""Python functions of ours that one step of the engine calls, and the files that they stand in.

``python -m giornata_lab.bench.step_calls`` counts with ``sys.setprofile``, on networks of a few tiny blocks. The rows
are in their middle steps: masked, of one mask or each of its own, they take from a template what is on the device
already; `full` computes everything. A generator that goes on counts as a call, and so does a comprehension before
Python 3.12; functions of torch and diffusers do not. ``--functions 20`` lists those that are called most often.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Final

import click
import torch

import giornata
import giornata_denoiser
from giornata.planning.operations import taking_modes
from giornata_denoiser.choices import CacheForm
from giornata_denoiser.families.network import ModelFamily
from giornata_lab.bench.compute import engines, models, tiny_flux, tiny_unet
from giornata_lab.bench.compute.engines import BenchSetting
from giornata_lab.bench.compute.rows import Rows
from giornata_lab.bench.compute.workload import WorkloadEdit
from giornata_lab.bench.harness import write
from giornata_lab.flags import Several, option, parsed

OURS: Final = tuple(f"{Path(str(package.__file__)).parent}/" for package in (giornata, giornata_denoiser))
"""Folders of the packages whose functions count."""
FULL: Final = "full"
SIDE, TEXT, RATIO, STEPS = 8, 8, 0.11, 8
STEADY: Final = 4
"""Steps before the one that is counted: corrections are learned, slabs are here, and nothing is decided any more."""
SD3: Final[Mapping[str, Any]] = {
    "num_layers": 4,
    "attention_head_dim": 16,
    "num_attention_heads": 4,
    "joint_attention_dim": 24,
    "pooled_projection_dim": 20,
    "caption_projection_dim": 64,
}


def _cpu(name: str, changed: Mapping[str, Any]) -> ModelFamily:
    return models.family(name, device=torch.device("cpu"), changed=changed)


FAMILIES: Final[Mapping[str, Callable[[], ModelFamily]]] = {
    "flux": tiny_flux.family,
    "sd3": lambda: _cpu("sd3", SD3),
    "unet": lambda: _cpu(
        "sdxl", {**tiny_unet.XL, "layers_per_block": 1, "norm_num_groups": 8, "cross_attention_dim": 24}
    ),
}
"""Name → a family of four tiny blocks, or of a UNet's seven of convolutions and transformers."""


@dataclass
class CalledFunctions:
    """The functions of ours that were called while it counted."""

    functions: Counter[str] = field(default_factory=Counter)
    """Calls by function: its file and its qualified name."""

    @property
    def total(self) -> int:
        """All calls."""
        return self.functions.total()

    @property
    def files(self) -> set[str]:
        """Files of the functions."""
        return {name.split(":", 1)[0] for name in self.functions}

    def count(self, call: Callable[[], object]) -> None:
        """Count what `call` calls in this thread."""
        before = sys.getprofile()
        sys.setprofile(self._heard)
        try:
            call()
        finally:
            sys.setprofile(before)

    def _heard(self, frame: FrameType, event: str, _argument: object) -> None:
        if event != "call":
            return
        code = frame.f_code
        for folder in OURS:
            if code.co_filename.startswith(folder):
                self.functions[f"{code.co_filename.removeprefix(folder)}:{code.co_qualname}"] += 1


def forms_of(family: ModelFamily) -> list[CacheForm]:
    """The forms in which rows of a family may take from a template."""
    return [CacheForm(str(mode)) for mode in taking_modes(family.specs)]


def counted_step(
    family: ModelFamily, form: CacheForm | None, count: int, *, masks: int = 1, seed: int = 0
) -> CalledFunctions:
    """The calls of a step in the middle of so many rows of one template, which have so many different `masks`.

    Without a `form` everything is computed. The template has one entry: the steps before and after the one that is
    counted are alike.
    """
    rows = Rows(family, SIDE, TEXT, BenchSetting(form=form or CacheForm.KV, bits=8, levels=1))
    chance = random.Random(seed)  # noqa: S311 - a workload, no secret
    places = [(chance.random(), chance.random()) for _ in range(masks)]
    edits = [WorkloadEdit(index, 0, RATIO, *places[index % masks], STEPS) for index in range(count)]
    calls = CalledFunctions()
    with engines.engine_with(family) as engine:
        engine.batch.submit([rows.row(edit, reuse=form is not None) for edit in edits])
        for _ in range(STEADY):
            engine.step()
        calls.count(engine.step)
    return calls


BATCHES: Final = ((1, 1), (4, 1), (4, 4))
"""Rows, and their different masks."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Count, print, write ``out/bench/step_calls.json``."""
    options = parsed(
        __doc__,
        [
            option("--family", type=Several(click.Choice(list(FAMILIES))), default=list(FAMILIES)),
            option("--functions", type=int, default=0, help="so many of each step, most often called first"),
            option("--seed", type=int, default=0, help="of the masks' places"),
        ],
        arguments,
    )
    torch.set_num_threads(1)
    lines: list[dict[str, Any]] = []
    for name in options.family:
        family = FAMILIES[name]()
        for form in (*forms_of(family), None):
            for rows, masks in BATCHES:
                calls = counted_step(family, form, rows, masks=masks, seed=options.seed)
                lines.append(
                    {
                        "family": name,
                        "form": form or FULL,
                        "rows": rows,
                        "masks": masks,
                        "calls": calls.total,
                        "files": len(calls.files),
                        "most": ", ".join(
                            f"{function} {times}"
                            for function, times in calls.functions.most_common(options.functions)
                        ),
                    }
                )
    write("step_calls", lines, workload={**vars(options), "counted": "one step of the engine, in its middle"})


if __name__ == "__main__":
    main()
