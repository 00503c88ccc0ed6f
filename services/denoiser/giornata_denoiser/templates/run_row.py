"""The row of a template run: a picture with an empty mask and an empty prompt, from the noise that all edits share."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from giornata import tensors
from giornata.blobs import BlobStore
from giornata.scheduling.batch import RowKey
from giornata.wire.jobs import BlobRef, Inspection
from giornata_denoiser.checkpoint import Checkpoint
from giornata_denoiser.config import DenoiserConfig
from giornata_denoiser.families.rows import build_row
from giornata_denoiser.rows.row import RecordingSpec, Row
from giornata_denoiser.rows.template import template_noise
from giornata_denoiser.templates.identity import Wanted


@dataclass(frozen=True)
class RunInputs:
    """What a template run is computed from."""

    inspection: Inspection
    empty_text: BlobRef
    conditioning: BlobRef
    """The conditioning of any edit of the picture."""


@dataclass(frozen=True, eq=False)
class RunRows:
    """Makes background rows."""

    config: DenoiserConfig
    checkpoint: Checkpoint
    blobs: BlobStore

    async def row(self, key: RowKey, asked: Wanted, inputs: RunInputs) -> Row:
        """The row that records `asked`; it is built in a worker thread.

        Raises:
            InputLost: an input is no longer in the blob store.
            SchemaMismatch: the inputs do not fit the checkpoint.
        """
        text, conditioning = [
            tensors.unpack(await self.blobs.get(ref)) for ref in (inputs.empty_text, inputs.conditioning)
        ]
        return await asyncio.to_thread(self._built, key, asked, inputs.inspection, text, conditioning)

    def _built(
        self,
        key: RowKey,
        asked: Wanted,
        inspection: Inspection,
        text: Mapping[str, Tensor],
        conditioning: Mapping[str, Tensor],
    ) -> Row:
        family, card, config = self.checkpoint.family, self.checkpoint.card, self.config
        noise = template_noise(*conditioning["noise"].shape)
        height, width = inspection.model_height, inspection.model_width
        row = build_row(
            family,
            key,
            grid=(height // card.pixel_multiple, width // card.pixel_multiple),
            track=asked.track,
            text=text,
            conditioning={**family.network.unmasked(conditioning), "noise": noise},
            guidance_scale=card.default_guidance_scale or 0.0,
        )
        what = RecordingSpec(frozenset({config.template_form}), config.template_bits, asked.first_block)
        return replace(row, records=what)
