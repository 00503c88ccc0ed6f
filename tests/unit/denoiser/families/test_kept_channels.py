"""What a checkpoint's folder says of its network, without torch, is what the network is."""

from __future__ import annotations

from typing import Any

import pytest

from giornata.families import KINDS
from giornata.planning.operations import recording_bytes
from giornata.wire.values import BlockMode
from giornata_denoiser.families.unet.network import network_of
from giornata_lab.bench.compute import tiny_flux, tiny_unet
from tests.fakes import tiny_driven
from tests.fakes.fleet import CARD
from tests.unit.denoiser.engine.test_masked import OF

DRIVEN = {
    "sd3": "StableDiffusion3Pipeline",
    "chroma": "ChromaPipeline",
    "qwen-image": "QwenImagePipeline",
    "qwen-image-edit": "QwenImageEditPipeline",
    "qwen-image-edit-plus": "QwenImageEditPlusPipeline",
    "qwen-image-2.1": "QwenImage21Pipeline",
    "flux2": "Flux2Pipeline",
    "flux2-klein-kv": "Flux2KleinKVPipeline",
    "flux2-klein": "Flux2KleinPipeline",
    "z-image": "ZImagePipeline",
}
PIPELINES = {"sd": "StableDiffusionPipeline", "xl": "StableDiffusionXLPipeline"}
UNETS: list[tuple[str, dict[str, Any]]] = [
    ("sd", {}),
    ("xl", {}),
    ("xl", {"layers_per_block": 2, "transformer_layers_per_block": (1, 2, 3), "norm_num_groups": 16}),
    ("sd", {"layers_per_block": (1, 2, 1, 2)}),
    (
        "sd",
        {
            "block_out_channels": (16, 32),
            "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
            "mid_block_type": None,
        },
    ),
    (
        "xl",
        {
            "layers_per_block": 2,
            "transformer_layers_per_block": (1, (2, 1), (3, 1)),
            "reverse_transformer_layers_per_block": ((2, 1, 1), (1, 3, 2), 1),
            "mid_block_type": None,
        },
    ),
]


def says(pipeline: str, config: Any, blocks: Any) -> None:
    """A level of 6 tokens is as large by the configuration as by the network's blocks."""
    said = KINDS[pipeline].kept_channels(config)
    for bits in (32, 16, 8, 4):
        assert said.size_bytes(6, bits) == recording_bytes(blocks, [BlockMode.KV], 6, bits) > 0


def test_a_level_of_flux() -> None:
    says("FluxFillPipeline", tiny_flux.transformer().config, OF.network.blocks)


@pytest.mark.parametrize("name", DRIVEN)
def test_a_level_of_a_driven_transformer(name: str) -> None:
    config = tiny_driven.unhooked(name).config
    says(DRIVEN[name], config, tiny_driven.family(name).network.blocks)


@pytest.mark.parametrize(("shape", "config"), UNETS)
def test_a_level_of_a_unet(shape: str, config: dict[str, Any]) -> None:
    unet = tiny_unet.unet(shape, **config)
    says(PIPELINES[shape], unet.config, network_of(unet).blocks)


@pytest.mark.parametrize("name", DRIVEN)
def test_a_card_counts_the_companions_of_its_network(name: str) -> None:
    kind, network = KINDS[DRIVEN[name]], tiny_driven.family(name).network
    told = ("references", "causal_references", "token_multiple")
    card = CARD.model_copy(update={field: getattr(kind, field) for field in told})
    for grid in ((4, 4), (5, 7), (8, 8), (9, 3)):
        assert card.companion_tokens(grid[0] * grid[1]) == network.companions(grid)
