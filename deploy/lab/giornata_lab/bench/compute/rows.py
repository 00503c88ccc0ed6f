"""Rows of noise for a network with random weights, and batches of them at one step: their values do not matter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor

from giornata.packed.low_rank import SequenceLoras
from giornata.packed.packing import BlockInputs, CachedTokens, make_region, with_companions
from giornata.planning.operations import step_work
from giornata.scheduling.batch import RowKey
from giornata.tensors import PROMPT_MASK
from giornata.wire.values import BlockMode
from giornata_denoiser.engine.batch_tensors import assemble, place_inputs, with_low_ranks
from giornata_denoiser.engine.denoise_step import denoise_step
from giornata_denoiser.engine.loading import device_for
from giornata_denoiser.engine.slabs import Slabs
from giornata_denoiser.families.network import ModelFamily, build_row, text_shapes
from giornata_denoiser.rows.row import RecordingSpec, Row, RowInputs, RowReuse, RowWishes
from giornata_denoiser.rows.template import CachedBlock, CachedTemplate, Entry, StoredTensor, template_noise
from giornata_lab.bench.compute import engines
from giornata_lab.bench.compute.engines import DEFAULT, DEVICE_BYTES, BenchSetting
from giornata_lab.bench.compute.workload import WorkloadEdit, grown, multiplications, square

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


MASK: Final = 0.11
"""The production trace's mean ratio."""
STEPS: Final = 4


class Batches:
    """Makes steps of masked rows of one picture, each with a mask of the ratio `mask` at its own place."""

    def __init__(self, rows: Rows, mask: float = MASK) -> None:
        self._rows, self._family, self._mask = rows, rows.family, mask
        self._entry = self._made_entry()

    def prepared(
        self, count: int, *, masked: bool, low_ranks: Sequence[SequenceLoras | None] = ()
    ) -> Callable[[], object]:
        """A step of `count` rows, under LoRAs or none; what it takes is on the device from its first call on."""
        family = self._family
        rows = [self._row(index, count) for index in range(count)]
        with torch.inference_mode():
            sets = low_ranks or [None] * count
            placed = [place_inputs(row, family, each) for row, each in zip(rows, sets, strict=True)]
            assembly = assemble(family, rows, placed)
        uses: Sequence[BlockInputs] = ()
        if masked:
            uses = [BlockInputs(CachedTokens(self._entry.modes, self._slabs(row))) for row in rows]
        if low_ranks:
            uses = with_low_ranks(uses or (BlockInputs(),) * count, rows, low_ranks)

        def step() -> object:
            with torch.inference_mode():
                return denoise_step(family, assembly, rows, uses)

        return step

    def kept_bytes(self, count: int) -> int:
        """Bytes of the slabs of `count` masked rows, which stay from step to step."""
        made = [self._slabs(self._row(index, count)) for index in range(count)]
        modes = [(block, mode) for block, mode in enumerate(self._entry.modes) if mode is not BlockMode.FULL]
        return int(sum(slabs.sizes(mode)[block] for slabs in made for block, mode in modes))

    def tera_operations(self, count: int, *, masked: bool) -> float:
        """See :func:`tera_operations`; of a step in full, or of one that takes keys and values."""
        rows = [self._row(index, count) for index in range(count)]
        return tera_operations(self._family, rows, BlockMode.KV if masked else BlockMode.FULL)

    def _slabs(self, row: Row) -> Slabs:
        if row.region is None:
            raise ValueError("the mask leaves nothing to be reused; ask for a larger picture")
        device = device_for(self._family.device, DEVICE_BYTES)
        return Slabs(self._entry, row.region, row.own_tokens[0], self._family, device=device)

    def _row(self, index: int, count: int) -> Row:
        where = (index + 0.5) / count
        row = self._rows.masked(WorkloadEdit(index, 0, self._mask, where, 1 - where, STEPS))
        return replace(row, latent=row.latent.to(self._family.device))

    def _made_entry(self) -> Entry:
        """All blocks keep keys and values; each has tensors of its own name over one memory on the host."""
        bits, width = self._rows.setting.bits, self._family.specs[0].parts["key"]
        where = self._row(0, 1).region
        if where is None:
            raise ValueError("the mask leaves nothing to be reused; ask for a larger picture")
        tokens = len(where.computed) + len(where.outside)  # those beside the picture's too
        kept = _quantised(tokens, width, bits, self._family)
        blocks = tuple(CachedBlock(replace(kept), replace(kept)) for _ in range(self._family.depth))
        return Entry(0.5, blocks)


def tera_operations(family: ModelFamily, rows: Sequence[Row], mode: BlockMode) -> float:
    """Floating-point operations of a step of `rows`, in 10^12, whose blocks all have this `mode`; padding is kept where
    a step is masked."""
    shapes = [shape for row in rows for shape in row.shaped(padding_kept=mode is not BlockMode.FULL)]
    modes = [(mode,) * family.operations.blocks] * len(shapes)
    return 2 * multiplications(step_work(family.operations, shapes, modes)) / 1e12


def _quantised(tokens: int, channels: int, bits: int, family: ModelFamily) -> StoredTensor:
    """Zeros as :func:`giornata_denoiser.rows.template.store` keeps them: on the host, but on `meta` for `meta`."""
    where = family.device if family.device.type == "meta" else "cpu"
    if bits == 0:
        made = StoredTensor(torch.zeros(tokens, channels, dtype=family.dtype, device=where))
    else:
        data = torch.zeros(tokens, channels * bits // 8, dtype=torch.uint8, device=where)
        made = StoredTensor(data, *torch.zeros(2, channels, device=where).unbind())
    return made.pinned() if family.device.type == "cuda" else made
