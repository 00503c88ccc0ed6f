"""ControlNets of UNets: rows of different sizes, steps and texts equal `ControlNetModel` on each alone; in float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from giornata.control.layout import ControlMismatch
from giornata.control.networks import ControlConditions, ControlSequenceStep, ControlText, load
from giornata.control.unet import UnetControl
from giornata.packed.packing import maps_to_tiles, tiles_to_maps
from giornata_lab.bench.compute import tiny_unet
from tests.fakes import tiny_unet_control

EXACT = 1e-9
SIDES = {"sd": 8, "xl": 4}


def loaded(shape: str, folder: Path, order: str) -> UnetControl:
    made = tiny_unet_control.net(shape, controlnet_conditioning_channel_order=order)
    made.save_pretrained(folder)
    found = load(folder, torch.float64, torch.device("cpu"), "edges")
    assert isinstance(found, UnetControl)
    return found


def words(shape: str, tokens: int) -> ControlText:
    embeds = torch.randn(tokens, tiny_unet.CROSS).double()
    if shape == "sd":
        return ControlText(embeds)
    return ControlText(embeds, torch.randn(tiny_unet.POOLED).double(), (torch.rand(6) * 100).round().double())


def conditions(shape: str, grid: tuple[int, int], tokens: int) -> ControlConditions:
    height, width = (4 * SIDES[shape] * tiles for tiles in grid)
    both = words(shape, tokens), words(shape, tokens)
    return ControlConditions(
        torch.rand(3, height, width).double(), grid, both, torch.tensor([901.0, 501.0, 37.0])
    )


@pytest.mark.parametrize(("shape", "order"), [("sd", "rgb"), ("xl", "bgr")])
@torch.inference_mode()
def test_rows_that_share_forwards_equal_each_alone(tmp_path: Path, shape: str, order: str) -> None:
    net, side = loaded(shape, tmp_path / "net", order), SIDES[shape]
    oracle = tiny_unet_control.net(shape, dtype=torch.float64, controlnet_conditioning_channel_order=order)
    torch.manual_seed(1)
    rows = [conditions(shape, (2, 3), 5), conditions(shape, (3, 2), 5), conditions(shape, (2, 3), 4)]
    opened = [net.open(row) for row in rows]
    steps = [(0, 0, 0), (0, 0, 1), (1, 2, 0), (2, 1, 1), (0, 2, 0)]  # row, step, sequence
    latents = [torch.randn(6, 4 * side**2).double() for _ in steps]
    items = [
        ControlSequenceStep(opened[row], step, one, nth)
        for (row, step, nth), one in zip(steps, latents, strict=True)
    ]
    samples = list(net.run(items))
    assert len(samples) == net.samples
    for place, ((of, step, nth), latent) in enumerate(zip(steps, latents, strict=True)):
        row = rows[of]
        text = row.texts[nth]
        added = None
        if text.pooled is not None and text.time_ids is not None:
            added = {"text_embeds": text.pooled[None], "time_ids": text.time_ids[None]}
        skips, middle = oracle(
            tiles_to_maps(latent.view(1, 6, 4, side, side), row.grid),
            row.times[step],
            text.embeds[None],
            controlnet_cond=row.hint[None],
            added_cond_kwargs=added,
            return_dict=False,
        )
        for sample, wanted in zip(samples, (*skips, middle), strict=True):
            torch.testing.assert_close(
                sample[place], maps_to_tiles(wanted, row.grid)[0].flatten(1), atol=EXACT, rtol=0
            )
    assert (samples[-1][0] - samples[-1][1]).abs().max() > 1e-4, "the text is seen"


def test_a_text_of_another_model_is_refused(tmp_path: Path) -> None:
    net = loaded("xl", tmp_path / "net", "rgb")
    wrong = ControlText(torch.zeros(5, tiny_unet.CROSS + 8))
    with pytest.raises(ControlMismatch, match="width 24, and the model has 32"):
        net.open(ControlConditions(torch.zeros(3, 32, 32), (2, 2), (wrong,), torch.zeros(1)))
    with pytest.raises(ControlMismatch, match="pooled"):
        net.open(ControlConditions(torch.zeros(3, 32, 32), (2, 2), (words("sd", 5),), torch.zeros(1)))
    with pytest.raises(ControlMismatch, match="was given"):
        net.open(ControlConditions(torch.zeros(1, 32, 32), (2, 2), (words("xl", 5),), torch.zeros(1)))
