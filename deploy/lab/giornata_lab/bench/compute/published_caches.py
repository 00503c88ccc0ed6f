"""Two published caches on Flux Fill's network, for tables beside ours; neither is served.

TeaCache (Liu et al., CVPR 2025) leaves out steps, FISEdit (Yu et al., AAAI 2024) tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from giornata.packed.flux import FluxForward, Modulation
from giornata.packed.packing import UNTRACED, Region, make_region
from giornata_denoiser.families.flux import FluxBatch, FluxFill
from giornata_denoiser.rows.row import Row
from giornata_denoiser.rows.template import CachedTemplate
from giornata_lab.bench.compute.bench_model import BenchModel
from giornata_lab.bench.compute.rows import changed


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
