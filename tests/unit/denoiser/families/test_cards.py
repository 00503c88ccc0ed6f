"""What cards and rows count of their network: pictures beside a row, kept channels, and prefixes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from giornata.families import KINDS
from giornata.planning.operations import SequenceShape, recording_bytes
from giornata.tensors import pack
from giornata.wire.errors import SchemaMismatch
from giornata.wire.values import BlockMode
from giornata_denoiser.checkpoint import LOADERS
from giornata_denoiser.engine.batch_tensors import place_inputs
from giornata_denoiser.engine.step_budget import StepBudget, row_bytes, step_bytes
from giornata_denoiser.families.driven.flux2 import Flux2, Flux2Klein
from giornata_denoiser.families.driven.network import DrivenNetwork, PreparedSequence
from giornata_denoiser.families.driven.qwen_image import QwenImageEdit
from giornata_denoiser.families.flux import FluxInpaint, FluxKontext
from giornata_denoiser.families.network import (
    REFERENCES,
    Grid,
    ModelFamily,
    ReferencePolicy,
    build_row,
    read_references,
    reference_tokens,
)
from giornata_denoiser.families.unet.network import network_of
from giornata_denoiser.rows.row import Row
from giornata_lab.bench.compute import tiny_flux, tiny_unet
from giornata_lab.bench.compute.rows import changed
from giornata_lab.bench.compute.tiny_flux import Spec
from tests.contract.messages import INSPECTION
from tests.fakes import tiny_driven
from tests.fakes.fleet import CARD
from tests.unit.denoiser.engine.edits import engine, finished
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


# Block-causal families: a row's prefix is computed once, and counted where it is held.


EXACT = 1e-5
KLEIN_KV, QWEN = "flux2-klein-kv", "qwen-image-2.1"
REFERENCE_GRIDS: Mapping[str, tuple[tuple[tuple[int, int], ...], ...]] = {
    KLEIN_KV: (((3, 2), (2, 5)), (), ((6, 4),)),
    QWEN: ((), (), ()),
}
"""Grids of the references of each of `SPECS`, beside the edit's own picture."""
SPECS = (
    Spec("first", grid=(4, 4), text_tokens=5, steps=4, seed=1),
    Spec("second", grid=(2, 6), text_tokens=9, steps=3, seed=2),
    Spec("third", grid=(6, 2), text_tokens=33, steps=2, seed=3),
)


def rows_of(name: str) -> list[Row]:
    """Rows that differ in size, prompt, steps and references; nothing of them is kept."""
    of = tiny_driven.family(name)
    rows = [
        tiny_driven.row(of, spec, of_row) for spec, of_row in zip(SPECS, REFERENCE_GRIDS[name], strict=True)
    ]
    return [
        changed(row, conditioning={**row.inputs.conditioning, "mask": torch.ones_like(row.latent)})
        for row in rows
    ]


def distance(mine: Tensor, theirs: Tensor) -> float:
    return float((mine - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize("name", REFERENCE_GRIDS)
def test_a_prefix_is_made_once_and_again_where_a_row_goes_on(name: str) -> None:
    of, row = tiny_driven.family(name), rows_of(name)[0]
    network: Any = of.network
    with mock.patch.object(network, "_prefilled", wraps=network._prefilled) as prefilled:
        made = engine(of)
        made.batch.submit([row])
        whole = finished(made)["first"]
        assert prefilled.call_count == 1
        assert made.plan() == ()
        assert not made.computing.placing.keys, "it leaves with its row"
        made.batch.submit([row])
        for _ in range(2):
            made.step()
        moved = made.batch.running[0].export()
        other = engine(of)
        other.batch.submit([_resumed(of, row, moved)])
        ended = finished(other)["first"]
        assert prefilled.call_count == 3
    assert distance(ended.latent, whole.latent) <= EXACT, "it travels in float32"


@pytest.mark.parametrize("name", REFERENCE_GRIDS)
def test_a_row_counts_its_prefix(name: str) -> None:
    """In memory as long as it runs, in pairs in each step, and as a sequence of its own in its first step."""
    of, row = tiny_driven.family(name), rows_of(name)[0]
    (prefix,) = row.inputs.prefix
    assert prefix == (5 if name == QWEN else 16 + 6 + 10)
    text = 0 if name == QWEN else 5
    assert row.shapes == (SequenceShape(text, 16, 16, prefix=prefix),)
    assert row.shapes[0].pairs(BlockMode.FULL) == (text + 16) * (prefix + text + 16)
    assert row.joining == (SequenceShape(0, prefix, prefix),)
    assert row.advanced(row.latent).joining == ()
    with torch.no_grad():
        kept = _prepared(place_inputs(row, of).sequences[0].prepared).prefix
    held = sum(each.key.nbytes + each.value.nbytes for each in kept)
    assert row_bytes(row, of, None) - row_bytes(changed(row, prefix=()), of, None) == held
    budget = StepBudget(activation_bytes=1000.0)
    many = changed(row, prefix=(10_000,))
    grown = step_bytes([many], budget, of) - row_bytes(many, of, None)
    assert grown == 1000.0 * 10_000, "a prefix larger than the step itself"


def test_work_of_a_first_step_has_the_prefix() -> None:
    of, row = tiny_driven.family(QWEN), rows_of(QWEN)[2]
    made = engine(of)
    made.batch.submit([row])
    samples = [report.sample for report in iter(made.step, None)]
    first, second = (sample for sample in samples if sample is not None)
    assert (first.image_tokens, second.image_tokens) == (12 + 33, 12)
    assert (first.sequences, second.sequences) == (2, 1)


def test_a_generation_of_klein_without_references_has_no_prefix() -> None:
    of, row = tiny_driven.family(KLEIN_KV), rows_of(KLEIN_KV)[1]
    assert of.network.references.grids(row.grid, (), generated=True) == ()
    assert of.network.prefix_tokens(row.inputs.prompts[0], ()) == 0
    assert row.inputs.beside == (row.grid,), "an edit has its own picture"


def _prepared(made: object) -> PreparedSequence:
    assert isinstance(made, PreparedSequence)
    return made


def _resumed(of: ModelFamily, row: Row, moved: Any) -> Row:
    """The row as another denoiser builds it."""
    prompt: Any = row.inputs.prompts[0]
    return build_row(
        of,
        row.key,
        grid=row.grid,
        track=row.track,
        text=prompt.tensors,
        conditioning=row.inputs.conditioning,
        guidance_scale=1.0,
        resume=moved,
        references=_references(row),
    )


def _references(row: Row) -> list[Tensor]:
    given = row.inputs.beside[1:]
    sizes = [height * width for height, width in given]
    parts = torch.split(row.inputs.conditioning["references"], sizes) if given else ()
    return [part.view(*grid, -1) for part, grid in zip(parts, given, strict=True)]
