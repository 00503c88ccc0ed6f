"""ControlNets and LoRAs to measure steps with: their sizes matter, their values do not."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, Final

import torch
from torch import Tensor, nn

from giornata.control.networks import ControlNet, import_control_kind
from giornata.packed.low_rank import DOWN, UP, SequenceLoras, low_rank
from giornata.wire.adapters import ControlCard, ControlKind, ControlWork
from giornata.wire.controlnets import ControlBase
from giornata_denoiser.controls.local import ControlNetTarget, LocalControls, control_target
from giornata_denoiser.families.protocol import Network
from giornata_denoiser.rows.row import Adapters, Row, RowControl
from giornata_denoiser.startup import RANK

# ControlNets to measure steps with: of the sizes that fit a network, with weights whose values do not
# matter.
#
# A ControlNet of a transformer has some of its blocks. One of a UNet has the whole encoder, nearly half of
# the network: it would not fit beside a network that fills its device. All weights are therefore parts of
# one short tensor, which are read again and again.


NAME: Final = "random"
BLOCKS: Final = 8
"""One of so many blocks of a transformer is a block of its ControlNet, too: enough to be seen in a step's time."""
SHARE: Final = 20
"""The tensor holds one of so many weights of the network. What joins projections of Flux copies about as many: both
together stay below a tenth of the network."""
LEAST: Final = 2**25
"""It holds so many values at least: weights that a processor's cache can hold would be read faster than others."""
WEIGHT_SIZE: Final = 0.02
"""Standard deviation of weights."""
ALIGNED: Final = 64
"""A weight begins at a multiple of so many values, as one that is loaded does."""

Noise = Callable[..., Tensor]
"""Makes a tensor of a shape."""


@dataclass(frozen=True)
class RandomControlNet:
    """A ControlNet beside the `network`, made when it is first asked for, and kept as long as this is."""

    network: Network
    controlled: ControlNetTarget

    @cached_property
    def net(self) -> ControlNet:
        """The ControlNet, on the network's device and of its dtype."""
        base, network = self.controlled.base, self.network
        module, runner = import_control_kind(base.kind)
        with torch.device("meta"):
            made = module(**_options(network, base, module))
        layers = chain.from_iterable(layer.parameters() for layer in network.layers.values())
        _fill(made, sum(each.numel() for each in layers), network.device, network.dtype)
        card = ControlCard(name=NAME, digest=NAME, kind=base.kind, text_channels=base.text_channels)
        return runner(made.eval().requires_grad_(requires_grad=False), card)

    @cached_property
    def work(self) -> ControlWork:
        """Return what it computes in a step."""
        return self.net.work(self.controlled.base)

    def acting(self, row: Row, values: Noise) -> Row:
        """`row` with the ControlNet in all of its steps, and a control image of `values`."""
        base, (height, width) = self.controlled.base, row.grid
        pixels = (3, height * base.token_pixels, width * base.token_pixels)
        shape = pixels if base.kind is ControlKind.UNET else (height * width, base.latent_channels)
        use = RowControl(NAME, NAME, 1.0, 0, row.steps, work=self.work)
        return replace(row, adapters=Adapters(controls=(use,)), control_images=(values(*shape),))

    def controls(self) -> LocalControls:
        """Return what computes it in each step of rows, as a whole, and knows no row yet."""
        return LocalControls({NAME: self.net}, self.controlled, held_steps=1)


def random_control(network: Network, token_pixels: int) -> RandomControlNet | None:
    """One beside a `network` whose tokens have so many pixels of the picture a side; None where diffusers has none."""
    found = control_target(network, token_pixels)
    return None if found is None else RandomControlNet(network, found)


def _options(network: Any, base: ControlBase, module: Callable[..., nn.Module]) -> dict[str, Any]:
    """Arguments of a diffusers' `module` that fits."""
    if base.kind is ControlKind.UNET:
        scale = base.token_pixels // network.side
        config, own = network.unet.config, _unet(base, network.side, scale)
    else:
        config, own = network.transformer.config, _transformer(base)
    taken = inspect.signature(module).parameters
    return {name: value for name, value in config.items() if name in taken} | own


def _unet(base: ControlBase, side: int, scale: int) -> dict[str, Any]:
    """A token has `side` latent pixels a side, and each of these so many `latent` pixels of the picture."""
    return {
        "in_channels": base.latent_channels // side**2,
        "conditioning_embedding_out_channels": (16,) * scale.bit_length(),
    }


def _transformer(base: ControlBase) -> dict[str, Any]:
    """Fewer blocks than the network's; a mask that it sees is not the ControlNet's."""
    doubles = {"num_layers": _fewer(len(base.channels) - base.singles)}
    if base.kind is ControlKind.SD3:
        return doubles
    return {**doubles, "num_single_layers": _fewer(base.singles), "in_channels": base.latent_channels}


def _fewer(blocks: int) -> int:
    return min(blocks, max(1, blocks // BLOCKS))


def shared_values(sizes: Collection[int], network: int) -> int:
    """Values of the tensor that holds weights of such `sizes`, all of them or in turns; the `network` has so many."""
    return max(*sizes, min(sum(sizes), max(network // SHARE, LEAST)))


def _fill(net: nn.Module, network: int, device: torch.device, dtype: torch.dtype) -> None:
    """Give a `net` on the meta device weights: parts of one tensor, which follow one another.

    Where it ends they begin again. The `network` has so many weights.
    """
    sizes = [_aligned(each) for each in chain(net.parameters(), net.buffers())]
    chance = torch.Generator().manual_seed(0)
    drawn = torch.randn(shared_values(sizes, network), generator=chance).mul_(WEIGHT_SIZE)
    shared, start = drawn.to(device, dtype), 0
    for module in net.modules():
        own = chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False))
        for name, meta in list(own):
            start = start if start + meta.numel() <= len(shared) else 0
            part = shared[start : start + meta.numel()].view(meta.shape)
            setattr(module, name, nn.Parameter(part) if isinstance(meta, nn.Parameter) else part)
            start += _aligned(meta)


def _aligned(weight: Tensor) -> int:
    return -(-weight.numel() // ALIGNED) * ALIGNED


# LoRAs to measure steps with: random factors of every linear layer, whose sizes matter and whose values do
# not.


LORA_SIZE: Final = 1e-3
"""Standard deviation of factors: small beside a network's own weights."""


class RandomLoras:
    """Sets of one LoRA each, by number from 1, for the linear `layers` of a network, by path.

    Factors are of the layers' device and dtype. A set is made when it is first asked for, and kept.
    """

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        self._layers = {path: layer for path, layer in layers.items() if isinstance(layer, nn.Linear)}
        self._made: dict[int, SequenceLoras] = {}

    @cached_property
    def weights(self) -> float:
        """Weights in the factors of one set, as `SequenceShape.low_rank` counts them."""
        return float(sum(RANK * (layer.in_features + layer.out_features) for layer in self._layers.values()))

    def set_of(self, number: int) -> SequenceLoras | None:
        """The set of this number; None for 0, which is no set."""
        if number and number not in self._made:
            self._made[number] = low_rank(f"random {number}", [(self._tensors(number), 1.0)])
        return self._made.get(number)

    def _tensors(self, number: int) -> dict[str, Tensor]:
        chance = torch.Generator().manual_seed(number)
        return {
            path + end: (LORA_SIZE * torch.randn(*shape, generator=chance)).to(layer.weight)
            for path, layer in self._layers.items()
            for end, shape in ((DOWN, (RANK, layer.in_features)), (UP, (layer.out_features, RANK)))
        }
