"""What the engine asks of a model family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from giornata.packed.sequences import Rotary, Sequences
from giornata.packed.tracing import UNTRACED, Tracing
from giornata.packed.uses import Use


class Family(Protocol):
    """One kind of checkpoint and the diffusers pipeline that it equals."""

    @property
    def device(self) -> torch.device:
        """Where the transformer is."""

    @property
    def dtype(self) -> torch.dtype:
        """The transformer's, and that of every row's tensors."""

    @property
    def conditioning(self) -> Mapping[str, int]:
        """Channels of the tensors every row carries, by name; `noise` and `image_latents` are among them."""

    @property
    def prompt_channels(self) -> tuple[int, int]:
        """Channels of prompt embeddings and of pooled prompt embeddings."""

    def rotary(self, text_tokens: int, grid: tuple[int, int]) -> Rotary:
        """Rotary embedding of one sequence, text then image; `grid` is (height, width) in tokens."""

    def model_input(self, latent: Tensor, conditioning: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """The transformer's input per image token, of all rows.

        Args:
            latent: (row_tokens, 4 * latent_channels), packed by row.
            conditioning: each row's.

        Returns:
            (row_tokens, in_channels), packed by row.
        """

    @property
    def blocks(self) -> int:
        """Blocks of the transformer, each of which may take from a template or record for one."""

    @property
    def heads(self) -> int:
        """Of every block's attention."""

    @property
    def width(self) -> int:
        """Channels of a token in every block, and of its keys and values in all heads together."""

    def unmasked(self, conditioning: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The conditioning of an edit with an empty mask, from that of any edit of the picture."""

    def touched(self, conditioning: Mapping[str, Tensor]) -> Tensor:
        """(tokens,) bool: the tokens of one row's picture that its mask touches."""

    def velocity(
        self,
        sequences: Sequences,
        image: Tensor,
        timestep: Tensor,
        uses: Sequence[Use] = (),
        trace: Tracing = UNTRACED,
    ) -> Tensor:
        """One forward over all sequences.

        Args:
            sequences: the batch.
            image: (image_tokens, in_channels), the image stream of all tokens, whether computed or not.
            timestep: (sequences,) float32, sigma * 1000.
            uses: by sequence, what it does with a template; none does anything by default. Sequences that take
                from one have a region.
            trace: told of every block.

        Returns:
            (computed_tokens, 4 * latent_channels): velocity of the regions' tokens, all tokens of sequences without.
        """

    def unpacked(self, latent: Tensor, grid: tuple[int, int]) -> Tensor:
        """One row's packed latent, (tokens, 4 * latent_channels), as (latent_channels, height, width) latent pixels.

        `grid` is (height, width) in tokens.
        """

    def after_step(self, latent: Tensor, conditioning: Mapping[str, Tensor], next_sigma: Tensor) -> Tensor:
        """What the pipeline does to one row's latent, (tokens, channels), after each step.

        `next_sigma` is (1,) float32: the noise level that the step has reached.
        """
