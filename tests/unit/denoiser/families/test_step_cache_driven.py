"""Step caches of driven families: rows in different states equal each row alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from giornata_denoiser.families.network import ModelFamily
from giornata_denoiser.rows.row import Row
from giornata_denoiser.rows.step_cache import TaylorRule
from giornata_lab.bench.compute.rows import changed
from giornata_lab.bench.compute.tiny_flux import Spec
from tests.fakes import tiny_driven
from tests.fakes.step_caches import taylor
from tests.unit.denoiser.engine.edits import finish_rows
from tests.unit.denoiser.families.test_driven_engine import edit, masked

EXACT = 1e-9
RULES: list[TaylorRule | None] = [taylor(2, 2, 3), None, taylor(3, 1, 2), taylor(4, 1, 1)]


def ended(of: ModelFamily, rows: list[Row]) -> dict[str, Tensor]:
    return {name: row.latent for name, row in finish_rows(of, rows).items()}


def rows_of(of: ModelFamily, *, takes: bool) -> list[Row]:
    """Rows of one size, and one whose text is longer; they compute all, or renew what is outside their mask."""
    specs = [
        Spec(f"r{n}", steps=8, seed=n, true_cfg_scale=2.0 if n == 1 else 1.0, text_tokens=5 + (n == 3))
        for n in range(len(RULES))
    ]
    plain = [edit(of, spec) for spec in specs]
    return [changed(masked(row), renewed_every=4) for row in plain] if takes else plain


@pytest.mark.parametrize(
    ("name", "takes"),
    [("z-image", False), ("flux2-klein-kv", True), ("qwen-image-2.1", False)],
)
def test_rows_in_different_states_equal_each_row_alone(name: str, *, takes: bool) -> None:
    of = tiny_driven.family(name)
    plain = rows_of(of, takes=takes)
    rows = [replace(row, step_cache=rule) for row, rule in zip(plain, RULES, strict=True)]
    together = ended(of, rows)
    for before, row in zip(plain, rows, strict=True):
        alone = ended(of, [row])[row.key.job_id]
        torch.testing.assert_close(together[row.key.job_id], alone, atol=EXACT, rtol=0)
        if row.step_cache == RULES[-1]:
            exact = ended(of, [before])[row.key.job_id]
            assert (exact - alone).abs().max() > 1e3 * EXACT, "the cache changes nothing"
