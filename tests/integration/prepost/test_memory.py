"""Text encoders on the CPU beside a device, pictures in tiles, and what happens where memory runs out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL

from giornata.families import Family
from giornata.model_cards import PrepostPlan, read_model_card
from giornata.wire.errors import RowPoisoned
from giornata_prepost.checkpoint import FAMILIES
from giornata_prepost.families.pipeline import in_tiles
from giornata_prepost.images.pictures import Pixels, Size
from tests.integration.prepost.oracle import PROMPT

ROOT = Path(__file__).parents[3]
CPU, META = torch.device("cpu"), torch.device("meta")
SIDE = 576
"""A tile and an eighth."""
WHOLE = np.s_[:, :]
STRIPS = np.s_[180:276], np.s_[:, 260:356]
"""Parts that pass in two tiles, side by side and one below the other."""
ENCODING = (Family.SD, Family.SDXL, Family.SD3, Family.FLUX_KONTEXT, Family.QWEN_IMAGE, Family.CHROMA)
"""A family of each kind of text encoding; others share one of these."""


def fresco(plan: PrepostPlan | None = None) -> Any:
    """The trained model, whose pictures mean something."""
    folder = ROOT / "deploy" / "model" / "fresco"
    card = read_model_card(folder)
    return FAMILIES[card.family](folder, card, CPU, torch.float32, *([] if plan is None else [lambda: plan]))


def picture(side: int = SIDE) -> Pixels:
    """Smooth colours with edges, (side, side, 3)."""
    y, x = np.mgrid[:side, :side] / side
    waves = np.stack([np.sin(9 * x + 4 * y), np.cos(11 * y - 3 * x), np.sin(40 * x * y)], axis=-1)
    pixels: Pixels = (127.5 + 100 * waves).astype(np.uint8)
    pixels[200:420, 300:560] = (220, 60, 30)
    return pixels


def coded(model: Any, side: int) -> tuple[torch.Tensor, Pixels]:
    """The latents of the picture, and the picture of its latents."""
    mask = np.full((side, side), 255, np.uint8)
    (row,) = model.encode_rows(picture(side), mask, [1], modes=True)
    return row["image_latents"], model.decode(row["image_latents"], Size(side, side))


@pytest.mark.parametrize("family", ENCODING, ids=str)
def test_prompts_are_encoded_alike_beside_a_device(
    family: Family, tiny_checkpoint: Callable[[Family], Path]
) -> None:
    """The device is one whose tensors have no values: whatever of a prompt went there could not come back."""
    folder = tiny_checkpoint(family)
    card = read_model_card(folder)
    plan = PrepostPlan(encoders=False, whole_pixels=1 << 20, size_bytes=0)
    models: list[Any] = [  # their pipelines no protocol tells
        FAMILIES[card.family](folder, card, device, torch.float32, *more)
        for device, more in ((CPU, ()), (META, (lambda: plan,)))
    ]
    here, beside = models
    size = Size(64, 64)
    seen = [np.full((64, 64, 3), 90, np.uint8)] if here.text_varies_with_picture else []
    wanted = here.encode_text(PROMPT, size, seen) | here.encode_unguided("blurred", size, seen)
    found = beside.encode_text(PROMPT, size, seen) | beside.encode_unguided("blurred", size, seen)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor)
    assert beside.pipeline.vae.device == META


@pytest.mark.parametrize(
    ("name", "part", "mean", "most"),
    [
        *(("yardstick", strip, 0.5, 5.0) for strip in STRIPS),
        pytest.param("fresco", WHOLE, 9.0, 64.0, marks=pytest.mark.long),
    ],
)
def test_tiles_change_a_picture_by_no_more_than_is_told(
    name: str, part: Any, mean: float, most: float
) -> None:
    """Levels of 255. Norms see a tile in place of the picture, which fresco minds, at twice its training's size."""
    vae = AutoencoderKL.from_pretrained(ROOT / "deploy" / "model" / name / "vae").eval()
    given = torch.from_numpy(picture()[part].copy()).permute(2, 0, 1)[None] / 127.5 - 1

    def reconstructed() -> torch.Tensor:
        with torch.no_grad():
            shown: torch.Tensor = vae.decode(vae.encode(given).latent_dist.mode()).sample
        return shown.clamp(-1, 1)

    whole = reconstructed()
    with in_tiles(vae):
        tiled = reconstructed()
    assert not vae.use_tiling
    difference = (whole - tiled).abs() * 127.5
    assert 0 < difference.mean() < mean
    assert difference.max() < most


def test_a_picture_that_runs_out_of_memory_is_coded_in_tiles_and_so_are_later_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tile, whole = 128, 192
    monkeypatch.setattr("giornata_prepost.families.pipeline.TILE", tile)
    model = fresco()
    wanted = coded(fresco(PrepostPlan(True, tile**2, 0)), whole)
    sides: list[int] = []

    def limited(of: Any) -> None:
        forward = of.forward

        def run(given: torch.Tensor) -> torch.Tensor:
            side = given.shape[-1] * (1 if of is model.pipeline.vae.encoder else 4)
            sides.append(side)
            if side > tile:
                raise torch.OutOfMemoryError("no room")
            result: torch.Tensor = forward(given)
            return result

        monkeypatch.setattr(of, "forward", run)

    limited(model.pipeline.vae.encoder)
    limited(model.pipeline.vae.decoder)
    for _ in range(2):
        latents, pixels = coded(model, whole)
        torch.testing.assert_close(latents, wanted[0])
        assert np.abs(pixels.astype(int) - wanted[1]).max() <= 1
    assert sides.count(whole) == 1, "what ran out of memory once is not tried as a whole again"


def test_one_tile_that_runs_out_of_memory_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fresco()

    def run(_given: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(model.pipeline.vae.decoder, "forward", run)
    with pytest.raises(torch.OutOfMemoryError):
        model.decode(torch.zeros(32 * 32, 4 * 8), Size(256, 256))


def test_encoders_that_run_out_of_memory_go_on_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fresco()
    wanted = model.encode_text("a red circle", Size(64, 64))
    encode = model.pipeline.encode_prompt
    asked: list[str] = []

    def limited(*args: Any, device: torch.device, **named: Any) -> Any:
        asked.append(device.type)
        if device.type != "cpu":
            raise torch.OutOfMemoryError("no room")
        return encode(*args, device=device, **named)

    monkeypatch.setattr(model.pipeline, "encode_prompt", limited)
    model.text_device = META
    for _ in range(2):
        found = model.encode_text("a red circle", Size(64, 64))
        torch.testing.assert_close(found["prompt_embeds"], wanted["prompt_embeds"])
    assert asked == ["meta", "cpu", "cpu"]


@pytest.mark.parametrize("fits", [True, False])
def test_encoders_go_to_the_device_once_others_leave_room_there(
    fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A predecessor's end is that; where they do not fit even so, they are on the CPU from then on."""
    folder = ROOT / "deploy" / "model" / "fresco"
    card = read_model_card(folder)
    plans = [PrepostPlan(encoders, pixels, 0) for encoders, pixels in ((False, 0), (False, 5), (True, 9))]
    model: Any = FAMILIES[card.family](folder, card, CPU, torch.float32, lambda: plans.pop(0))
    places: list[str] = []
    monkeypatch.setattr(model, "_place", lambda: places.append(model.text_device.type))

    def encode(*_: Any, device: torch.device, **__: Any) -> Any:
        asked.append(device.type)
        if device.type != "cpu" and not fits:
            raise torch.OutOfMemoryError("no room")
        return text

    asked: list[str] = []
    text = model.pipeline.encode_prompt("a red circle", device=CPU, prompt_2=None)
    monkeypatch.setattr(model.pipeline, "encode_prompt", encode)
    model.device = META
    pixels = []
    for _ in range(3):
        model.encode_text("a red circle", Size(64, 64))
        pixels.append(model._whole_pixels)
    assert pixels == [5, 9, 9], "what is stated to others is what is decoded as a whole"
    assert (asked, places) == (
        (["cpu", "meta", "meta"], ["meta"]) if fits else (["cpu", "meta", "cpu", "cpu"], ["meta", "cpu"])
    )
    assert plans == []


def test_latents_that_are_not_finite_are_poison_and_no_network_is_loaded() -> None:
    model = fresco()
    with pytest.raises(RowPoisoned):
        model.decode(torch.full((8 * 8, 4 * 8), torch.nan), Size(64, 64))
    assert all(model.pipeline.components[name] is None for name in model.left_out)
