"""What a row has of adapters: a value, known before any of them is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from giornata.planning.operations import control_work, low_rank_weights


@dataclass(frozen=True, order=True)
class RowLora:
    """A LoRA of a row."""

    digest: str
    """sha-256 of its canonical file."""
    scale: float = 1.0
    rank: int = 0
    """The largest of any module."""
    modules: int = 0
    """Of the denoising network that it changes."""
    size_bytes: int = 0
    """Of its file."""


@dataclass(frozen=True)
class RowControl:
    """A ControlNet of a row."""

    model: str
    digest: str
    """Of its checkpoint."""
    scale: float
    first_step: int
    """Acts in this step of the track and those after it."""
    end_step: int
    """Up to this one, which it does not see."""
    mode: int | None = None
    weight_bytes: int = 0
    """Of its checkpoint, where this process computes it; 0 where another one does."""


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
        return low_rank_weights(lora.size_bytes for lora in self.acting(step))

    def control(self, step: int, tokens: int) -> float:
        """Multiplications in `step` of ControlNets in this process, for a sequence of so many tokens."""
        acting = (net for net in self.controls if net.scale and net.first_step <= step < net.end_step)
        return sum(control_work(net.weight_bytes, tokens) for net in acting)

    def controlling(self, step: int) -> tuple[bool, ...]:
        """By ControlNet, whether it acts in a step."""
        return tuple(bool(net.scale) and net.first_step <= step < net.end_step for net in self.controls)

    def learned_under(self, step: int) -> str | None:
        """What a correction that is learned in a step belongs to, beside template and mask; empty without adapters.

        None where it belongs to this row alone: what a ControlNet adds follows a picture of the row's own.
        """
        if self.controls:
            return None
        return "+".join(f"{lora.digest}*{lora.scale!r}" for lora in self.acting(step))


NONE = Adapters()
