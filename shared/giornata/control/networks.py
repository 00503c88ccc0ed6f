"""Loaded ControlNets: what is asked of one, whatever its kind, and one step of those of several rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Final

import torch
from torch import Tensor, nn

from giornata.control.layout import Behind, ControlMismatch, sum_residuals
from giornata.model_cards import read_control_card
from giornata.packed.packing import Region
from giornata.tensors import NEGATIVE
from giornata.weight_loading import load_network
from giornata.wire.adapters import ControlCard, ControlKind, ControlWork, control_name
from giornata.wire.controlnets import ControlBase
from giornata.wire.errors import SchemaMismatch
from giornata.wire.jobs import BlobRef, Encoding

CPU = "cpu"


def device_id(device: torch.device) -> str:
    """``cpu``, or what names a GPU on its host."""
    return CPU if device.type == "cpu" else str(torch.cuda.get_device_properties(device).uuid)


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

    def mapped(self, change: Callable[[Tensor], Tensor]) -> ControlText:
        """The same with each tensor changed."""
        pooled, time_ids = (None if each is None else change(each) for each in (self.pooled, self.time_ids))
        return ControlText(change(self.embeds), pooled, time_ids, self.guidance_scale)


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

    opened: Any
    """What :meth:`ControlNet.open` made of the row."""
    step: int
    latents: Tensor
    """(tokens, channels): those of the whole picture, as the network sees them, without what an inpainting model is
    given beside them."""
    sequence: int = 0
    """Which of the row's sequences."""


class ControlNet(ABC):
    """A loaded ControlNet; its kinds are in `flux`, `sd3` and `unet`, as :data:`KINDS` says."""

    def __init__(self, net: Any, card: ControlCard) -> None:
        self.net = net
        """Diffusers' module."""
        self.card = card
        self.device: torch.device = net.device
        self.dtype: torch.dtype = net.dtype

    @abstractmethod
    def behind(self, base: ControlBase) -> Behind:
        """By block of a denoising network, which of its samples is added behind it; None for nothing.

        Raises:
            ControlMismatch: its samples do not fit the network, or the network's latents and texts do not fit it.
        """

    @abstractmethod
    def work(self, base: ControlBase) -> ControlWork:
        """Return what it computes in one step beside a denoising network that it fits.

        A layer counts as many multiplications as it has weights, for each token or cell that passes it. Biases, norms
        and activations are not counted.
        """

    @abstractmethod
    def open(self, conditions: ControlConditions) -> Any:
        """Compute what all steps of a row share.

        Raises:
            ControlMismatch: the control image or the text is not of the shape that it takes; or a mode is missing,
                unknown, or not taken.
        """

    @abstractmethod
    def run(self, items: Sequence[ControlSequenceStep]) -> Iterator[tuple[Tensor, ...]]:
        """Its samples in order, as they are computed: by item (tokens, channels), unscaled."""

    def check_fits(self, base: ControlBase, *pairs: tuple[str, object, object]) -> None:
        """Compare what it has with what a denoising network has: (what, the ControlNet's, the network's).

        Raises:
            ControlMismatch: it is one of another kind of network, or a pair differs.
        """
        if self.card.kind is not base.kind:
            raise self.mismatch(f"is one of {self.card.kind}, and the model is of {base.kind}")
        for what, own, others in pairs:
            if own != others:
                raise self.mismatch(f"does not fit: {what} {own}, and the model's {others}")

    def check_width(self, text: ControlText, width: int) -> None:
        """Raise ControlMismatch unless text embeddings have this width."""
        if (found := text.embeds.shape[-1]) != width:
            raise self.mismatch(f"takes text embeddings of width {width}, and the model has {found}")

    def check_text(self, text: ControlText, width: int) -> Tensor:
        """The pooled embedding; ControlMismatch where there is none, or text embeddings have another width."""
        self.check_width(text, width)
        if text.pooled is None:
            raise self.mismatch("takes a pooled text, and the model has none")
        return text.pooled

    def check_hint(self, hint: Tensor, grid: tuple[int, int], channels: int) -> Tensor:
        """`hint`, of (tokens, channels); ControlMismatch where it is of another shape."""
        expected = grid[0] * grid[1], channels
        if tuple(hint.shape) != expected:
            raise self.mismatch(
                f"takes a control image of {expected} tokens and channels, and was given {tuple(hint.shape)}"
            )
        return hint

    def mismatch(self, told: str) -> ControlMismatch:
        """The error that says of this ControlNet what is `told`."""
        return ControlMismatch(f"the ControlNet {self.card.name} {told}")


def grouped_samples(
    items: Sequence[ControlSequenceStep],
    key: Callable[[ControlSequenceStep], object],
    forward: Callable[[Sequence[ControlSequenceStep]], Iterator[Tensor]],
) -> Iterator[tuple[Tensor, ...]]:
    """By sample, of each item what the `forward` of all items with its `key` makes: (items, tokens, channels)."""
    groups: dict[object, list[int]] = {}
    for index, item in enumerate(items):
        groups.setdefault(key(item), []).append(index)
    forwards = [forward([items[index] for index in of]) for of in groups.values()]
    order = [index for of in groups.values() for index in of]
    for parts in zip(*forwards, strict=True):
        made = dict(zip(order, (sample for part in parts for sample in part), strict=True))
        yield tuple(made[index] for index in range(len(items)))


def count_weights(*modules: Any) -> float:
    """Weights of all linear layers and convolutions in these modules, of which some may be None."""
    return float(
        sum(
            layer.weight.numel()
            for module in modules
            if module is not None
            for layer in module.modules()
            if isinstance(layer, (nn.Linear, nn.Conv2d))
        )
    )


def count_attention(attention: Any) -> tuple[float, float]:
    """Weights of joint attention that pass the picture, and those that pass the text."""
    image, text = ("to_q", "to_k", "to_v", "to_out"), ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
    found = (count_weights(*(getattr(attention, name, None) for name in names)) for names in (image, text))
    return next(found), next(found)


def skip_channels(network: Any, side: int) -> tuple[int, ...]:
    """Channels of a tile of each skip connection of a UNet or a ControlNet, and of the middle's output.

    A tile has `side` latent pixels a side, and fewer further down.
    """
    found = [int(network.conv_in.out_channels) * side**2]
    for block in network.down_blocks:
        found += [int(resnet.out_channels) * side**2 for resnet in block.resnets]
        for sampler in block.downsamplers or ():
            side //= 2
            found.append(int(sampler.out_channels) * side**2)
    return (*found, int(network.mid_block.resnets[-1].out_channels) * side**2)


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
    """For how many sequences; see :func:`giornata.control.layout.count_sequences`."""
    region: Region | None = None
    """The tokens that are asked for; None for all. On the ControlNets' device."""
    whole: bool = True
    """Whether all tokens are asked for although there is a region."""


@torch.inference_mode()
def run(rows: Sequence[RowStep]) -> Iterator[tuple[int, int, Tensor]]:
    """Return what the ControlNets of `rows` add in their steps: in the order of blocks, as it is computed.

    It is the row's number, which of its sums, as :func:`giornata.control.layout.sum_residuals` counts them, and the
    scaled sum, (sequences, tokens, channels). Rows that share a ControlNet share its forward.
    """
    nets: dict[int, ControlNet] = {}
    items: dict[int, list[ControlSequenceStep]] = {}
    places: dict[tuple[int, int], range] = {}
    for number, row in enumerate(rows):
        for nth, act in enumerate(row.acts):
            own = items.setdefault(id(act.net), [])
            places[number, nth] = range(len(own), len(own) + row.sequences)
            own += (ControlSequenceStep(act.opened, row.step, row.latents, n) for n in range(row.sequences))
            nets[id(act.net)] = act.net
    # the samples that a net has made, and what makes more as they are asked for
    forwards = {of: (list[tuple[Tensor, ...]](), nets[of].run(items[of])) for of in nets}
    sums = [sum_residuals([act.behind for act in row.acts]) for row in rows]
    order = sorted(
        (block, number, index) for number, each in enumerate(sums) for index, block in enumerate(each.first)
    )
    for _, number, index in order:
        total: Tensor | None = None
        row = rows[number]
        for nth, sample in sums[number].parts[index]:
            made, computing = forwards[id(row.acts[nth].net)]
            while len(made) <= sample:
                made.append(next(computing))
            parts = [made[sample][place] for place in places[number, nth]]
            part = parts[0][None] if len(parts) == 1 else torch.stack(parts)
            if row.region is not None and not row.whole:
                part = part.index_select(1, row.region.computed)
            part = part * row.acts[nth].scale
            total = part if total is None else total + part
        if total is not None:
            yield number, index, total
