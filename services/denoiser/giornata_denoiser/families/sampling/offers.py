"""What a schedule refuses of a request."""

from __future__ import annotations

from collections.abc import Sequence

from giornata.wire.errors import InvalidField
from giornata.wire.samplers import Sampler


def check_offer(sampler: Sampler, offered: Sequence[Sampler]) -> None:
    """Raise InvalidField where `sampler` is not `offered`."""
    if sampler not in offered:
        raise InvalidField(
            f"The model does not take the sampler {sampler}.",
            field="sampler",
            received=sampler,
            accepted=", ".join(offered),
        )


def check_steps(steps: int, least: int) -> None:
    """Raise InvalidField where `steps` are fewer than a schedule is made of."""
    if steps < least:
        raise InvalidField(
            "The model's noise levels take more steps.",
            field="num_inference_steps",
            received=steps,
            accepted=f"at least {least}",
        )


def check_strength(kept: int, steps: int, strength: float) -> None:
    """Raise InvalidField where nothing is `kept` of so many steps."""
    if kept < 1:
        raise InvalidField(
            f"strength times {steps} steps leaves no step to compute.",
            field="strength",
            received=strength,
            accepted=f"at least {1 / steps:.3f}",
        )
