"""Rows of UNets and of Stable Diffusion 3 at the service: what is opened from claim checks equals the nets alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from giornata import tensors
from giornata.blobs.memory import MemoryBlobs
from giornata.control.loading import load
from giornata.control.protocol import ControlConditions, ControlSequenceStep, ControlText
from giornata.control.running import run
from giornata.control.weighing import skip_channels
from giornata.tensors import NEGATIVE
from giornata.wire.adapters import ControlKind, ControlUse, control_name
from giornata.wire.controlnets import ControlBase, DataPath, OpenControl
from giornata.wire.jobs import Encoding
from giornata_controlnet.nets import ResidentControlNets, read_cards
from giornata_controlnet.opening import open_row
from giornata_controlnet.steps import QueuedStep, refused
from tests.contract.messages import INSPECTION, JOB
from tests.fakes import tiny_driven, tiny_sd3_control, tiny_unet, tiny_unet_control
from tests.patience import HUNG_MS

CPU = torch.device("cpu")
GRID = (2, 3)
TIMES = (901.0, 501.0, 37.0)
TEXT_TOKENS = 5
SCALE = 0.7
UNETS = {"sd": 8, "xl": 4}
"""Latent pixels a side of a tile."""


class Asked:
    """A step as a data path hands it over; has what is read of one."""

    token, row, whole = "t", "r", True

    def __init__(self, step: int, latents: Tensor, shapes: tuple[tuple[int, int], ...]) -> None:
        self.step, self.level, self.latents, self.shapes = step, TIMES[step], latents, shapes


def unet(shape: str, folder: Path) -> tuple[ControlBase, Tensor]:
    """A ControlNet's folder is filled: the base that it fits, and a control image."""
    made = tiny_unet_control.net(shape)
    made.save_pretrained(folder)
    side = UNETS[shape]
    base = ControlBase(
        kind=ControlKind.UNET,
        channels=skip_channels(made, side),
        latent_channels=4 * side**2,
        token_pixels=4 * side,
        text_channels=tiny_unet.CROSS,
        pooled_channels=tiny_unet.POOLED if shape == "xl" else None,
    )
    return base, torch.rand(3, GRID[0] * 4 * side, GRID[1] * 4 * side)


def sd3(_: str, folder: Path) -> tuple[ControlBase, Tensor]:
    config = tiny_driven.transformer("sd3").config
    made = tiny_sd3_control.net(config)
    made.save_pretrained(folder)
    base = ControlBase(
        kind=ControlKind.SD3,
        channels=(made.inner_dim,) * config.num_layers,
        latent_channels=tiny_driven.LATENT,
        token_pixels=16,
        text_channels=tiny_driven.TEXT,
        pooled_channels=tiny_driven.POOLED,
    )
    return base, torch.randn(GRID[0] * GRID[1], tiny_driven.LATENT)


def encoded(base: ControlBase, *, sized: bool) -> dict[str, Tensor]:
    """The prompt's tensors and the negative prompt's, by name."""
    found = {}
    for prefix in ("", NEGATIVE):
        found[f"{prefix}prompt_embeds"] = torch.randn(TEXT_TOKENS, base.text_channels)
        if base.pooled_channels is not None:
            found[f"{prefix}pooled_prompt_embeds"] = torch.randn(base.pooled_channels)
        if sized:
            found[f"{prefix}add_time_ids"] = (torch.rand(6) * 100).round()
    return found


@pytest.mark.parametrize(("shape", "made"), [("sd", unet), ("xl", unet), ("sd3", sd3)])
async def test_a_guided_row_equals_its_net_alone(tmp_path: Path, shape: str, made: Any) -> None:
    torch.manual_seed(3)
    base, hint = made(shape, tmp_path / "edges")
    text = encoded(base, sized=shape == "xl")
    net = load(tmp_path / "edges", torch.float32, CPU, "edges")
    blobs = MemoryBlobs()
    ref = await blobs.put("text", tensors.pack(text), 60)
    control = await blobs.put("control", tensors.pack({control_name(0): hint}), 60)
    use = ControlUse(model="edges", digest=net.card.digest, scale=SCALE)
    request = OpenControl(
        job=JOB.model_copy(update={"controls": (use,)}),
        attempt=1,
        index=0,
        inspection=INSPECTION,
        encoding=Encoding(text=ref, text_tokens=TEXT_TOKENS, rows=(ref,), controls=(control,)),
        base=base,
        grid=GRID,
        times=TIMES,
        sequences=2,
        acting=((0, 2),),
        denoiser="d",
        host="h",
        paths=(DataPath.UNIX,),
        remaining_ms=HUNG_MS,
    )
    with ResidentControlNets(
        read_cards(str(tmp_path / "edges")), CPU, torch.float32, budget_bytes=1 << 30, loads=1
    ) as nets:
        row = await open_row(request, nets, blobs)
        latents = torch.randn(GRID[0] * GRID[1], base.latent_channels)
        asked: Any = Asked(1, latents, row.shapes(1, whole=True))
        assert refused(row, asked) is None
        assert row.work(1) > 0
        answers = {
            nth: sample.flatten(0, 1)
            for _, nth, sample in run([QueuedStep(asked, row).of(CPU, torch.float32)])
        }
        assert row.acting(2) == [], "outside of its interval nothing is computed"
        row.pins.close()
    told = tuple(
        ControlText(
            text[f"{prefix}prompt_embeds"],
            text.get(f"{prefix}pooled_prompt_embeds"),
            text.get(f"{prefix}add_time_ids"),
        )
        for prefix in ("", NEGATIVE)
    )
    opened = net.open(ControlConditions(hint, GRID, told, torch.tensor(TIMES)))
    expected = list(net.run([ControlSequenceStep(opened, 1, latents, sequence) for sequence in range(2)]))
    for block, sample in enumerate(net.behind(base)):
        nth = row.sums(1).behind[block]
        assert (nth is None) == (sample is None)
        if nth is not None and sample is not None:
            wanted = torch.cat(list(expected[sample])) * SCALE
            torch.testing.assert_close(answers[nth], wanted, atol=1e-5, rtol=0)
    positive, negative = expected[-1]
    assert (positive - negative).abs().max() > 1e-4, "each sequence has its text"
