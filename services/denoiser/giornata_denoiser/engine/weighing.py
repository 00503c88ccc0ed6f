"""Whether rows may share a step: by its predicted time, by memory, and by how many of their size are worth it. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from giornata.planning.costs import Shape, StepCosts, step_work, worth_reusing
from giornata.planning.profile import BatchCap
from giornata.wire.values import Mode
from giornata_denoiser.engine.served import preferred
from giornata_denoiser.families.protocol import Family
from giornata_denoiser.rows.row import Row
from giornata_denoiser.rows.template import Form

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
        and step_bytes(rows, budget.activation_bytes, family) <= budget.memory_bytes
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


def reuses(row: Row) -> bool:
    """Whether a row's next step may take from a template."""
    return row.template is not None and row.region is not None and row.begun


def step_bytes(rows: Sequence[Row], activation_bytes: float, family: Family) -> float:
    """Memory of a step of `rows`, the model's weights not counted."""
    held = sum(row_bytes(row, family) for row in rows)
    return held + activation_bytes * sum(row.tokens for row in rows)


def row_bytes(row: Row, family: Family) -> int:
    """What a row holds between steps, at most: its tensors, what it takes from a template, what it records."""
    held = [row.latent, *row.conditioning.values()]
    held += [tensor for prompt in row.prompts for tensor in (prompt.embeds, prompt.pooled)]
    taken = ENTRIES * slab_bytes(row, family.dtype.itemsize)
    return sum(tensor.nbytes for tensor in held) + taken + _recorded_bytes(row, family)


def slab_bytes(row: Row, itemsize: int) -> int:
    """Of all slabs of one entry, of all of the row's sequences; 0 for a row that takes from no template.

    Slabs of keys and values have room for the sequence's own.
    """
    if row.template is None or row.region is None:
        return 0
    entry, outside = row.template.entries[0], len(row.region.outside)
    channels = dict.fromkeys(Mode, 0)
    for kept, mode in zip(entry.blocks, preferred(entry), strict=True):
        channels[mode] += sum(part.shape[1] for part in kept.taken(mode))
    return itemsize * sum(
        channels[Mode.KV] * (own + outside) + channels[Mode.HIDDEN] * outside for own in row.own_tokens
    )


def _recorded_bytes(row: Row, family: Family) -> int:
    """Of all entries that a template run will leave, in host memory on every device."""
    what = row.recording
    if what is None or family.device.type == "cuda":
        return 0
    parts = sum(2 if form is Form.KV else 1 for form in what.forms)
    bits = what.bits or 8 * family.dtype.itemsize
    blocks = family.blocks - what.first_block
    return row.steps * blocks * parts * row.image_tokens * family.width * bits // 8


def profits(row: Row, costs: StepCosts, family: Family) -> bool:
    """Whether a row with a template ends earlier than in full: below the crossover mask ratio.

    Its first step is computed in full anyway. Its loads are spread over the others: every entry is loaded once.
    """
    if row.template is None or row.steps < 2:
        return False
    entries = min(len(row.template.entries), row.steps)
    bytes_a_step = slab_bytes(row, family.dtype.itemsize) * entries / row.steps
    return worth_reusing(costs, row.shapes, preferred(row.template.entries[0]), bytes_a_step)


def share(tokens: int, caps: Sequence[BatchCap]) -> float:
    """Of a batch at its cap that a row of so many tokens takes: 1 / rows of the next larger size in the profile."""
    larger = [cap for cap in caps if cap.tokens >= tokens]
    nearest = min(
        larger, key=lambda cap: cap.tokens, default=max(caps, key=lambda cap: cap.tokens, default=None)
    )
    return 0.0 if nearest is None else 1.0 / nearest.rows


def _modes(row: Row, blocks: int) -> tuple[Mode, ...]:
    if row.template is None or not reuses(row):
        return (Mode.FULL,) * blocks
    return preferred(row.template.entries[0])
