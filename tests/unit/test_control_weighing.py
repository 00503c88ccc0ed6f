"""What a ControlNet is said to compute in a step is what torch counts in its forward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from giornata.control.networks import ControlConditions, ControlNet, ControlSequenceStep, ControlText, load
from giornata.planning.operations import control_work, work_of, work_of_weights
from giornata.wire.adapters import ControlCard, ControlKind, ControlWork
from giornata.wire.controlnets import ControlBase
from giornata_lab.bench.compute import tiny_flux, tiny_unet
from tests.fakes import tiny_driven, tiny_flux_control, tiny_sd3_control, tiny_unet_control

WORDS = 77
"""CLIP's, which UNets attend to; of others any number does."""


def counted(net: ControlNet, given: ControlConditions, latent_channels: int) -> float:
    """Multiplications of one sequence's step; every one is followed by an addition, and torch counts both."""
    latents = torch.randn(given.grid[0] * given.grid[1], latent_channels)
    opened = net.open(given)
    # in this form attention is two products of matrices, which are counted; the processor's own kernel is not
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        samples = list(net.run([ControlSequenceStep(opened, 0, latents)]))
    assert samples
    return float(counter.get_total_flops()) / 2


def base(kind: ControlKind, latent_channels: int) -> ControlBase:
    return ControlBase(
        kind=kind, channels=(), latent_channels=latent_channels, token_pixels=16, text_channels=8
    )


def words(channels: int, tokens: int, *, pooled: int | None = None, sizes: bool = False) -> ControlText:
    return ControlText(
        torch.randn(tokens, channels),
        None if pooled is None else torch.randn(pooled),
        torch.rand(6) if sizes else None,
    )


@pytest.mark.parametrize(("shape", "side", "options", "grid"), [
    ("sd", 8, {}, (2, 3)), ("xl", 4, {"layers_per_block": 2}, (2, 3)), ("shallow", 8, {}, (3, 4)),
])  # fmt: skip
def test_of_unets(
    tmp_path: Path, shape: str, side: int, options: dict[str, Any], grid: tuple[int, int]
) -> None:
    tiny_unet_control.net(shape, **options).save_pretrained(tmp_path)
    net, channels = load(tmp_path, torch.float32, torch.device("cpu")), 4 * side**2
    pooled = tiny_unet.POOLED if shape != "sd" else None
    text = words(tiny_unet.CROSS, WORDS, pooled=pooled, sizes=shape != "sd")
    hint = torch.rand(3, *(4 * side * tiles for tiles in grid))
    found = counted(net, ControlConditions(hint, grid, (text,), torch.tensor([500.0])), channels)
    work, image = net.work(base(ControlKind.UNET, channels)), grid[0] * grid[1]
    assert control_work(work, text=0, image=image, sequences=1) == pytest.approx(found, rel=1e-9)
    assert control_work(work, text=0, image=image, sequences=2) == pytest.approx(found), "each has its own"


@pytest.mark.parametrize(
    ("options", "words_", "grid"),
    [({}, 30, (5, 4)), ({"depth": 1, "dual_attention_layers": ()}, 5, (2, 3))],
)
def test_of_sd3(tmp_path: Path, options: dict[str, Any], words_: int, grid: tuple[int, int]) -> None:
    tiny_sd3_control.net(tiny_driven.transformer("sd3").config, **options).save_pretrained(tmp_path)
    net, image = load(tmp_path, torch.float32, torch.device("cpu")), grid[0] * grid[1]
    text = words(tiny_driven.TEXT, words_, pooled=tiny_driven.POOLED)
    given = ControlConditions(torch.randn(image, tiny_driven.LATENT), grid, (text,), torch.tensor([500.0]))
    found = counted(net, given, tiny_driven.LATENT)
    work = net.work(base(ControlKind.SD3, tiny_driven.LATENT))
    assert control_work(work, text=words_, image=image, sequences=2) == pytest.approx(found, rel=1e-9)


@pytest.mark.parametrize(
    ("shape", "words_", "grid"), [((2, 1), 30, (5, 4)), ((1, 0), 5, (2, 3)), ((1, 3), 5, (5, 4))]
)
def test_of_flux(tmp_path: Path, shape: tuple[int, int], words_: int, grid: tuple[int, int]) -> None:
    """A negative prompt gets the positive's samples: two sequences cost what one does."""
    tiny_flux_control.net(*shape).save_pretrained(tmp_path)
    net, image = load(tmp_path, torch.float32, torch.device("cpu")), grid[0] * grid[1]
    text = words(tiny_flux.JOINT_DIM, words_, pooled=tiny_flux.POOLED_DIM)
    given = ControlConditions(torch.randn(image, tiny_flux.LATENT), grid, (text,), torch.tensor([500.0]))
    found = counted(net, given, tiny_flux.LATENT)
    work = net.work(base(ControlKind.FLUX, tiny_flux.LATENT))
    assert control_work(work, text=words_, image=image, sequences=1) == pytest.approx(found, rel=1e-9)
    assert 2 * control_work(work, text=words_, image=image, sequences=2) == pytest.approx(found)


def test_a_card_of_before_tells_its_size_alone() -> None:
    card = ControlCard(name="edges", digest="e", kind=ControlKind.UNET, text_channels=8, weight_bytes=200)
    assert work_of(card) == work_of_weights(200, shared=False) == ControlWork(text=100, image=100)
    assert work_of(card.model_copy(update={"kind": ControlKind.FLUX})).shared
    told = ControlWork(image=5, pair=1)
    assert work_of(card.model_copy(update={"work": told})) == told
    assert control_work(told, text=3, image=4, sequences=2) == 5 * 4 + 16
