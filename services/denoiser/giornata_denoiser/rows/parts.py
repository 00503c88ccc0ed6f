"""The parts of a row that change what its steps compute: LoRAs, ControlNets, and step caches. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from giornata.planning.operations import control_work
from giornata.wire.adapters import ControlWork
from giornata.wire.models import StepCache, TaylorSeerSchedule
from giornata.wire.requests import EditParameters

if TYPE_CHECKING:
    from giornata_denoiser.rows.row import Row

# LoRAs and ControlNets: which of them act in a step, and what they cost.


@dataclass(frozen=True, order=True)
class RowLora:
    """A LoRA of a row."""

    digest: str
    """sha-256 of its canonical file."""
    scale: float = 1.0
    rank: int = 0
    """The largest of any module."""
    modules: int = 0
    """How many modules of the denoising network it changes."""
    size_bytes: int = 0
    """Size of its file."""
    weights: float = 0.0
    """In the factors of those modules."""


def lora_set_name(loras: tuple[RowLora, ...]) -> str:
    """The name of a set: the same for the same LoRAs and scales."""
    return ",".join(f"{lora.digest}*{lora.scale!r}" for lora in loras)


@dataclass(frozen=True)
class RowControl:
    """A ControlNet of a row."""

    model: str
    digest: str
    """Digest of its checkpoint."""
    scale: float
    first_step: int
    """Acts in this step of the track and those after it."""
    end_step: int
    """Up to this one, which it does not see."""
    mode: int | None = None
    work: ControlWork | None = None
    """What this process computes of it; None where another one does."""
    image: Tensor | None = field(default=None, compare=False, repr=False)
    """What it sees: (tokens, channels), or pixels (3, height, width). None where this process cannot compute it."""


@dataclass(frozen=True)
class Adapters:
    """All adapters of one row."""

    loras: tuple[RowLora, ...] = ()
    """Sorted: rows with equal sets have equal values."""
    loras_from: int = 0
    """The first step in which they act: 0 but where the row did not wait for them."""
    controls: tuple[RowControl, ...] = ()
    """In the request's order."""
    joins_early: bool = True
    """Whether LoRAs act from an earlier step on where they are loaded by then; not of a request that tells the step."""

    def acting(self, step: int) -> tuple[RowLora, ...]:
        """The LoRAs that act in a step."""
        return self.loras if step >= self.loras_from else ()

    def low_rank(self, step: int) -> float:
        """Weights in the factors of the LoRAs that act in `step`."""
        return sum(lora.weights for lora in self.acting(step))

    def control(self, step: int, text: int, image: int, sequences: int) -> float:
        """Multiplications in `step` of ControlNets in this process, for one of a row's `sequences`.

        It has so many `text` tokens, and the picture so many `image` tokens.
        """
        acting = zip(self.controls, self.controlling(step), strict=True)
        here = (net.work for net, acts in acting if acts and net.work is not None)
        return sum(control_work(work, text=text, image=image, sequences=sequences) for work in here)

    def controlling(self, step: int) -> tuple[bool, ...]:
        """By ControlNet, whether it acts in a step."""
        return tuple(bool(net.scale) and net.first_step <= step < net.end_step for net in self.controls)

    def seeing(self, images: Sequence[Tensor]) -> Adapters:
        """The same adapters with what their ControlNets see, by ControlNet."""
        seen = zip(self.controls, images, strict=True)
        return replace(self, controls=tuple(replace(use, image=image) for use, image in seen))

    def learned_under(self, step: int) -> str | None:
        """What a correction that is learned in a step belongs to, beside template and mask; empty without adapters.

        None where it belongs to this row alone: what a ControlNet adds follows a picture of the row's own.
        """
        if self.controls:
            return None
        return "+".join(f"{lora.digest}*{lora.scale!r}" for lora in self.acting(step))


NO_ADAPTERS: Final = Adapters()


# Step caches: by which rule a row computes fewer steps, and what it remembers for that.


@dataclass(frozen=True)
class TaylorRule:
    """All but some steps take an output that is extrapolated from those of the steps that were computed.

    TaylorSeer (Liu et al., ICCV 2025) on the network's output: `TaylorSeerCacheConfig` of diffusers with
    `use_lite_mode`, and the same steps.
    """

    steps: TaylorSeerSchedule
    """Which of the steps that the row makes here are computed."""
    order: int
    """Order of the highest finite difference."""
    known: TaylorExpansion | None = None
    """What the row remembers of computed steps, where its latent is; None of a row that begins or goes on here."""


def rule_of(resolved: EditParameters) -> TaylorRule | None:
    """The rule that resolved parameters ask for; None for none."""
    interval, warmup = resolved.step_cache_interval, resolved.step_cache_warmup
    order = resolved.step_cache_order
    if resolved.step_cache is StepCache.OFF or interval is None or warmup is None or order is None:
        return None
    return TaylorRule(TaylorSeerSchedule(interval, warmup), order)


@dataclass(frozen=True, eq=False)
class TaylorExpansion:
    """A row's outputs of the network, extrapolated by finite differences."""

    began: int
    """The row's step from which on it is made."""
    step: int
    """The last computed step."""
    factors: tuple[Tensor, ...]
    """(sequences, computed, channels) float32 each: the output, and its differences a step, order by order."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all factors."""
        return sum(factor.nbytes for factor in self.factors)

    def copied(self, device: torch.device) -> TaylorExpansion:
        """A copy on `device`."""
        return replace(self, factors=tuple(each.to(device, copy=True) for each in self.factors))

    def at(self, step: int) -> Tensor:
        """(sequences, computed, channels) float32: what the network is taken to answer in a later step."""
        ahead = step - self.step
        first, *others = self.factors
        found = first
        for order, factor in enumerate(others, 1):
            found = found + factor * (ahead**order / math.factorial(order))
        return found


def expanded(before: TaylorExpansion | None, step: int, output: Tensor, order: int) -> TaylorExpansion:
    """`before` with the output, (sequences, computed, channels), of a computed step; made again where shapes differ."""
    factors = [output.float()]
    if before is not None and before.factors[0].shape == output.shape:
        for known in before.factors[:order]:
            factors.append((factors[-1] - known) / (step - before.step))
        return TaylorExpansion(before.began, step, tuple(factors))
    return TaylorExpansion(step, step, tuple(factors))


def extrapolated(row: Row, *, learns: bool) -> TaylorExpansion | None:
    """Return what the next step of `row` takes its output from; None where the network computes it.

    What others or later steps take is always computed: keys and values that are renewed, recordings, and corrections
    where the engine `learns` them.
    """
    rule, known = row.step_cache, row.cached
    # Later steps take what its first one here makes.
    begins = not row.begun and (row.region is not None or any(row.inputs.prefix))
    if rule is None or known is None or begins or _forgotten(row):
        return None
    reuse = row.reuse
    teaches = learns and reuse.template is not None and row.region is not None and reuse.corrections is None
    renews = row.renews and not row.masked
    if teaches or renews or row.records is not None or rule.steps.computes(row.step - known.began):
        return None
    return known


def skipped_steps(row: Row) -> int:
    """Return how many of its remaining steps `row` will extrapolate."""
    rule = row.step_cache
    if rule is None:
        return 0
    began, here = row.step if rule.known is None else rule.known.began, rule.steps
    return here.skipped(row.steps - began) - here.skipped(row.step - began)


def remember_output(row: Row, outputs: Tensor | None) -> TaylorExpansion | None:
    """Return what `row` remembers behind a step that was computed.

    `outputs` are (sequences, computed, channels), what the network answered; None where nothing is extrapolated.
    """
    rule = row.step_cache
    if rule is None or outputs is None:
        return None
    return expanded(None if _forgotten(row) else rule.known, row.step, outputs, rule.order)


def cache_bytes(row: Row) -> int:
    """The most bytes that a row remembers for its step cache."""
    orders = 0 if row.step_cache is None else row.step_cache.order + 1
    return len(row.inputs.prompts) * row.latent.shape[-1] * row.computed_tokens * 4 * orders


def _forgotten(row: Row) -> bool:
    """Return whether what `row` remembers says nothing of its next step."""
    return bool(row.adapters.loras) and row.step == row.adapters.loras_from
