"""A step as an instance sees it, from when it is asked for until its last sample has been told."""

from __future__ import annotations

import threading
from typing import Protocol

import torch
from torch import Tensor

from giornata.control.link.slabs import DTYPES
from giornata.wire.control_steps import ResidualsRequest

CODE_CHARS, MESSAGE_CHARS = 64, 2000


class DenoiserPeer(Protocol):
    """The denoiser, as a step writes to it."""

    @property
    def lost(self) -> bool:
        """Whether it is gone."""

    def give(self, ask: ResidualsRequest, index: int, sample: Tensor) -> None:
        """Write a sample to its place, and tell."""

    def give_up(self, ask: ResidualsRequest, code: str, message: str) -> None:
        """Tell that the step will not be computed."""

    def forget(self, number: int) -> None:
        """The step has ended here."""


class ControlStepRequest:
    """A step that a denoiser wants. A listener makes it; any thread may use it.

    What is told after the denoiser has gone, or has let go of the step, is dropped.
    """

    def __init__(self, ask: ResidualsRequest, token: str, latents: Tensor, peer: DenoiserPeer) -> None:
        self.token = token
        """Which the denoiser opened its data path with; a secret."""
        self.row = ask.row
        """Its key, as the control plane opened it."""
        self.step = ask.step
        self.level = ask.level
        """Noise level."""
        self.whole = ask.whole
        """Whether samples of all tokens are wanted."""
        self.latents = latents
        """(tokens, channels) in host memory or on the denoiser's device; anything, once the step is `gone`."""
        self.shapes = tuple(zip(ask.tokens[1:], ask.channels[1:], strict=True))
        """(tokens, channels) of each sample."""
        self.dtype: torch.dtype = DTYPES[ask.dtype]
        """Dtype of the samples."""
        self._ask, self._peer = ask, peer
        self._left = set(range(len(self.shapes)))
        """Samples that have not been answered; none when the step has ended."""
        self._writing = threading.Lock()
        """Held while the slab is written to, so that nothing is once :meth:`let_go` has returned."""

    @property
    def gone(self) -> bool:
        """Whether nobody waits for it any more: the denoiser is gone or has let go of it, or it has been answered."""
        return not self._left or self._peer.lost

    def answer(self, index: int, sample: Tensor) -> None:
        """Copy sample `index` to its place and tell the denoiser.

        Args:
            index: of the sample; each is answered once, in any order.
            sample: (tokens, channels) as `shapes` tells; of any dtype, and on any device.

        Raises:
            ValueError: another shape, or a sample that was answered, or not asked for.
        """
        with self._writing:
            if self.gone:
                return
            if index not in self._left:
                raise ValueError(f"sample {index} is answered or unknown; {len(self.shapes)} were asked for")
            if tuple(sample.shape) != self.shapes[index]:
                raise ValueError(f"sample {index} is {tuple(sample.shape)}, not {self.shapes[index]}")
            self._peer.give(self._ask, index, sample)
            self._left.remove(index)
            if not self._left:
                self._peer.forget(self._ask.number)

    def fail(self, code: str, message: str) -> None:
        """Tell the denoiser that the samples which have not been answered will not come.

        Args:
            code: stable.
            message: what was received, and what is accepted.
        """
        with self._writing:
            if not self.gone:
                self._left.clear()
                self._peer.give_up(self._ask, code[:CODE_CHARS], message[:MESSAGE_CHARS])
                self._peer.forget(self._ask.number)

    def let_go(self) -> None:
        """Nothing is written any more when this returns: the denoiser has asked for that, or is gone."""
        with self._writing:
            self._left.clear()
