"""The operations of a ControlNet in one step, counted from its modules.

A layer counts as many multiplications as it has weights, for each token or cell that passes it. Biases, norms and
activations are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from torch import nn

from giornata.wire.adapters import ControlWork

TEXT_TOKENS: Final = 77
"""CLIP's, over which UNets attend."""
JOINT: Final = ("to_q", "to_k", "to_v", "to_out")
ADDED: Final = ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
"""Layers of joint attention: of the picture and of the text."""


def flux_work(net: Any) -> ControlWork:
    """Work of a `FluxControlNetModel`. All steps share what modulates its blocks, sequences its samples."""
    image = count_weights(net.x_embedder, net.controlnet_blocks, net.controlnet_single_blocks)
    text = pair = 0.0
    for block in net.transformer_blocks:
        image += _of(block.attn, JOINT) + count_weights(block.ff)
        text += _of(block.attn, ADDED) + count_weights(block.ff_context)
        pair += 2 * block.attn.inner_dim
    for block in net.single_transformer_blocks:
        both = _of(block.attn, JOINT) + count_weights(block.proj_mlp, block.proj_out)
        image, text = image + both, text + both
        pair += 2 * block.attn.inner_dim
    return ControlWork(image=image, text=text, pair=pair, text_pair=pair, shared=True)


def sd3_work(net: Any) -> ControlWork:
    """Work of an `SD3ControlNetModel`. A block of 3.5 that attends twice does so to the picture alone."""
    image, text, sequence = count_weights(net.pos_embed.proj, net.controlnet_blocks), 0.0, 0.0
    pair = text_pair = 0.0
    for block in net.transformer_blocks:
        image += _of(block.attn, JOINT) + count_weights(block.ff)
        text += _of(block.attn, ADDED) + count_weights(block.ff_context)
        sequence += count_weights(block.norm1, block.norm1_context)
        text_pair += 2 * block.attn.inner_dim
        if block.attn2 is not None:
            image += _of(block.attn2, JOINT)
            pair += 2 * block.attn2.inner_dim
    return ControlWork(sequence=sequence, image=image, text=text, pair=pair + text_pair, text_pair=text_pair)


def unet_work(net: Any, side: int) -> ControlWork:
    """Work of a `ControlNetModel`: tokens have `side` latent pixels a side, and fewer cells further down.

    All steps share the embedding of the control image.
    """
    total = _Tally()
    total.sequence += count_weights(net.time_embedding)
    if net.config.addition_embed_type is not None:
        total.sequence += count_weights(net.add_embedding)
    total.cells(net.conv_in, side)
    outputs = iter(net.controlnet_down_blocks)
    total.cells(next(outputs), side)
    for block in net.down_blocks:
        for resnet, transformer in _pairs(block):
            total.resnet(resnet, side)
            total.transformer(transformer, side)
            total.cells(next(outputs), side)
        for sampler in block.downsamplers or ():
            side //= 2
            total.cells(sampler.conv, side)
            total.cells(next(outputs), side)
    first, *others = net.mid_block.resnets
    total.resnet(first, side)
    for transformer, resnet in zip(net.mid_block.attentions, others, strict=True):
        total.transformer(transformer, side)
        total.resnet(resnet, side)
    total.cells(net.controlnet_mid_block, side)
    return ControlWork(sequence=total.sequence, image=total.image, pair=total.pair)


class _Tally:
    """A count of what the modules of a UNet compute, where a token has `side` of their output's cells a side."""

    def __init__(self) -> None:
        self.sequence = self.image = self.pair = 0.0

    def cells(self, module: Any, side: int) -> None:
        """A convolution, or layers, that each cell of the output passes."""
        self.image += count_weights(module) * side**2

    def resnet(self, resnet: Any, side: int) -> None:
        """`ResnetBlock2D`."""
        self.sequence += count_weights(resnet.time_emb_proj)
        for convolution in filter(None, (resnet.conv1, resnet.conv2, resnet.conv_shortcut)):
            self.cells(convolution, side)

    def transformer(self, transformer: Any, side: int) -> None:
        """`Transformer2DModel`, or None: each of its blocks attends to the picture and to the text."""
        if transformer is None:
            return
        cells, of_text = side**2, 0.0
        for block in transformer.transformer_blocks:
            of_text += count_weights(block.attn2.to_k, block.attn2.to_v)
            self.pair += 2.0 * block.attn1.inner_dim * cells**2
            self.image += 2.0 * block.attn2.inner_dim * TEXT_TOKENS * cells
        self.image += (count_weights(transformer) - of_text) * cells
        self.sequence += of_text * TEXT_TOKENS


def count_weights(*modules: Any) -> float:
    """Weights of all linear layers and convolutions in these modules."""
    return float(
        sum(
            layer.weight.numel()
            for module in modules
            for layer in module.modules()
            if isinstance(layer, (nn.Linear, nn.Conv2d))
        )
    )


def _of(attention: Any, names: tuple[str, ...]) -> float:
    found = (getattr(attention, name, None) for name in names)
    return count_weights(*(layer for layer in found if layer is not None))


def _pairs(block: Any) -> Iterator[tuple[Any, Any]]:
    attentions = (
        block.attentions if getattr(block, "has_cross_attention", False) else [None] * len(block.resnets)
    )
    return zip(block.resnets, attentions, strict=True)


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
