"""Canonical files against diffusers: what it adds to each weight when it loads and fuses the same source."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from giornata.families import Family
from giornata_prepost.loras.normalising import normalise
from tests.integration.prepost.loras import oracle

Checkpoint = Callable[[Family], Path]
FAMILIES = [family for family in Family if not family.endswith("-inpaint") or family is Family.FLUX_INPAINT]


@pytest.mark.parametrize("family", FAMILIES)
def test_it_changes_each_weight_as_diffusers_does(
    family: Family, tiny_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = tiny_checkpoint(family)
    source = oracle.saved(folder, tmp_path)
    made = normalise(source, tmp_path / "canonical", folder, {"model": "tiny"})
    oracle.check_equal(tmp_path / "canonical", folder, source)
    assert made.rank == 4
    assert made.modules > 0
