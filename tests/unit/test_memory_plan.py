"""The memory plan: what published checkpoints take, alone and beside others, and what it does where they do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata.gpus import DeviceLedger
from giornata.model_cards import (
    CONTEXT_BYTES,
    TILE,
    USABLE,
    ModelMemory,
    PrepostPlan,
    model_memory,
    plan_device,
    plan_prepost,
    read_model_card,
)
from giornata.wire.models import ModelCard
from giornata_prepost.checkpoint import plan_memory
from giornata_prepost.config import PrepostConfig
from tests.fakes.published import published, write_header

GB = 10**9
SIDE = 1024
LARGE = 2048


@pytest.mark.parametrize(
    ("name", "network", "encoders", "decoding", "decoding_large", "step"),
    [
        ("flux", 23.8, 9.8, 1.61, 6.44, 111.2),
        ("qwen-image", 40.9, 16.6, 3.63, 14.5, 111.6),
        ("z-image", 12.3, 8.0, 1.61, 6.44, 127.9),
        ("sdxl", 5.13, 1.6, 3.22, 12.9, 161.6),
    ],
)
def test_published_checkpoints_take_what_their_shapes_were_seen_to_take(
    name: str,
    network: float,
    encoders: float,
    decoding: float,
    decoding_large: float,
    step: float,
    tmp_path: Path,
) -> None:
    """Gigabytes; `step` are the peak's kilobytes for each token, which the plan exceeds for rows of unlike lengths."""
    folder = published(tmp_path, name)
    model, card = model_memory(folder), read_model_card(folder)
    assert model.network == pytest.approx(network * GB, rel=0.01)
    assert model.encoders == pytest.approx(encoders * GB, rel=0.03)
    assert decoding * GB <= model.pixel * SIDE**2 <= 1.03 * decoding * GB
    assert decoding_large * GB <= model.pixel * LARGE**2 <= 1.03 * decoding_large * GB
    beside = card.native_size**2 / model.pixels_a_token
    assert beside == (card.native_size // card.pixel_multiple) ** 2
    row_without_template = step * 1e3 * (beside + model.text_tokens)
    assert row_without_template < model.row(card.native_size**2)
    assert model_memory(folder, quantized=True).network == pytest.approx(0.55 * model.network, rel=0.01)


def test_weights_are_those_that_are_loaded(tmp_path: Path) -> None:
    """Variants beside them are not counted, those alone are, and an index tells what has not been fetched."""
    folder = published(tmp_path, "flux")
    whole = model_memory(folder)
    write_header(folder / "transformer" / "model.fp16.safetensors", 10**9)
    assert model_memory(folder) == whole
    (folder / "transformer" / "model.safetensors").unlink()
    write_header(folder / "transformer" / "model.bf16.safetensors", 10**9)
    assert model_memory(folder).network == 2 * GB
    for variant in ("fp16", "bf16"):
        (folder / "transformer" / f"model.{variant}.safetensors").unlink()
    with pytest.raises(
        ValueError, match=r"transformer has neither weights nor an index that tells their size"
    ):
        model_memory(folder)
    index = {"metadata": {"total_size": 5 * GB}, "weight_map": {}}
    (folder / "transformer" / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    assert model_memory(folder).network == 5 * GB


@pytest.mark.parametrize("name", ["flux", "sdxl"])
def test_numbers_of_four_bytes_take_twice_as_much(name: str, tmp_path: Path) -> None:
    """All but a template's entry, which has bits of its own; SDXL's autoencoder has four bytes a number anyway."""
    folder = published(tmp_path, name)
    half, whole = model_memory(folder), model_memory(folder, 4)
    coded = 1 if name == "sdxl" else 2
    assert (whole.network, whole.encoders) == (2 * half.network, 2 * half.encoders)
    assert (whole.autoencoder, whole.pixel) == (coded * half.autoencoder, coded * half.pixel)
    assert half.token < whole.token < 2 * half.token
    index = {"metadata": {"total_size": half.encoders}, "weight_map": {}}
    for part in ("text_encoder", "text_encoder_2"):
        (folder / part / "model.safetensors").unlink()
        (folder / part / "model.safetensors.index.json").write_text(json.dumps(index))
    assert model_memory(folder, 4).encoders == 2 * model_memory(folder).encoders == 4 * half.encoders


def test_a_broken_header_is_told(tmp_path: Path) -> None:
    folder = published(tmp_path, "flux")
    (folder / "vae" / "model.safetensors").write_bytes(b"\xff" * 9)
    with pytest.raises(ValueError):
        model_memory(folder)


def test_qwen_image_starts_on_80_gb_beside_its_prepost(tmp_path: Path) -> None:
    model = model_memory(published(tmp_path, "qwen-image"))
    prepost, rows = plan_device(80 * GB, model, SIDE**2)
    assert prepost.encoders
    assert rows >= 4
    small, few = plan_device(64 * GB, model, SIDE**2)
    assert not small.encoders, "they make room for the first row"
    assert few >= 1
    assert plan_device(40 * GB, model, SIDE**2)[1] < 1


MODELS = st.builds(
    ModelMemory,
    network=st.integers(10**6, 50 * GB),
    encoders=st.integers(0, 20 * GB),
    autoencoder=st.integers(10**6, GB),
    pixel=st.floats(100, 10_000),
    token=st.floats(1e4, 1e6),
    pixels_a_token=st.sampled_from([128.0, 256.0, 1024.0]),
    text_tokens=st.integers(0, 512),
)
PIXELS = st.integers(TILE**2, 4096**2)


@given(MODELS, st.integers(0, 200 * GB), PIXELS)
def test_what_is_planned_fits_or_is_the_least_there_is(model: ModelMemory, room: int, pixels: int) -> None:
    plan = plan_prepost(room, model, pixels)
    least = plan_prepost(0, model, pixels)
    assert plan.size_bytes <= room or plan == least
    assert (least.encoders, least.whole_pixels) == (False, TILE**2)
    assert TILE**2 <= plan.whole_pixels <= pixels
    assert not plan.encoders or plan.whole_pixels == pixels, "a picture as a whole comes before encoders"
    for encoders in (True, False):
        asked = plan_prepost(0, model, pixels, encoders)
        assert asked.encoders is encoders
        assert asked.size_bytes >= CONTEXT_BYTES + encoders * model.encoders


@given(MODELS, st.integers(0, 200 * GB), st.integers(0, 20 * GB), PIXELS)
def test_more_room_never_gives_less(model: ModelMemory, room: int, more: int, pixels: int) -> None:
    before, after = (plan_prepost(each, model, pixels) for each in (room, room + more))
    assert (before.encoders, before.whole_pixels) <= (after.encoders, after.whole_pixels)


@given(MODELS, st.integers(GB, 200 * GB), PIXELS)
def test_both_services_together_fit_on_the_device(model: ModelMemory, device: int, pixels: int) -> None:
    prepost, rows = plan_device(device, model, pixels)
    if rows >= 1:
        assert prepost.size_bytes + model.denoiser(pixels, rows) <= USABLE * device + 2
    assert prepost.size_bytes + model.denoiser(pixels, max(rows, 0) + 1) > USABLE * device - 2


# What prepost has of a GPU beside others: in whatever order they start.


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return published(tmp_path / "qwen-image", "qwen-image")


@pytest.fixture
def card(folder: Path) -> ModelCard:
    return read_model_card(folder)


@pytest.fixture
def model(folder: Path) -> ModelMemory:
    return model_memory(folder)


def config(**options: Any) -> PrepostConfig:
    return PrepostConfig.model_validate({"model": "m", "model_pixels": SIDE**2} | options)


def test_alone_on_a_gpu_it_takes_what_it_needs(model: ModelMemory, card: ModelCard) -> None:
    plan = plan_memory(config(), model, card, DeviceLedger(), 24 * GB)
    assert plan == PrepostPlan(encoders=True, whole_pixels=SIDE**2, size_bytes=plan.size_bytes)
    assert 20 * GB < plan.size_bytes < USABLE * 24 * GB


@pytest.mark.parametrize("first", ["denoiser", "prepost"])
@pytest.mark.parametrize(("size_gb", "encoders"), [(80, True), (64, False)])
def test_encoders_make_room_for_the_denoiser_whoever_starts_first(
    first: str, size_gb: int, encoders: bool, model: ModelMemory, card: ModelCard, tmp_path: Path
) -> None:
    folder = tmp_path / "ledger"
    denoiser = DeviceLedger(folder, "GPU-a", "denoiser") if first == "denoiser" else None
    if denoiser is not None:
        denoiser.state(model.denoiser(SIDE**2))
    plan = plan_memory(config(), model, card, DeviceLedger(folder, "GPU-a", "prepost"), size_gb * GB)
    denoiser = denoiser or DeviceLedger(folder, "GPU-a", "denoiser")
    assert plan.encoders is encoders
    assert denoiser.others_bytes() == plan.size_bytes
    assert plan.size_bytes + model.denoiser(SIDE**2) <= USABLE * size_gb * GB


def test_a_denoiser_of_another_gpu_takes_nothing_here(
    model: ModelMemory, card: ModelCard, tmp_path: Path
) -> None:
    elsewhere = DeviceLedger(tmp_path / "ledger", "GPU-b", "denoiser")
    elsewhere.state(model.denoiser(SIDE**2))
    assert plan_memory(
        config(), model, card, DeviceLedger(tmp_path / "ledger", "GPU-a", "prepost"), 24 * GB
    ).encoders


def test_large_pictures_pass_in_tiles_where_there_is_no_room(model: ModelMemory, card: ModelCard) -> None:
    large = config(model_pixels=2048**2)
    plan = plan_memory(large, model, card, DeviceLedger(), 12 * GB)
    assert not plan.encoders
    assert SIDE**2 < plan.whole_pixels < 2048**2
    assert plan_memory(large, model, card, DeviceLedger(), GB).whole_pixels == TILE**2


def test_what_is_asked_for_is_done(model: ModelMemory, card: ModelCard) -> None:
    assert plan_memory(config(text_encoders="device"), model, card, DeviceLedger(), GB).encoders
    assert not plan_memory(config(text_encoders="cpu"), model, card, DeviceLedger(), 80 * GB).encoders
