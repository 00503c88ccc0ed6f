"""What a template keeps of a token, from the configuration of a checkpoint's network. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from giornata.components import Config
from giornata.wire.blocks import EXACT_BITS


class CachedChannels(NamedTuple):
    """Channels a token, of all blocks together."""

    activations: int
    """Keys, values and borders: kept in the bits that are asked for."""
    statistics: int = 0
    """Moments of group norms, which are never quantised."""

    def size_bytes(self, tokens: int, bits: int) -> int:
        """Bytes of one noise level of so many tokens."""
        return tokens * (self.activations * bits + self.statistics * max(bits, EXACT_BITS)) // 8


def of_flux(network: Config) -> CachedChannels:
    """Keys and values of a network with two kinds of blocks, equally wide; KeyError if it is another one."""
    blocks = int(network["num_layers"]) + int(network["num_single_layers"])
    return CachedChannels(2 * blocks * _width(network))


def of_joint(network: Config) -> CachedChannels:
    """As :func:`of_flux`, of a network with one kind of block; some of SD3.5's attend twice."""
    sites = int(network["num_layers"]) + len(network.get("dual_attention_layers", ()))
    return CachedChannels(2 * sites * _width(network))


def of_z_image(network: Config) -> CachedChannels:
    """As :func:`of_flux`, of `ZImageTransformer2DModel`; its picture passes its own refiner first."""
    blocks = int(network["n_layers"]) + int(network["n_refiner_layers"])
    width = int(network["dim"]) * int(network["n_kv_heads"]) // int(network["n_heads"])
    return CachedChannels(2 * blocks * width)


def of_unet(tile: int, network: Config) -> CachedChannels:
    """Keys, values, borders and moments of a `UNet2DConditionModel`; a token is a tile of `tile` latent pixels a side.

    Raises:
        KeyError: the configuration is that of another network.
    """
    groups = int(network.get("norm_num_groups", 32))
    parts = [*_down(tile, network), *_middle(tile, network), *_up(tile, network)]
    last = [
        _UnetPartChannels(norms=1),
        _UnetPartChannels(convolved=_border(tile) * _widths(network)[0]),
    ]  # of the output
    every = [*parts, *last]
    return CachedChannels(
        sum(part.convolved + part.attended for part in every), 2 * groups * sum(part.norms for part in every)
    )


class _UnetPartChannels(NamedTuple):
    """A part of a UNet, such as a resnet, a transformer or a sampler."""

    norms: int = 0
    convolved: int = 0
    attended: int = 0


def _down(tile: int, network: Config) -> Iterator[_UnetPartChannels]:
    widths, depths = _widths(network), _depths(network)
    before, side = widths[0], tile
    for level, (width, kind) in enumerate(zip(widths, network["down_block_types"], strict=True)):
        for layer in range(_layers(network)[level]):
            yield _resnet(before, width, side)
            if "CrossAttn" in kind:
                yield _transformer(width, side, _depth(depths[level], layer))
            before = width
        if level + 1 < len(widths):
            # The last row and column: with a stride of 2 nothing else is read.
            yield _UnetPartChannels(convolved=(2 * side - 1) * width)
            side //= 2


def _middle(tile: int, network: Config) -> Iterator[_UnetPartChannels]:
    if network.get("mid_block_type", "UNetMidBlock2DCrossAttn") is None:
        return
    width, side = _widths(network)[-1], tile >> (len(_widths(network)) - 1)
    yield _resnet(width, width, side)
    yield _transformer(width, side, _depth(_depths(network)[-1], 0))
    yield _resnet(width, width, side)


def _up(tile: int, network: Config) -> Iterator[_UnetPartChannels]:
    widths = _widths(network)[::-1]
    layers = _layers(network)[::-1]
    depths = network.get("reverse_transformer_layers_per_block") or _depths(network)[::-1]
    before, side = widths[0], tile >> (len(widths) - 1)
    for level, (width, kind) in enumerate(zip(widths, network["up_block_types"], strict=True)):
        for layer in range(layers[level] + 1):
            kept = width if layer < layers[level] else widths[min(level + 1, len(widths) - 1)]
            yield _resnet(before + kept, width, side)
            if "CrossAttn" in kind:
                yield _transformer(width, side, _depth(depths[level], layer))
            before = width
        if level + 1 < len(widths):
            # Each cell is repeated as 2x2 and kept once.
            yield _UnetPartChannels(convolved=_border(side) * width)
            side *= 2


def _resnet(before: int, width: int, side: int) -> _UnetPartChannels:
    """Two norms, each in front of a convolution."""
    return _UnetPartChannels(norms=2, convolved=_border(side) * (before + width))


def _transformer(width: int, side: int, depth: int) -> _UnetPartChannels:
    return _UnetPartChannels(norms=1, attended=2 * depth * width * side**2)


def _border(side: int) -> int:
    """Border cells of a tile with so many cells a side."""
    return max(1, 4 * (side - 1))


def _widths(network: Config) -> list[int]:
    return [int(width) for width in network["block_out_channels"]]


def _layers(network: Config) -> list[int]:
    """Resnets of each level on the way down."""
    return _each_level(network["layers_per_block"], network)


def _depths(network: Config) -> list[Any]:
    """Blocks of each level's transformers: a number, or one for each of them."""
    return _each_level(network.get("transformer_layers_per_block", 1), network)


def _each_level(value: Any, network: Config) -> list[Any]:
    return list(value) if isinstance(value, Sequence) else [value] * len(_widths(network))


def _depth(level: Any, layer: int) -> int:
    return int(level[layer] if isinstance(level, Sequence) else level)


def _width(network: Config) -> int:
    return int(network["num_attention_heads"]) * int(network["attention_head_dim"])
