"""Rows and templates to measure with: their sizes matter, their values do not."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from giornata.packed.region import Region, region
from giornata.packed.uses import Taken, Use, by_sequence
from giornata.scheduling.batch import RowKey
from giornata.wire.values import Mode
from giornata_denoiser.blocks.device import Device
from giornata_denoiser.blocks.recording import EntryRecorder
from giornata_denoiser.blocks.slabs import Slabs
from giornata_denoiser.checkpoints.checkpoint import Checkpoint
from giornata_denoiser.engine.assembly import assemble
from giornata_denoiser.engine.stepping import denoise_step
from giornata_denoiser.families.rows import NEGATIVE, build_row, text_shapes
from giornata_denoiser.profiling.mixtures import RowSize
from giornata_denoiser.rows.row import Row
from giornata_denoiser.rows.template import Entry, Form

STEPS = 2
GUIDED_SCALE = 2.0


class Workpieces:
    """Rows of one checkpoint, and what they take from templates. An entry is recorded for every picture size.

    Args:
        checkpoint: whose rows they are.
        bits: of what is recorded.
        device: the checkpoint's, as loads get there; one that keeps nothing, so that every load moves all of it.
    """

    def __init__(self, checkpoint: Checkpoint, bits: int, device: Device) -> None:
        self.checkpoint, self._bits, self._device = checkpoint, bits, device
        self._entries: dict[tuple[int, int], Entry] = {}
        self._random = torch.Generator().manual_seed(0)

    def row(self, size: RowSize, index: int) -> Row:
        """The `index`-th row of a batch, of noise."""
        family, card = self.checkpoint.family, self.checkpoint.card
        tokens = size.height * size.width
        shapes = text_shapes(family, size.text)
        text = {
            f"{sign}{name}": self._noise(*shape)
            for sign in (("", NEGATIVE) if size.guided else ("",))
            for name, shape in shapes.items()
        }
        row = build_row(
            family,
            RowKey("profile", 0, index),
            grid=(size.height, size.width),
            track=family.schedule.track(steps=STEPS, strength=1.0, cells=tokens),
            text=text,
            conditioning={
                name: self._noise(tokens, channels) for name, channels in family.network.conditioning.items()
            },
            guidance_scale=card.default_guidance_scale,
            true_cfg_scale=GUIDED_SCALE if size.guided else 1.0,
        )
        return replace(row, region=self.region(size))

    def region(self, size: RowSize) -> Region | None:
        """A box in the picture's upper left corner; None where all is computed."""
        height, width = size.box
        touched = torch.zeros(size.height, size.width, dtype=torch.bool)
        touched[:height, :width] = True
        return region(touched)

    def uses(self, sizes: tuple[RowSize, ...], rows: tuple[Row, ...]) -> tuple[Use, ...]:
        """What each sequence takes in its modes, on the device already; positive sequences first."""
        return by_sequence([self._uses_of(size, row) for size, row in zip(sizes, rows, strict=True)])

    def entry(self, height: int, width: int, text: int) -> Entry:
        """What a template run over such a picture leaves, in both forms, in the host's memory."""
        if (height, width) not in self._entries:
            family = self.checkpoint.family
            row = self.row(RowSize(height, width, text, (Mode.FULL,) * family.depth), 0)
            recorder = EntryRecorder(row.level, family.depth, tuple(Form), self._bits)
            with torch.inference_mode():
                denoise_step(family, assemble(family, [row]), [row], [Use(recorder=recorder)])
            self._entries[height, width] = recorder.entry()
        return self._entries[height, width]

    def slabs(self, entry: Entry, where: Region, own: int) -> Slabs:
        """Slabs of a sequence that computes `own` tokens; nothing is loaded yet."""
        return Slabs(entry, where, own, self.checkpoint.family, device=self._device)

    def _uses_of(self, size: RowSize, row: Row) -> tuple[Use, ...]:
        if row.region is None:
            return (Use(),) * len(row.prompts)
        entry = self.entry(size.height, size.width, size.text)
        return tuple(Use(Taken(size.modes, self.slabs(entry, row.region, own))) for own in row.own_tokens)

    def _noise(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._random)
