"""What ControlNets have to know of the networks that they add to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from giornata.control.protocol import ControlText
from giornata.wire.controlnets import ControlBase
from giornata_denoiser.families.protocol import Network
from giornata_denoiser.rows.row import Prompt


@runtime_checkable
class ControlledNetwork(Protocol):
    """A network for which diffusers has ControlNets."""

    def control_base(self, token_pixels: int) -> ControlBase:
        """What a ControlNet has to fit; a token has `token_pixels` pixels of the picture a side."""

    def control_text(self, prompt: Prompt) -> ControlText:
        """The text of one sequence, as ControlNets see it."""


@dataclass(frozen=True)
class ControlNetTarget:
    """A network that ControlNets add to."""

    base: ControlBase
    text: Callable[[Prompt], ControlText]
    """The text of one sequence, as ControlNets see it."""


def controlled(network: Network, token_pixels: int) -> ControlNetTarget | None:
    """What ControlNets have to know of a `network`; None where diffusers has none for it.

    A token has `token_pixels` pixels of the picture a side.
    """
    if not isinstance(network, ControlledNetwork):
        return None
    return ControlNetTarget(network.control_base(token_pixels), network.control_text)
