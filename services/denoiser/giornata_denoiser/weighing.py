"""Whether rows may share a step: by its predicted time, by memory, and by how many of their size are worth it. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from giornata.planning.blocks import Mode
from giornata.planning.costs import Shape, StepCosts, step_work, worth_reusing
from giornata.planning.profile import BatchCap
from giornata_denoiser.families.protocol import Family
from giornata_denoiser.reuse.served import preferred
from giornata_denoiser.row import Row

ENTRIES = 3
"""Of what sizes a row may hold: what serves its step, what will serve a later one, and what it corrects them by."""


@dataclass(frozen=True)
class Budget:
    """Of a step that several rows share; a row alone may exceed it, since otherwise it would never run."""

    step_ms: float = math.inf
    memory_bytes: float = math.inf
    """For rows, what they take from templates, and activations."""
    activation_bytes: float = 0.0
    """Of a step, per token that it computes."""
    caps: tuple[BatchCap, ...] = ()
    """Of the profile; none caps nothing."""


def fits(rows: Sequence[Row], budget: Budget, costs: StepCosts, family: Family) -> bool:
    """Whether `rows` may share a step.

    Args:
        rows: all of the step's.
        budget: of the step.
        costs: of the machine.
        family: that computes them.
    """
    return (
        predicted_ms(rows, costs, family.blocks) <= budget.step_ms
        and step_bytes(rows, budget.activation_bytes, family.dtype.itemsize) <= budget.memory_bytes
        and sum(share(row.tokens, budget.caps) for row in rows) <= 1.0
    )


def predicted_ms(rows: Sequence[Row], costs: StepCosts, blocks: int) -> float:
    """Of a step of a transformer with so many `blocks` that waits for no load."""
    shapes: list[Shape] = []
    modes: list[tuple[Mode, ...]] = []
    for row in rows:
        shapes += row.shapes
        modes += [_modes(row, blocks)] * len(row.shapes)
    return costs.step_ms(step_work(shapes, modes))


def step_bytes(rows: Sequence[Row], activation_bytes: float, itemsize: int) -> float:
    """Memory of a step of `rows`, the model's weights not counted."""
    held = sum(row_bytes(row, itemsize) for row in rows)
    return held + activation_bytes * sum(row.tokens for row in rows)


def row_bytes(row: Row, itemsize: int) -> int:
    """What a row holds between steps: its tensors and, at most, the slabs of so many entries."""
    held = [row.latent, *row.conditioning.values()]
    held += [tensor for prompt in row.prompts for tensor in (prompt.embeds, prompt.pooled)]
    return sum(tensor.nbytes for tensor in held) + ENTRIES * slab_bytes(row, itemsize)


def slab_bytes(row: Row, itemsize: int) -> int:
    """Of all slabs of one entry, of all of the row's sequences; 0 for a row that takes from no template."""
    if row.template is None or row.region is None:
        return 0
    entry, outside = row.template.entries[0], len(row.region.outside)
    channels = 0
    for kept, mode in zip(entry.blocks, preferred(entry), strict=True):
        parts = {Mode.KV: (kept.key, kept.value), Mode.HIDDEN: (kept.hidden,), Mode.FULL: ()}[mode]
        channels += sum(part.shape[1] for part in parts if part is not None)
    return channels * outside * itemsize * len(row.prompts)


def profits(row: Row, costs: StepCosts, family: Family) -> bool:
    """Whether a row with a template ends earlier than in full: below the crossover mask ratio.

    Its loads are spread over its steps: every entry is loaded once.
    """
    if row.template is None:
        return False
    entries = min(len(row.template.entries), row.steps)
    bytes_a_step = slab_bytes(row, family.dtype.itemsize) * entries / row.steps
    return worth_reusing(costs, row.shapes, family.blocks, bytes_a_step)


def share(tokens: int, caps: Sequence[BatchCap]) -> float:
    """Of a batch at its cap that a row of so many tokens takes: 1 / rows of the next larger size in the profile."""
    larger = [cap for cap in caps if cap.tokens >= tokens]
    nearest = min(
        larger, key=lambda cap: cap.tokens, default=max(caps, key=lambda cap: cap.tokens, default=None)
    )
    return 0.0 if nearest is None else 1.0 / nearest.rows


def _modes(row: Row, blocks: int) -> tuple[Mode, ...]:
    if row.template is None or row.region is None or not row.begun:
        return (Mode.FULL,) * blocks
    return preferred(row.template.entries[0])
