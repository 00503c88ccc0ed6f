"""What the engine asks of a model family: text, schedule and network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from giornata.packed.region import Region
from giornata.packed.tracing import UNTRACED, Tracing
from giornata.packed.uses import Use
from giornata.planning.specs import BlockSpec, each
from giornata_denoiser.rows.row import Prompt, Track


class Text(Protocol):
    """What a prompt becomes."""

    @property
    def tensors(self) -> Mapping[str, tuple[int | None, ...]]:
        """Name and shape of an encoding's tensors; None is the number of text tokens."""

    def prompt(self, tensors: Mapping[str, Tensor], grid: tuple[int, int], guidance_scale: float) -> Prompt:
        """The prompt of one sequence, from :attr:`tensors` in the network's dtype and on their device.

        `grid` is height and width of the row's picture in tokens; `guidance_scale` is for networks that embed one.
        """


class Schedule(Protocol):
    """A row's way through the noise levels, and the rule of one step.

    The rules read `numbers`, a schedule's own: :attr:`giornata_denoiser.rows.row.Track.numbers` before a step (`now`)
    and after it (`then`). Everything that samplers of diffusers differ in has its place: a factor on the network's
    input in :meth:`scaled`; ε, v or velocity as output in :meth:`step` and :meth:`clean`; solvers of several steps in
    `memory`; what is not a straight line between picture and noise in :meth:`noised`.
    """

    @property
    def memory(self) -> int:
        """Tensors that the solver remembers of earlier steps, each as large as the latent; 0 for one-step solvers."""

    def track(self, *, steps: int, strength: float, cells: int) -> Track:
        """The track of a row whose picture has `cells` tokens; 0 < `strength` <= 1 drops the first of `steps`.

        Raises:
            InvalidField: strength leaves no step to compute.
        """

    def scaled(self, latent: Tensor, now: Tensor) -> Tensor:
        """What the network sees of one row's latent, (tokens, channels); `now` is (n,)."""

    def step(
        self, latent: Tensor, output: Tensor, memory: tuple[Tensor, ...], now: Tensor, then: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """One step of all rows: their latents and what is remembered of it.

        `latent`, `output` of the network and `memory` are (cells, channels), packed by row; `memory` is what the step
        before has returned, zeros in a row's first step. `now` and `then` are (cells, n) float32, the numbers of each
        cell's row before and after the step.
        """

    def initial(self, noise: Tensor, at: Tensor) -> Tensor:
        """Where one row begins that has no picture: `noise`, (tokens, channels), as text-to-image pipelines scale it.

        `at` is (n,), the numbers of the first level.
        """

    def noised(self, picture: Tensor, noise: Tensor, at: Tensor) -> Tensor:
        """One row's picture at a noise level: where a row begins, and what its outside is at that level.

        `picture` and `noise` are (tokens, channels); `at` is (n,), the numbers of the level.
        """

    def clean(self, latent: Tensor, output: Tensor, now: Tensor) -> Tensor:
        """The picture that one row's latent, (cells, channels), is predicted to become; `now` is (n,)."""


class SequenceInputs(NamedTuple):
    """What one sequence of a batch has, all of it on the network's device."""

    prompt: Prompt
    grid: tuple[int, int]
    """Height and width of its picture in tokens."""
    region: Region | None
    """What of the picture is computed; None for all of it."""
    prepared: object
    """What :meth:`Network.prepare` made of the prompt."""


class Network(Protocol):
    """One forward over rows that differ in everything, packed by sequence."""

    device: torch.device
    dtype: torch.dtype
    """Of its weights and of every row's tensors."""

    @property
    def blocks(self) -> tuple[BlockSpec, ...]:
        """Its blocks, in order."""

    @property
    def conditioning(self) -> Mapping[str, int]:
        """Channels of the tensors that every row with a picture carries, by name.

        `noise` and `image_latents` are among them. A row without a picture carries `noise` alone: the network of a
        checkpoint that generates reads no other.
        """

    @property
    def blends(self) -> bool:
        """Whether each step ends by putting the noised picture where the row's tensor `mask` is 0, if it has one."""

    def unmasked(self, conditioning: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The conditioning of an edit with an empty mask, from that of any edit of the picture."""

    @property
    def prepared_bytes(self) -> int:
        """Bytes of what :meth:`prepare` makes, for each step of a sequence."""

    def prepare(self, prompt: Prompt, times: Tensor) -> object:
        """What the network computes of a prompt for all steps of a track: once, when the row joins.

        `prompt` and the result are on the network's device; `times` are (steps,) float32. It does not depend on what
        else is in the batch.
        """

    def assemble(self, sequences: Sequence[SequenceInputs]) -> object:
        """The batch of `sequences`: what :meth:`predict` needs of them in every step; kept while the rows stay."""

    def predict(
        self,
        batch: object,
        latents: Tensor,
        conditioning: Sequence[Mapping[str, Tensor]],
        steps: Sequence[int],
        *,
        uses: Sequence[Use] = (),
        trace: Tracing = UNTRACED,
    ) -> Tensor:
        """One forward over all sequences of a `batch` of :meth:`assemble`; `trace` is told of every block.

        `latents` are (tokens, channels), packed by sequence: all tokens, whether computed or not. `steps` are by
        sequence: which step of its track each one makes, 0 for the first. `conditioning` and `uses` are by sequence;
        without `uses` no sequence does anything with a template, and one that takes from a template has a region.

        Returns:
            (computed_tokens, channels): the output at the regions' tokens, all tokens of sequences without a region.
        """

    def guided(self, positive: Tensor, negative: Tensor, scale: Tensor) -> Tensor:
        """Outputs with the prompt and with the negative prompt, (tokens, channels) each, combined.

        `scale` is (tokens, 1) float32, `true_cfg_scale` of each token's row.
        """

    def unpacked(self, latent: Tensor, grid: tuple[int, int]) -> Tensor:
        """One row's latent, (tokens, channels), as (latent_channels, height, width) latent pixels."""


@dataclass(frozen=True, eq=False)
class ModelFamily:
    """One kind of checkpoint and the diffusers pipeline that it equals."""

    text: Text
    schedule: Schedule
    network: Network

    @property
    def device(self) -> torch.device:
        """Where the network is."""
        return self.network.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of network and rows."""
        return self.network.dtype

    @cached_property
    def specs(self) -> tuple[BlockSpec, ...]:
        """The spec of every block, in order; each block may take from a template or record for one."""
        return each(self.network.blocks)

    @property
    def depth(self) -> int:
        """How many blocks the network has."""
        return len(self.specs)
