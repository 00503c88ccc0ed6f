"""ControlNets of SD3: rows of different sizes, steps and texts equal `SD3ControlNetModel` on each alone; in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pixel_shuffle

from giornata.control.layout import ControlMismatch
from giornata.control.networks import ControlConditions, ControlSequenceStep, ControlText, load
from giornata.control.sd3 import SD3Control
from tests.fakes import tiny_driven, tiny_sd3_control

EXACT = 1e-9
CONFIG = tiny_driven.transformer("sd3").config


def loaded(folder: Path, **options: Any) -> SD3Control:
    tiny_sd3_control.net(CONFIG, **options).save_pretrained(folder)
    found = load(folder, torch.float64, torch.device("cpu"), "edges")
    assert isinstance(found, SD3Control)
    return found


def words(tokens: int) -> ControlText:
    embeds, pooled = torch.randn(tokens, tiny_driven.TEXT), torch.randn(tiny_driven.POOLED)
    return ControlText(embeds.double(), pooled.double())


def conditions(grid: tuple[int, int], tokens: int, channels: int = tiny_driven.LATENT) -> ControlConditions:
    hint = torch.randn(grid[0] * grid[1], channels).double()
    return ControlConditions(hint, grid, (words(tokens), words(tokens)), torch.tensor([901.0, 501.0, 37.0]))


def maps(tokens: Tensor, grid: tuple[int, int]) -> Tensor:
    """(1, channels, height, width)"""
    return pixel_shuffle(tokens.T.reshape(1, -1, *grid), 2)


@pytest.mark.parametrize(
    ("options", "zeros"),
    [
        ({"depth": 3, "force_zeros_for_pooled_projection": False}, False),
        ({"dual_attention_layers": (), "qk_norm": None}, True),
        ({"extra_conditioning_channels": 1}, True),
        ({"extra_conditioning_channels": 1, "force_zeros_for_pooled_projection": False}, True),
    ],
    ids=["3.5", "instantx", "masked", "masked, told otherwise"],
)
@torch.inference_mode()
def test_rows_that_share_forwards_equal_each_alone(
    tmp_path: Path, options: dict[str, Any], zeros: bool
) -> None:
    net = loaded(tmp_path / "net", **options)
    oracle: Any = tiny_sd3_control.net(CONFIG, dtype=torch.float64, **options)
    channels = tiny_driven.LATENT + 4 * options.get("extra_conditioning_channels", 0)
    torch.manual_seed(1)
    rows = [conditions(grid, tokens, channels) for grid, tokens in (((2, 3), 5), ((3, 2), 5), ((2, 3), 4))]
    opened = [net.open(row) for row in rows]
    steps = [(0, 0, 0), (0, 0, 1), (1, 2, 0), (2, 1, 1), (0, 2, 0)]  # row, step, sequence
    latents = [torch.randn(6, tiny_driven.LATENT).double() for _ in steps]
    items = [
        ControlSequenceStep(opened[row], step, one, nth)
        for (row, step, nth), one in zip(steps, latents, strict=True)
    ]
    samples = list(net.run(items))
    assert len(samples) == net.samples
    for place, ((of, step, nth), latent) in enumerate(zip(steps, latents, strict=True)):
        row = rows[of]
        pooled = row.texts[nth].pooled
        assert pooled is not None
        (wanted,) = oracle(
            maps(latent, row.grid),
            maps(row.hint, row.grid),
            encoder_hidden_states=row.texts[nth].embeds[None],
            pooled_projections=(torch.zeros_like(pooled) if zeros else pooled)[None],
            timestep=row.times[step : step + 1],
            return_dict=False,
        )
        for sample, expected in zip(samples, wanted, strict=True):
            torch.testing.assert_close(sample[place], expected[0], atol=EXACT, rtol=0)
    assert (samples[-1][0] - samples[-1][1]).abs().max() > 1e-4, "the text is seen"


def test_what_is_not_the_rows_is_refused(tmp_path: Path) -> None:
    net, times = loaded(tmp_path / "net"), torch.zeros(1)
    with pytest.raises(ControlMismatch, match="pooled"):
        net.open(ControlConditions(torch.zeros(4, 64), (2, 2), (ControlText(words(5).embeds),), times))
    with pytest.raises(ControlMismatch, match=r"\(4, 64\) tokens and channels, and was given \(4, 68\)"):
        net.open(ControlConditions(torch.zeros(4, 68), (2, 2), (words(5),), times))
