"""The cost of a step: its predicted time, the memory by which rows may share it, and what reuse is worth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from giornata.planning.cost_model import worth_reusing
from giornata.planning.operations import (
    NetworkOperations,
    SequenceShape,
    StepCosts,
    StepWork,
    is_all_or_nothing,
    recording_bytes,
    step_work,
)
from giornata.wire.values import BlockMode
from giornata_denoiser.choices import EXACT
from giornata_denoiser.families.network import ModelFamily
from giornata_denoiser.rows.parts import cache_bytes
from giornata_denoiser.rows.row import Row
from giornata_denoiser.rows.template import CachedBlock, stored_bytes

FED: Final = 6
"""Times a token's keys and values that a GEGLU takes (8 + 4 + 4 of its width) beyond an attention (4)."""
ENTRIES_ON_DEVICE: Final = 2
"""Entries of a template run that a GPU has at a time: one is recorded while the other moves to the host."""

SHORT: Final = 3
"""Most steps from one in full to the next where what a network makes of the picture changes quickly;
`docs/results/reuse.md` has the measurements."""
OWN_BITS: Final = 8
"""Where rows learn no corrections, or exact ones."""


@dataclass(frozen=True)
class StepBudget:
    """The most that a step of several rows may take; a row alone may exceed it, since it would never run otherwise."""

    memory_bytes: float = math.inf
    """Bytes of rows, of what they take from templates, and of activations."""
    activation_bytes: float = 0.0
    """Bytes of a step's activations for each token that it computes."""
    even_bytes: float | None = None
    """Likewise where all sequences are equally long; None: as many."""
    ahead_bytes: float = 0.0
    """Most bytes of slabs that are loaded for later steps, of all rows together."""
    correction_bits: int | None = None
    """Bits of the corrections that rows learn; None where they learn none."""


def predicted_ms(rows: Sequence[Row], costs: StepCosts, operations: NetworkOperations) -> float:
    """Predicted time of a step of a network of these operations that waits for no load."""
    return costs.step_ms(predicted_work(rows, operations))


def predicted_work(rows: Sequence[Row], operations: NetworkOperations) -> StepWork:
    """What such a step computes."""
    computed: list[tuple[SequenceShape, tuple[BlockMode, ...]]] = []
    for row in rows:
        whole = (BlockMode.FULL,) * operations.blocks
        own = masked_modes(row, operations.blocks) if row.masked else whole
        computed += [(shape, own) for shape in row.shapes] + [(shape, whole) for shape in row.joining]
    return step_work(operations, *zip(*computed, strict=True))


def masked_modes(row: Row, blocks: int) -> tuple[BlockMode, ...]:
    """The modes of so many blocks in a step that computes the row's region, and of the rest as little as can be."""
    return (BlockMode.KV,) * blocks if row.reuse.template is None else row.reuse.template.entries[0].modes


def step_bytes(rows: Sequence[Row], budget: StepBudget, family: ModelFamily) -> float:
    """The most memory that a step of `rows` takes beside the model's weights, what is loaded ahead among it."""
    held = sum(row_bytes(row, family, budget.correction_bits) for row in rows)
    if keeps_slabs(family):
        taken = sum(slab_bytes(row, family.dtype.itemsize) for row in rows)
    else:  # entries as they are stored, which rows of one template share; they may have left the device's tier
        taken = sum({id(row.reuse.template): entry_bytes(row) for row in rows}.values())
        held += taken + _convolved_bytes(rows, family)
    # Prefixes are computed one after the other, before the step itself.
    prefix = max((tokens for row in rows for tokens in row.inputs.prefix), default=0)
    even = budget.even_bytes if _even(rows) else None
    each = budget.activation_bytes if even is None else even
    return held + min(budget.ahead_bytes, taken) + each * max(prefix, sum(row.tokens for row in rows))


def _even(rows: Sequence[Row]) -> bool:
    """Whether all sequences are equally long, now and later; companions may be modulated as sequences of their own."""
    steps = {
        (row.step, row.masked, row.steps_in_full, row.reuse.renewed_every, row.reuse.renewed_later)
        for row in rows
    }
    alike = len({shape for row in rows for shape in row.shapes}) == 1
    alike = alike and (len(steps) == 1 or all(row.region is None for row in rows))
    return alike and all(row.inputs.companions in {0, row.image_tokens} for row in rows)


def row_bytes(row: Row, family: ModelFamily, correction_bits: int | None) -> int:
    """The most that a row holds in a step: its tensors, what it takes from a template and learns, what it records."""
    held = row.latent.nbytes + row.inputs.size_bytes
    held += row.track.remembered * row.latent.numel() * max(family.dtype.itemsize, 4)  # float32 at least
    itemsize = family.dtype.itemsize
    held += row.steps * len(row.inputs.prompts) * family.network.prepared_bytes
    held += _prefix_bytes(row, family)
    held += slab_bytes(row, itemsize) if keeps_slabs(family) else attended_bytes(row, family)
    held += correction_bytes(row, itemsize, correction_bits) + cache_bytes(row)
    held += _own_bytes(row, family, correction_bits) + _padding_bytes(row, family, correction_bits)
    # Entries that are recorded leave a GPU for the host; on a CPU they stay where they are.
    return held + recorded_bytes(row, family, ENTRIES_ON_DEVICE if family.device.type == "cuda" else None)


def keeps_slabs(family: ModelFamily) -> bool:
    """Return whether what rows take is kept as blocks read it; a GPU keeps it as it is stored."""
    return family.device.type != "cuda"


def entry_bytes(row: Row) -> int:
    """The most that one entry of a row's template takes as it is stored; 0 for a row that takes from none."""
    if row.reuse.template is None or row.region is None:
        return 0
    return max((entry.size_bytes for entry in row.reuse.template.entries), default=0)


def attended_bytes(row: Row, family: ModelFamily) -> int:
    """Bytes of the keys and values of one block, of all sequences of a row that takes from a template.

    A UNet has those of outside tokens twice, by cell and beside the row's own, and fewer other activations (`FED`).
    """
    if row.reuse.template is None or row.region is None:
        return 0
    unet = is_all_or_nothing(family.specs)
    outside = len(row.region.outside) * (2 if unet else 1)
    return sum(
        max(
            (
                max(
                    0,
                    _taken_bytes(kept, BlockMode.KV, own - unet * FED * own, outside, family.dtype.itemsize),
                )
                for kept in row.reuse.template.entries[0].blocks
                if kept.key is not None
            ),
            default=0,
        )
        for own in row.own_tokens
    )


def _convolved_bytes(rows: Sequence[Row], family: ModelFamily) -> int:
    """Bytes that the convolutions of masked rows of a UNet take on a GPU beyond :func:`attended_bytes` of all rows.

    Attention and convolutions take turns. A convolution unpacks what surrounds the tiles, one sequence after the other,
    in less than twice the bytes of the result; then it gathers the windows of all tiles. The profile's activations are
    those of whole pictures, whose convolutions gather nothing.
    """
    masked = [row for row in rows if row.masked and row.reuse.template is not None]
    if not masked or not is_all_or_nothing(family.specs):
        return 0
    kept = max(spec.channels([BlockMode.KV]) for spec in family.specs if not spec.heads)
    around = 2 * kept * max(row.block_tokens - row.computed_tokens for row in masked)
    windows = sum(row.tokens for row in masked) * max(spec.gathered for spec in family.specs)
    attended = sum(attended_bytes(row, family) for row in rows)
    return max(0, int(max(around, windows)) * family.dtype.itemsize - attended)


def slab_bytes(row: Row, itemsize: int) -> int:
    """Bytes of the slabs of one entry, for all sequences of a row; 0 for a row that takes from no template."""
    if row.reuse.template is None or row.region is None:
        return 0
    entry, outside = row.reuse.template.entries[0], len(row.region.outside)
    return sum(
        _taken_bytes(kept, mode, own, outside, itemsize)
        for kept, mode in zip(entry.blocks, entry.modes, strict=True)
        for own in row.own_tokens
    )


def _taken_bytes(kept: CachedBlock, mode: BlockMode, own: int, outside: int, itemsize: int) -> int:
    """Bytes of what a block in `mode` takes for so many `outside` tokens.

    Keys and values have room for the sequence's `own`; exact parts stay as they were recorded.
    """
    room = own if mode is BlockMode.KV and kept.key is not None else 0
    sizes = (
        part.shape[1] * (part.data.itemsize if part.bits == EXACT else itemsize) for part in kept.taken(mode)
    )
    return (room + outside) * sum(sizes)


def correction_bytes(row: Row, itemsize: int, bits: int | None) -> int:
    """Bytes of the corrections that a row has, or will learn in `bits`."""
    if row.reuse.template is None or row.region is None or bits is None:
        return 0
    if row.reuse.corrections is not None:
        return sum(correction.size_bytes for correction in row.reuse.corrections)
    kept = [part.shape[1] for block in row.reuse.template.entries[0].blocks for part in block.parts]
    outside = len(row.region.outside)
    return len(row.inputs.prompts) * sum(stored_bytes(outside, channels, bits, itemsize) for channels in kept)


def _own_bytes(row: Row, family: ModelFamily, correction_bits: int | None) -> int:
    """Bytes of what a row without a template keeps from its last step in full.

    On a GPU it is kept in bits, and one block has its own keys and values beside it while it attends.
    """
    if row.region is None or not row.renews:
        return 0
    outside, itemsize = len(row.region.outside), family.dtype.itemsize
    own, prompts = sum(row.own_tokens), len(row.inputs.prompts)
    channels = [spec.channels([BlockMode.KV]) for spec in family.specs]
    attended = [  # keys and values alone have room for the row's own
        itemsize * width * (prompts * outside + (own if spec.heads else 0))
        for spec, width in zip(family.specs, channels, strict=True)
    ]
    if keeps_slabs(family):
        return sum(attended)
    stored = sum(stored_bytes(outside, width, own_bits(correction_bits), itemsize) for width in channels)
    return prompts * stored + max(attended, default=0)


def _prefix_bytes(row: Row, family: ModelFamily) -> int:
    """Bytes of the keys and values of a row's prefixes, in the network's dtype."""
    tokens = sum(row.inputs.prefix)
    channels = sum(spec.channels([BlockMode.KV]) for spec in family.specs) if tokens else 0
    return tokens * channels * family.dtype.itemsize


def _padding_bytes(row: Row, family: ModelFamily, correction_bits: int | None) -> int:
    """Bytes of the keys and values that a row keeps of its prompts' padding."""
    bits = 0 if keeps_slabs(family) else own_bits(correction_bits)
    kept = [
        (tokens, spec.channels([BlockMode.KV])) for tokens in row.padding if tokens for spec in family.specs
    ]
    return sum(stored_bytes(tokens, width, bits, family.dtype.itemsize) for tokens, width in kept)


def recorded_bytes(row: Row, family: ModelFamily, most: int | None = None) -> int:
    """Bytes of the entries that a row leaves behind, or of at `most` so many of them."""
    what = row.records
    if what is None:
        return 0
    entries = row.steps_in_full if most is None else min(row.steps_in_full, most)
    bits = what.bits or 8 * family.dtype.itemsize
    modes = [BlockMode(form) for form in what.forms]
    return entries * recording_bytes(family.specs[what.first_block :], modes, row.block_tokens, bits)


def reuse_profits(row: Row, costs: StepCosts, family: ModelFamily) -> bool:
    """Return whether a row that takes anything ends earlier than in full: below the crossover mask ratio.

    Without corrections its first step is computed in full anyway. Its loads are spread over all: every entry is loaded
    once.
    """
    reuse = row.reuse
    if (reuse.template is None and reuse.renewed_every < 2) or (row.steps < 2 and reuse.corrections is None):
        return False
    entries = 0 if reuse.template is None else min(len(reuse.template.entries), row.steps)
    bytes_a_step = slab_bytes(row, family.dtype.itemsize) * entries / row.steps
    shapes = row.shaped(padding_kept=True)
    return worth_reusing(costs, family.operations, shapes, masked_modes(row, family.depth), bytes_a_step)


def run_ms(row: Row, costs: StepCosts, operations: NetworkOperations) -> float:
    """Predicted time of all steps of a row that takes anything and has not begun, alone and waiting for no load."""
    whole, masked = (
        predicted_ms([each], costs, operations)
        for each in (row.corrected(None), replace(row, degree=1, step=1))
    )
    left = row.steps - row.step
    in_full = min(row.steps_in_full, left)
    return in_full * whole + (left - in_full) * masked


def renew_steps(configured: int, family: ModelFamily) -> int:
    """At most so many steps from one in full to the next; 0 computes all in full.

    A network that blends learns of the picture around the mask from its latent alone, which changes from step to step:
    what it makes of it lasts for fewer steps. A UNet, whose blocks are taken together, computes all of them: renewed
    more often, its pictures are still too far from those of full computation: decision record 0013.
    """
    if is_all_or_nothing(family.specs):
        return 0
    return min(configured, SHORT) if family.network.blends else configured


def own_bits(correction_bits: int | None) -> int:
    """The bits in which a device that keeps no slabs keeps them: those of corrections, if they have any."""
    return correction_bits or OWN_BITS
