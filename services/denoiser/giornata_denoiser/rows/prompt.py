"""An encoded prompt as rows hold it: its family knows what is in it."""

from __future__ import annotations

from typing import Protocol, Self

import torch


class Prompt(Protocol):
    """What one sequence of a row takes from its text, and all else that stays the same over its steps."""

    @property
    def joint_tokens(self) -> int:
        """Text tokens that pass the network's blocks beside the picture's; 0 where they only are attended to."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all its tensors."""

    def to(self, device: torch.device) -> Self:
        """The same prompt on `device`; itself where it is there already."""
