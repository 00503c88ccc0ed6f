"""A family more is a row of the table of checkpoints and a class here; the rest of prepost does not notice."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.numpy import load

from giornata import families, kinds
from giornata.wire.requests import EditParameters
from giornata_prepost import checkpoint
from giornata_prepost.config import PrepostConfig
from giornata_prepost.families.flux import FluxFillImages
from giornata_prepost.families.protocol import Condition, rehearse
from giornata_prepost.images.stages import PixelLimits, inspect
from tests.integration.prepost.asking import MASK, SCENE, png


class ToyImages(FluxFillImages):
    """Flux Fill with one more conditioning channel: the mask's share of each token."""

    def _condition(self, picture: torch.Tensor, holes: torch.Tensor, *, modes: bool) -> Condition:
        fill = super()._condition(picture, holes, modes=modes)

        def condition(generator: torch.Generator) -> dict[str, torch.Tensor]:
            made = fill(generator)
            return {**made, "share": made["mask"].mean(dim=-1, keepdim=True)}

        return condition


@pytest.fixture
def toy(
    tiny_checkpoint: Callable[[families.Family], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    folder = Path(shutil.copytree(tiny_checkpoint(families.Family.FLUX_FILL), tmp_path / "toy"))
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"_class_name": "ToyPipeline"}))
    row = families.CheckpointKind("toy", takes_true_cfg=False, steps=3, guidance_scale=2.0, strength=1.0)
    monkeypatch.setitem(kinds.KINDS, "ToyPipeline", row)
    monkeypatch.setitem(checkpoint.FAMILIES, "toy", ToyImages)
    return folder


def test_a_toy_family_is_inspected_encoded_and_decoded(toy: Path) -> None:
    model = checkpoint.open_model(PrepostConfig(model=str(toy), device="cpu"))
    assert (model.card.family, model.card.default_steps) == ("toy", 3)
    rehearse(model)
    found = inspect(
        png(SCENE), png(MASK), EditParameters(prompt="a hat"), model.card, PixelLimits(1 << 20, 1 << 20)
    )
    prepared = load(found.prepared)
    (row,) = model.encode_rows(prepared["image"], prepared["mask"], (0,))
    assert row["share"].shape == (found.tokens, 1)
    assert int((row["share"] > 0).sum()) == found.compute_tokens
