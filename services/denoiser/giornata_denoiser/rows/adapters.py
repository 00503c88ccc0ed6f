"""The LoRAs and ControlNets of a row: which of them act in a step, and what they cost. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from giornata.planning.operations import control_work
from giornata.wire.adapters import ControlWork


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


def name_of(loras: tuple[RowLora, ...]) -> str:
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


NONE = Adapters()
