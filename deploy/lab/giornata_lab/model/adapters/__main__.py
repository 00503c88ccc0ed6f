"""Measure the adapters that ship and write the figures into their cards.

``python -m giornata_lab.model.adapters --limit 100`` takes some minutes on one CPU thread.
"""

from __future__ import annotations

from typing import Final

import click
import torch
from diffusers import FluxControlNetModel

from giornata_lab.model.adapters import card, judging, lessons
from giornata_lab.model.adapters.card import AdapterCard
from giornata_lab.model.adapters.judging import Figures
from giornata_lab.model.painting import fill_pipeline
from giornata_tools.checkout import TRAINED

NAMES: Final = ("outlined", "swapped", "outline")


@click.command(context_settings={"show_default": True})
@click.argument("names", nargs=-1, type=click.Choice(NAMES))
@click.option("--limit", type=click.IntRange(1), default=100, help="Held-out edits of each.")
@click.option("--threads", type=int, default=1, help="CPU threads.")
def main(*, names: tuple[str, ...], limit: int, threads: int) -> None:
    """Measure NAMES, by default all, on held-out edits through diffusers' pipelines; rewrites their cards."""
    torch.set_num_threads(threads)
    for name in names or NAMES:
        one = card.read(name)
        measured = {"edits": float(limit), **figures(one, limit)}
        click.echo(f"{name}: {measured}")
        one.model_copy(update={"measured": measured}).write()


def figures(one: AdapterCard, limit: int) -> Figures:
    """With the adapter, without it, and of the truth where that is another."""
    pipeline = fill_pipeline(TRAINED)
    if one.name == "outline":
        scenes = lessons.held_out(limit)
        net = FluxControlNetModel.from_pretrained(one.file.parent, dtype=torch.float32).eval()
        return {
            **judging.judge_outline(pipeline, net, scenes),
            **_named("without", judging.judge_outline(pipeline, None, scenes)),
            **_named("truth", judging.overlaps([scene.after for scene in scenes], scenes)),
        }
    every = judging.additions(limit)
    judge = {"outlined": judging.judge_outlined, "swapped": judging.judge_swapped}[one.name]
    without = judge(pipeline, every)
    truth: Figures = {}
    if one.name == "outlined":
        shown = judging.judge_shown(pipeline, every)
        truth = {**_named("truth", judging.judge_truth(every)), **_named("shown", shown)}
    pipeline.load_lora_weights(one.file.parent, weight_name=one.file.name, adapter_name=one.name)
    pipeline.set_adapters(one.name)
    return {**judge(pipeline, every), **_named("without", without), **truth}


def _named(prefix: str, found: Figures) -> Figures:
    return {f"{prefix}_{name}": value for name, value in found.items()}


if __name__ == "__main__":
    main()
