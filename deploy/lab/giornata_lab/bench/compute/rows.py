"""Rows of noise for a transformer with random weights: what their values are does not matter, their shapes do."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor

from giornata.packed.packing import make_region, with_companions
from giornata.scheduling.batch import RowKey
from giornata.tensors import PROMPT_MASK
from giornata_denoiser.families.network import ModelFamily, build_row, text_shapes
from giornata_denoiser.rows.row import RecordingSpec, Row, RowInputs, RowReuse, RowWishes
from giornata_denoiser.rows.template import CachedTemplate, template_noise
from giornata_lab.bench.compute import engines
from giornata_lab.bench.compute.engines import DEFAULT, BenchSetting
from giornata_lab.bench.compute.workload import WorkloadEdit, grown, square

GROUPS: Final = {
    value.name: name
    for name, group in (("inputs", RowInputs), ("reuse", RowReuse), ("wishes", RowWishes))
    for value in fields(group)
}
"""Which of a row's groups holds a value."""


def changed(row: Row, **values: Any) -> Row:
    """`row` with other values of its fields, and of those of its groups."""
    own = {name: value for name, value in values.items() if name not in GROUPS}
    for group in {GROUPS[name] for name in values.keys() - own.keys()}:
        inner = {name: value for name, value in values.items() if GROUPS.get(name) == group}
        own[group] = replace(getattr(row, group), **inner)
    return replace(row, **own)


class Rows:
    """Makes the rows of edits, and records the templates that they take from.

    Args:
        family: that will denoise them.
        side: of the pictures, in tokens.
        text_tokens: of every prompt.
        setting: how they reuse.
    """

    def __init__(
        self, family: ModelFamily, side: int, text_tokens: int, setting: BenchSetting = DEFAULT
    ) -> None:
        self.family, self.side, self.text_tokens, self.setting = family, side, text_tokens, setting
        self.padding_tokens = 0
        """How many of a prompt's tokens are padding; rows that reuse keep them from step to step."""
        self.template = lru_cache(maxsize=None)(self._template)
        """The template of a number; recorded when it is asked for first."""
        self.text = lru_cache(maxsize=None)(self._text)
        """Prompt embeddings of edits of a template."""
        self.picture = lru_cache(maxsize=None)(self._picture)
        """(tokens, channels): a template's latents."""

    @property
    def tokens(self) -> int:
        """Tokens of a picture."""
        return self.side * self.side

    @property
    def channels(self) -> int:
        """Channels of a token of the latent."""
        return self.family.network.conditioning["noise"]

    def row(self, edit: WorkloadEdit, *, reuse: bool, picture: Tensor | None = None) -> Row:
        """The row of `edit`: in full, or its region alone beside its template.

        `picture` are its latents where they were just encoded.
        """
        if not reuse:
            return self._edited(edit, self._noise(edit), picture)
        row = self.masked(edit, picture)
        return row if row.region is None else changed(row, template=self.template(edit.template))

    def masked(self, edit: WorkloadEdit, picture: Tensor | None = None) -> Row:
        """The row of `edit` with its region and no template yet; in full where its mask leaves nothing outside."""
        where = make_region(grown(square(edit, self.side), self.setting.halo))
        if where is None:
            return self._edited(edit, self._noise(edit), picture)
        noise = CachedTemplate("any", (0, 0), ()).noise_beside(self._noise(edit), where)
        made = self._edited(edit, noise, picture)
        return changed(
            made, region=with_companions(where, made.inputs.companions), keeps_padding=self.padding_tokens > 0
        )

    def computed(self, edit: WorkloadEdit) -> int:
        """Tokens of its picture that are computed with reuse, the halo's among them."""
        where = make_region(grown(square(edit, self.side), self.setting.halo))
        return self.tokens if where is None else len(where.computed)

    def _noise(self, edit: WorkloadEdit) -> Tensor:
        return torch.randn(
            self.tokens, self.channels, generator=torch.Generator().manual_seed(edit.index + 1)
        )

    def _edited(self, edit: WorkloadEdit, noise: Tensor, picture: Tensor | None) -> Row:
        latents = self.picture(edit.template) if picture is None else picture
        mask = square(edit, self.side).view(-1, 1).expand(-1, self.channels).float()
        return self._built(edit.index, edit.steps, edit.template, latents, noise, mask)

    def _template(self, index: int) -> CachedTemplate:
        setting = self.setting
        noise = template_noise(self.tokens, self.channels)
        mask = torch.zeros(self.tokens, self.channels)
        row = self._built(-1, setting.levels, index, self.picture(index), noise, mask)
        recording = RecordingSpec(frozenset({setting.form}), setting.bits)
        with engines.engine_with(self.family) as engine:
            (done,) = engines.drained(engine, [replace(row, records=recording)])
        recorded = CachedTemplate(f"template{index}", row.grid, done.entries)
        return recorded.pinned() if self.family.device.type == "cuda" else recorded  # as a denoiser keeps it

    def _text(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        text = {
            name: torch.randn(*shape, generator=generator)
            for name, shape in text_shapes(self.family, self.text_tokens).items()
        }
        live = self.text_tokens - self.padding_tokens
        return {**text, PROMPT_MASK: (torch.arange(self.text_tokens) < live).to(torch.uint8)}

    def _picture(self, index: int) -> Tensor:
        return torch.randn(self.tokens, self.channels, generator=torch.Generator().manual_seed(-index - 1))

    def _built(
        self, index: int, steps: int, template: int, latents: Tensor, noise: Tensor, mask: Tensor
    ) -> Row:
        return build_row(
            self.family,
            RowKey(f"edit{index}", 1, 0),
            grid=(self.side, self.side),
            track=self.family.schedule.track(
                sampler=self.family.schedule.default_sampler, steps=steps, strength=1.0, cells=self.tokens
            ),
            text=self.text(template),
            conditioning={"noise": noise, "image_latents": latents, "mask": mask},
            guidance_scale=3.5,
        )
