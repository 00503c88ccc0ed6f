"""Which clean pictures stand behind a row's, as the network and as the card count them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from giornata.families import KINDS
from giornata.tensors import pack
from giornata.wire.errors import SchemaMismatch
from giornata_denoiser.checkpoint import LOADERS
from giornata_denoiser.families.driven.flux2 import Flux2, Flux2Klein
from giornata_denoiser.families.driven.network import DrivenNetwork
from giornata_denoiser.families.driven.qwen_image import QwenImageEdit
from giornata_denoiser.families.flux import FluxInpaint, FluxKontext
from giornata_denoiser.families.network import REFERENCES, Grid, ReferencePolicy, reference_tokens
from giornata_denoiser.families.rows import read_references
from tests.contract.messages import INSPECTION
from tests.unit.prepost.test_references import KLEIN

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
