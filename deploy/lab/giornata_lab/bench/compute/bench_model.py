"""One checkpoint in this process: template runs and edits by the engine, and by two published caches on Flux Fill.

TeaCache (Liu et al., CVPR 2025) leaves out steps, FISEdit (Yu et al., AAAI 2024) tokens; neither is served.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from giornata.model_cards import read_model_card
from giornata.packed.flux import FluxForward, Modulation
from giornata.packed.packing import UNTRACED, Region, make_region, region_of
from giornata.scheduling.batch import Capacity, RowKey
from giornata.wire.models import Sampler
from giornata.wire.requests import EditParameters
from giornata.wire.resolution import cfg_scale
from giornata_denoiser.checkpoint import Checkpoint, load
from giornata_denoiser.engine.engine import Engine
from giornata_denoiser.engine.loading import device_for
from giornata_denoiser.engine.step_plan import ReuseOptions
from giornata_denoiser.families.flux import FluxBatch, FluxFill
from giornata_denoiser.families.network import build_row
from giornata_denoiser.rows.row import RecordingSpec, Row
from giornata_denoiser.rows.template import CachedTemplate, template_noise
from giornata_lab.bench.compute import engines
from giornata_lab.bench.compute.rows import changed
from giornata_lab.quality import cases
from giornata_prepost.checkpoint import FAMILIES
from giornata_prepost.images.masks import compute_set, effective_alpha, model_mask
from giornata_prepost.images.pictures import Pixels, Size


@dataclass(frozen=True, eq=False)
class Request:
    """One edit."""

    name: str
    image: Pixels
    mask: np.ndarray
    """(height, width) bool."""
    prompt: str
    seed: int


class BenchModel:
    """Encoders, autoencoder and network of one checkpoint folder, on the CPU in float32.

    Args:
        folder: the checkpoint.
        steps: of edits.
        guidance: scale of edits, embedded or classifier-free; None for the checkpoint's default.
        sampler: of edits; None for the checkpoint's own.
    """

    def __init__(
        self,
        folder: Path,
        *,
        steps: int,
        guidance: float | None = None,
        sampler: Sampler | None = None,
    ) -> None:
        card, device = read_model_card(folder, None), torch.device("cpu")
        self.images = FAMILIES[card.family](folder, card, device, torch.float32)
        self.checkpoint: Checkpoint = load(folder, dtype=torch.float32, device=device)
        self.family = self.checkpoint.family
        self.steps = steps
        self.guidance = card.default_guidance_scale if guidance is None else guidance
        self.sampler = sampler or self.family.schedule.default_sampler
        asked = EditParameters(prompt="any", guidance_scale=self.guidance)
        self._cfg_scale = cfg_scale(asked, card)

    def template(
        self,
        request: Request,
        recording: RecordingSpec,
        steps: int,
        noise: Tensor | None = None,
    ) -> CachedTemplate:
        """A run over the request's picture with an empty mask and an empty prompt, recorded at each of its steps.

        The product records with the same `noise` for all edits.
        """
        (tensors,) = self.images.encode_rows(
            request.image, np.zeros(request.mask.shape, np.uint8), [0], modes=True
        )
        if noise is None:
            noise = template_noise(*tensors["noise"].shape)
        tensors = {**tensors, "noise": noise}
        sampler = self.family.schedule.recorder
        row = self._row(request, self._text(request, ""), tensors, steps, sampler)
        (done,) = self.run([replace(row, records=recording)])
        return CachedTemplate(request.name, row.grid, done.entries)

    def edit(self, request: Request, halo: int | None) -> Row:
        """A row that computes everything: its region is not set.

        With a `halo` it has a template's noise outside of its region, as rows that take from one have; without, its
        own, as with `reuse=off` and of a miss.
        """
        where = None if halo is None else self.region(request, halo)
        (tensors,) = self.images.encode_rows(
            request.image,
            self._mask(request).astype(np.uint8) * np.uint8(255),
            [request.seed],
            draws=self.sampler.stochastic,
        )
        if where is not None:
            noise = CachedTemplate("any", (0, 0), ()).noise_beside(tensors["noise"], where)
            tensors = {**tensors, "noise": noise}
        text = self._text(request, request.prompt)
        if self._cfg_scale is not None:
            text |= self.images.encode_unguided(None, Size.of(request.mask))
        return self._row(request, text, tensors, self.steps, self.sampler)

    def region(self, request: Request, halo: int) -> Region | None:
        """The compute set of an edit, as its inspection tells it."""
        found = compute_set(self._mask(request), halo, self.checkpoint.card.pixel_multiple)
        return None if found is None else region_of(found)

    def _mask(self, request: Request) -> NDArray[np.bool_]:
        """(height, width): what the model is to repaint."""
        return model_mask(
            effective_alpha(request.mask, 0, 0.0), Size.of(request.mask), self.checkpoint.card.mask_grain
        )

    def _text(self, request: Request, prompt: str) -> dict[str, Tensor]:
        return self.images.encode_text(prompt, Size.of(request.mask))

    def run(self, rows: Iterable[Row], how: ReuseOptions | None = None) -> list[Row]:
        """The rows when they are done, in order."""
        numbered = [replace(row, key=RowKey(str(index), 1, 0)) for index, row in enumerate(rows)]
        return engines.drained(self._engine(how), numbered)

    def begun(self, row: Row, steps: int, how: ReuseOptions | None = None) -> Row:
        """`row` after its next `steps`, with what they teach it."""
        (found,) = engines.advanced(self._engine(how), [row], steps)
        return found

    def _engine(self, how: ReuseOptions | None) -> Engine:
        """Loads go to the family's device."""
        placed = replace(how or ReuseOptions(), device=device_for(self.family.device, engines.DEVICE_BYTES))
        ticks = count()
        capacity = Capacity(engines.ROWS, engines.TOKENS)
        return Engine(self.family, capacity, lambda: float(next(ticks)), reusing=placed)

    def decode(self, row: Row) -> Pixels:
        """The model's picture of a finished row."""
        multiple = self.checkpoint.card.pixel_multiple
        return self.images.decode(row.latent, Size(row.grid[1] * multiple, row.grid[0] * multiple))

    def _row(
        self,
        request: Request,
        text: dict[str, Tensor],
        tensors: dict[str, Tensor],
        steps: int,
        sampler: Sampler,
    ) -> Row:
        multiple = self.checkpoint.card.pixel_multiple
        height, width = (side // multiple for side in request.mask.shape)
        return build_row(
            self.family,
            RowKey(request.name, 1, 0),
            grid=(height, width),
            track=self.family.schedule.track(
                sampler=sampler, steps=steps, strength=1.0, cells=height * width
            ),
            text=text,
            conditioning=tensors,
            guidance_scale=self.guidance,
            true_cfg_scale=self._cfg_scale,
        )


def held_out(side: int, limit: int) -> list[Request]:
    """`limit` of the edits that the model was not trained on, of pictures of `side` pixels."""
    slots = [slot for slot in cases.slots() if slot.side == side]
    return [
        Request(slot.name, case.scene.before, np.asarray(case.scene.mask), case.scene.caption, slot.index)
        for slot in cases.spread(slots, limit)
        for case in [cases.draw(slot)]
    ]


class TeaCachePolynomial(NamedTuple):
    """Estimates by the inputs of two steps how far the network's outputs are apart, and how well that was fitted."""

    coefficients: tuple[float, ...] = (1.0, 0.0)
    """The highest power first."""
    r2: float = 1.0
    pairs: int = 0

    def at(self, distance: float) -> float:
        """The estimated distance of outputs; a distance is never below 0, as a polynomial may be."""
        return max(0.0, float(np.polyval(self.coefficients, distance)))


@dataclass(eq=False)
class TeaCache:
    """TeaCache's rule for one row at a time: which steps pass the blocks.

    Rescaled distances of the first block's modulated input from step to step add up. While they are below the threshold
    a step adds to its input what the blocks added last. The first and the last step are always computed.
    """

    polynomial: TeaCachePolynomial = field(default_factory=TeaCachePolynomial)
    threshold: float = 0.0
    residual: Tensor | None = None
    """(tokens, inner_dim): what the blocks added in the last computed step."""
    computed: int = 0
    """Steps of all rows that passed the blocks."""
    pairs: list[tuple[float, float]] = field(default_factory=list)
    """Distances from step to step, of the input and of the network's output."""
    _distance: float = 0.0
    _sum: float = 0.0
    _input: Tensor | None = None
    _output: Tensor | None = None

    def computes(self, modulated: Tensor, step: int, steps: int) -> bool:
        """Return whether this step passes the blocks; `modulated` is (tokens, inner_dim)."""
        if step and self._input is not None:
            self._distance = relative_l1(modulated, self._input)
        self._input, self._sum = modulated, self._sum + self.polynomial.at(self._distance)
        found = step in {0, steps - 1} or self._sum >= self.threshold
        if found:
            self._sum, self.computed = 0.0, self.computed + 1
        return found

    def answered(self, output: Tensor, step: int) -> None:
        """Take note of what the network answers, (tokens, channels)."""
        if step and self._output is not None:
            self.pairs.append((self._distance, relative_l1(output, self._output)))
        self._output = output


def relative_l1(now: Tensor, before: Tensor) -> float:
    """Mean absolute difference over the mean absolute value before."""
    return float((now - before).abs().mean() / before.abs().mean())


class _TeaCacheForward(FluxForward):
    """A forward of one sequence in full, by a rule."""

    rule: TeaCache
    place: tuple[int, int]
    """Which step it is, and of how many."""

    def passed(self, pairs: Sequence[Any], *others: Any) -> Tensor:
        """See :meth:`giornata.packed.forward.PackedForward.passed`."""
        image: Tensor = others[-2]
        vectors, eps = self.modulation.double(0)[0][:2], pairs[0].norm1.norm.eps
        segments = self.tokens.now.layout.image
        modulated = self._parts.elementwise.modulated(image, vectors, segments, eps)
        if not self.rule.computes(modulated, *self.place) and self.rule.residual is not None:
            return image + self.rule.residual
        behind = super().passed(pairs, *others)
        self.rule.residual = behind - image
        return behind


class TeaCacheFill(FluxFill):
    """Flux Fill's network under `rule`; its batches have one row, without a template."""

    rule: TeaCache

    def predict(
        self,
        batch: FluxBatch,
        latents: Tensor,
        conditioning: Sequence[Mapping[str, Tensor]],
        steps: Sequence[int],
        **_: Any,
    ) -> Tensor:
        """See :meth:`giornata_denoiser.families.network.Network.predict`."""
        (step,), (vectors,) = steps, batch.modulation
        modulation = Modulation(self.transformer, batch.modulation, steps)
        forward = _TeaCacheForward(self._parts, batch.sequences, modulation, (), trace=UNTRACED)
        forward.rule, forward.place = self.rule, (step, len(vectors))
        output = forward.run(batch.text, self.model_input(latents, conditioning), batch.answered)
        self.rule.answered(output, step)
        return output


def with_teacache(model: BenchModel, rule: TeaCache) -> BenchModel:
    """`model`, of Flux Fill, with its network under `rule`."""
    known: Any = model.family.network
    found, network = copy.copy(model), TeaCacheFill(known.transformer)
    found.family, network.rule = replace(model.family, network=network), rule
    return found


def calibrate(model: BenchModel, rows: Iterable[Row]) -> TeaCachePolynomial:
    """TeaCache's polynomial, of order 4 as published, by least squares over all steps of `rows` but the first ones."""
    rule = TeaCache()
    for row in rows:
        with_teacache(model, rule).run([row])
    inputs, outputs = np.array(rule.pairs).T
    coefficients = np.polyfit(inputs, outputs, 4)
    off = outputs - np.polyval(coefficients, inputs)
    return TeaCachePolynomial(tuple(coefficients.tolist()), float(1 - off.var() / outputs.var()), len(inputs))


def differing(row: Row, template: CachedTemplate, threshold: float) -> Region | None:
    """The tokens whose latent differs from the cached run's by `threshold` or more of the largest; None where all do.

    `row` has made its first steps with the noise of the cached run.
    """
    cached = changed(row, template=template).picture_at(row.step)
    own = row.track.picture(row.latent, row.inputs.conditioning["noise"], row.step)
    if cached is None or own is None:
        raise ValueError(f"nothing is known of the picture in the latent before step {row.step}")
    far = (own - cached).abs().mean(1)  # of latents they are as many times as large for all tokens
    return make_region((far >= threshold * far.max()).view(row.grid))


def fisedit_like(model: BenchModel, row: Row, template: CachedTemplate, threshold: float, first: int) -> Row:
    """`row` when it is done: its `first` steps in full, the others of the tokens that are :func:`differing` by then.

    The other tokens' keys and values are the cached run's, uncorrected: FISEdit is given no mask, and finds its own.
    """
    begun = model.begun(row, first)
    where = differing(begun, template, threshold)
    (done,) = model.run([begun if where is None else changed(begun, region=where, template=template)])
    return done
