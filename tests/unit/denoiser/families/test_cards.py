"""What a checkpoint's card counts of its network: clean pictures behind a row's, and channels that are kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from giornata.families import KINDS
from giornata.planning.operations import recording_bytes
from giornata.tensors import pack
from giornata.wire.errors import SchemaMismatch
from giornata.wire.values import BlockMode
from giornata_denoiser.checkpoint import LOADERS
from giornata_denoiser.families.driven.flux2 import Flux2, Flux2Klein
from giornata_denoiser.families.driven.network import DrivenNetwork
from giornata_denoiser.families.driven.qwen_image import QwenImageEdit
from giornata_denoiser.families.flux import FluxInpaint, FluxKontext
from giornata_denoiser.families.network import (
    REFERENCES,
    Grid,
    ReferencePolicy,
    read_references,
    reference_tokens,
)
from giornata_denoiser.families.unet.network import network_of
from giornata_lab.bench.compute import tiny_flux, tiny_unet
from tests.contract.messages import INSPECTION
from tests.fakes import tiny_driven
from tests.fakes.fleet import CARD
from tests.unit.denoiser.engine.test_masked import OF
from tests.unit.prepost.test_conditions import KLEIN

GRIDS = st.tuples(st.integers(1, 6), st.integers(1, 6))


def values(tokens: int) -> torch.Tensor:
    return torch.randn(tokens, 4, generator=torch.Generator().manual_seed(tokens))


@given(GRIDS, st.lists(GRIDS, max_size=3), st.booleans(), st.booleans())
def test_sizes_tokens_and_card_agree(grid: Grid, more: list[Grid], generated: bool, replaced: bool) -> None:
    looks = ReferencePolicy(replaced=replaced)
    grids = looks.grids(grid, more, generated=generated)
    card = KLEIN.model_copy(update={"replaces_own": replaced})
    others = [reference_tokens([each]) for each in more]
    counted = card.companion_tokens(reference_tokens([grid]), others, generated=generated)
    assert reference_tokens(grids) == counted
    conditioning = {} if generated else {"image_latents": values(reference_tokens([grid]))}
    if more:
        conditioning[REFERENCES] = values(reference_tokens(more))
    found = looks.tokens(conditioning)
    assert (0 if found is None else len(found)) == counted
    if found is not None and "image_latents" in conditioning and not (replaced and more):
        assert torch.equal(found[: reference_tokens([grid])], conditioning["image_latents"])


@pytest.mark.parametrize(
    ("network", "pipeline"),
    [
        (Flux2, "Flux2Pipeline"),
        (Flux2Klein, "Flux2KleinPipeline"),
        (QwenImageEdit, "QwenImageEditPlusPipeline"),
        (FluxKontext, "FluxKontextPipeline"),
        (FluxInpaint, "FluxPipeline"),
    ],
)
def test_networks_look_at_what_their_kinds_say(
    network: type[DrivenNetwork | FluxInpaint], pipeline: str
) -> None:
    kind = KINDS[pipeline]
    assert kind.family in LOADERS
    assert network.references.own == (kind.references == 1)
    assert network.references.replaced == kind.replaces_own
    assert kind.max_references == 0 or kind.references == 1


def test_references_that_were_not_inspected_are_refused() -> None:
    shared = pack({"reference_0": torch.zeros(2, 3, 4), "reference_1": torch.zeros(1, 1, 4)})
    seen = INSPECTION.model_copy(update={"reference_grids": ((2, 3), (1, 1))})
    assert [tuple(each.shape) for each in read_references(shared, seen)] == [(2, 3, 4), (1, 1, 4)]
    assert read_references(b"", INSPECTION.model_copy(update={"reference_grids": ()})) == ()
    for grids in ((), ((2, 3),), ((1, 1), (2, 3))):
        with pytest.raises(SchemaMismatch):
            read_references(shared, INSPECTION.model_copy(update={"reference_grids": grids}))
    with pytest.raises(SchemaMismatch):
        read_references(b"", seen)


# What a checkpoint's folder says of its network, without torch, is what the network is.


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
