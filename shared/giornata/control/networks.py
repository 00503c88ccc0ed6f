"""Loaded ControlNets: what is asked of one, whatever its kind, and one step of those of several rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor

from giornata.control.expansion import Behind, sum_residuals
from giornata.model_cards import read_control_card
from giornata.packed.compute_set import Region
from giornata.tensors import NEGATIVE
from giornata.weight_loading import load_network
from giornata.wire.adapters import ControlCard, ControlKind, ControlWork, control_name
from giornata.wire.controlnets import ControlBase
from giornata.wire.errors import SchemaMismatch
from giornata.wire.jobs import BlobRef, Encoding

# What tells two processes that they compute on one device.


CPU = "cpu"


def device_id(device: torch.device) -> str:
    """``cpu``, or what names a GPU on its host."""
    return CPU if device.type == "cpu" else str(torch.cuda.get_device_properties(device).uuid)


# What a denoiser and the ControlNet service ask of a loaded ControlNet, whatever its kind.


@dataclass(frozen=True, eq=False)
class ControlText:
    """The text of one sequence, as the denoising network has it."""

    embeds: Tensor
    """(text_tokens, text_channels)"""
    pooled: Tensor | None = None
    """(pooled_channels,); None for Stable Diffusion 1 and 2."""
    time_ids: Tensor | None = None
    """(6,) sizes of SDXL's micro-conditioning; None for other models."""
    guidance_scale: float = 0.0
    """Distilled guidance; read where the ControlNet embeds it."""


@dataclass(frozen=True, eq=False)
class ControlConditions:
    """The inputs of a ControlNet that one row has in all of its steps."""

    hint: Tensor
    """The control image as the ControlNet's card tells: latents packed as the picture's, (tokens, channels), or
    pixels, (3, height, width)."""
    grid: tuple[int, int]
    """Height and width of the picture in tokens."""
    texts: tuple[ControlText, ...]
    """Texts of the row's sequences: the prompt and, with classifier-free guidance, the negative prompt."""
    times: Tensor
    """(steps,) what the network is told of each step: timesteps, 0 to 1000."""
    mode: int | None = None
    """Which kind of control image it is, for a union ControlNet; None for others."""


@dataclass(frozen=True, eq=False)
class ControlSequenceStep:
    """The next step of one sequence of a row."""

    opened: object
    """What :meth:`ControlNet.open` made of the row."""
    step: int
    latents: Tensor
    """(tokens, channels): those of the whole picture, as the network sees them, without what an inpainting model is
    given beside them."""
    sequence: int = 0
    """Which of the row's sequences."""


class ControlNet(Protocol):
    """A loaded ControlNet."""

    net: Any
    """Diffusers' module."""
    card: ControlCard
    device: torch.device
    dtype: torch.dtype

    def behind(self, base: ControlBase) -> tuple[int | None, ...]:
        """By block of a denoising network, which of its samples is added behind it; None for nothing.

        Raises:
            ControlMismatch: its samples do not fit the network, or the network's latents and texts do not fit it.
        """

    def work(self, base: ControlBase) -> ControlWork:
        """Return what it computes in one step beside a denoising network that it fits."""

    def open(self, conditions: ControlConditions) -> object:
        """Compute what all steps of a row share.

        Raises:
            ControlMismatch: the control image or the text is not of the shape that it takes; or a mode is missing,
                unknown, or not taken.
        """

    def run(self, items: Sequence[ControlSequenceStep]) -> Iterator[tuple[Tensor, ...]]:
        """Its samples in order, as they are computed: by item (tokens, channels), unscaled."""


# What ControlNets see of a row, from the claim checks of its job and the tensors behind them.


def select_control_images(encoding: Encoding, index: int) -> BlobRef:
    """The control images of row `index`, or of all rows.

    Raises:
        SchemaMismatch: there are none.
    """
    images = encoding.controls
    if index >= len(encoding.rows) or len(images) not in {1, len(encoding.rows)}:
        raise SchemaMismatch("A row has no control images.", received=index)
    return images[index if len(images) > 1 else 0]


def read_control_images(named: Mapping[str, Tensor], count: int) -> tuple[Tensor, ...]:
    """The control images of a job with so many ControlNets, in their order.

    Raises:
        SchemaMismatch: one is missing.
    """
    names = [control_name(index) for index in range(count)]
    if missing := [name for name in names if name not in named]:
        raise SchemaMismatch("The control images are not those of the job.", received=", ".join(missing))
    return tuple(named[name] for name in names)


def read_control_texts(
    named: Mapping[str, Tensor], sequences: int, guidance_scale: float | None
) -> tuple[ControlText, ...]:
    """The text of each sequence: the prompt's and, with classifier-free guidance, the negative prompt's.

    `guidance_scale` is the distilled one.

    Raises:
        SchemaMismatch: one is missing.
    """
    found = []
    for prefix in ("", NEGATIVE)[:sequences]:
        if (embeds := named.get(f"{prefix}prompt_embeds")) is None:
            raise SchemaMismatch(
                f"A row lacks the tensor {prefix}prompt_embeds.", received=", ".join(sorted(named))
            )
        pooled, time_ids = (named.get(f"{prefix}{name}") for name in ("pooled_prompt_embeds", "add_time_ids"))
        found.append(ControlText(embeds, pooled, time_ids, guidance_scale or 0.0))
    return tuple(found)


# A ControlNet's checkpoint, read with its card.


KINDS: Final = {
    ControlKind.FLUX: ("diffusers:FluxControlNetModel", "giornata.control.flux:FluxControl"),
    ControlKind.SD3: ("diffusers:SD3ControlNetModel", "giornata.control.sd3:SD3Control"),
    ControlKind.UNET: ("diffusers:ControlNetModel", "giornata.control.unet:UnetControl"),
}
"""Diffusers' module of each kind, and what runs it."""


def import_control_kind(kind: ControlKind) -> tuple[Any, Callable[[Any, ControlCard], ControlNet]]:
    """Diffusers' module of a kind, and what runs it; no other kind is imported."""
    module, runner = map(resolve_name, KINDS[kind])
    return module, runner


def load(folder: Path, dtype: torch.dtype, device: torch.device, name: str | None = None) -> ControlNet:
    """The ControlNet in `folder`; requests call it `name`, by default the folder's. Safetensors alone are read.

    Raises:
        ValueError: it is none, or one that is not served; says why.
        OSError: its weights are missing.
    """
    card = read_control_card(folder, name)
    module, runner = import_control_kind(card.kind)
    made = load_network(module, folder, dtype=dtype)
    return runner(made.to(device).eval().requires_grad_(requires_grad=False), card)


# One step of the ControlNets of several rows: whatever rows share a ControlNet share its forward.


@dataclass(frozen=True, eq=False)
class RowControlNet:
    """A ControlNet that acts on a row."""

    net: ControlNet
    opened: object
    """What it made of the row when it was opened."""
    scale: float
    behind: Behind


@dataclass(frozen=True, eq=False)
class RowStep:
    """One row's next step."""

    acts: Sequence[RowControlNet]
    """At least one; all of one kind."""
    step: int
    latents: Tensor
    """(tokens, channels) of the whole picture, on the ControlNets' device and in their dtype."""
    sequences: int = 1
    """For how many sequences; see :func:`giornata.control.expansion.count_sequences`."""
    region: Region | None = None
    """The tokens that are asked for; None for all. On the ControlNets' device."""
    whole: bool = True
    """Whether all tokens are asked for although there is a region."""


class ScaledResidual(NamedTuple):
    """One sum of samples, scaled."""

    row: int
    """Which of the rows."""
    nth: int
    """Which of its sums, as :func:`giornata.control.expansion.sum_residuals` counts them."""
    sample: Tensor
    """(sequences, tokens, channels)"""


class _ControlNetForward:
    """The forward of one ControlNet; its samples are computed as they are asked for."""

    def __init__(self, net: ControlNet) -> None:
        self._net = net
        self._items: list[ControlSequenceStep] = []
        self._computing: Iterator[tuple[Tensor, ...]] | None = None
        self._made: list[tuple[Tensor, ...]] = []

    def add(self, items: Sequence[ControlSequenceStep]) -> tuple[int, ...]:
        """The places of these `items` in every sample."""
        first = len(self._items)
        self._items += items
        return tuple(range(first, len(self._items)))

    def sample(self, nth: int) -> tuple[Tensor, ...]:
        """By item, (tokens, channels)."""
        if self._computing is None:
            self._computing = self._net.run(self._items)
        while len(self._made) <= nth:
            self._made.append(next(self._computing))
        return self._made[nth]


@torch.inference_mode()
def run(rows: Sequence[RowStep]) -> Iterator[ScaledResidual]:
    """Return what the ControlNets of `rows` add in their steps: in the order of blocks, as it is computed."""
    forwards: dict[int, _ControlNetForward] = {}
    places: dict[tuple[int, int], tuple[int, ...]] = {}
    for number, row in enumerate(rows):
        for nth, act in enumerate(row.acts):
            forward = forwards.setdefault(id(act.net), _ControlNetForward(act.net))
            places[number, nth] = forward.add(
                [ControlSequenceStep(act.opened, row.step, row.latents, one) for one in range(row.sequences)]
            )
    sums = [sum_residuals([act.behind for act in row.acts]) for row in rows]
    order = sorted(
        (block, number, index) for number, each in enumerate(sums) for index, block in enumerate(each.first)
    )
    for _, number, index in order:
        total: Tensor | None = None
        row = rows[number]
        for nth, sample in sums[number].parts[index]:
            made = forwards[id(row.acts[nth].net)].sample(sample)
            own = [made[place] for place in places[number, nth]]
            part = own[0][None] if len(own) == 1 else torch.stack(own)
            if row.region is not None and not row.whole:
                part = part.index_select(1, row.region.computed)
            part = part * row.acts[nth].scale
            total = part if total is None else total + part
        if total is not None:
            yield ScaledResidual(number, index, total)
