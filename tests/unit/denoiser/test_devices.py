"""Devices of a pool: what is taken, and what is refused with a sentence that says what to change."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from giornata.wire.errors import Failed
from giornata_denoiser.choices import check_present, parse_devices
from giornata_denoiser.config import DenoiserConfig


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("", ()),
        ("cpu,cpu", ("cpu", "cpu")),
        ("cuda:1, cuda:0", ("cuda:1", "cuda:0")),
        (",".join(["cpu"] * 8), ("cpu",) * 8),
    ],
)
def test_devices_are_listed_with_commas(text: str, devices: tuple[str, ...]) -> None:
    assert parse_devices(text) == devices
    assert DenoiserConfig(model="m", devices=text).device_names == devices


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("cuda:0,cuda:1,cuda:0", "cuda:0 twice; name every GPU once"),
        ("gpu", "'gpu'; write each device as cpu, as cuda:N, or as cuda for any that is free"),
        ("cuda:0,", "''; write each device as cpu, as cuda:N, or as cuda for any that is free"),
        ("cuda,cuda:1,cuda", "2 of 3 GPUs without a number; number all or none"),
        ("cpu,cuda:0", "the CPU beside GPUs; name devices of one kind"),
        (",".join(["cpu"] * 9), "9 devices; a pool has at most 8: start another denoiser for the rest"),
    ],
)
def test_a_list_that_cannot_be_is_refused(text: str, told: str) -> None:
    with pytest.raises(ValueError, match="GIORNATA_DEVICES") as refused:
        parse_devices(text)
    assert told in str(refused.value)
    with pytest.raises(ValidationError, match="GIORNATA_DEVICES"):
        DenoiserConfig(model="m", devices=text)


@pytest.mark.parametrize(
    ("devices", "gpus", "there"),
    [(("cuda:0", "cuda:1"), 1, "cuda:0"), (("cuda:2",), 2, "cuda:0, cuda:1"), (("cuda:0",), 0, "none")],
)
def test_more_ranks_than_the_machine_has_devices_are_refused(
    devices: tuple[str, ...], gpus: int, there: str
) -> None:
    with pytest.raises(Failed, match="leave them out, or start the denoiser where they are") as refused:
        check_present(devices, gpus)
    body = refused.value.body()
    assert (body.received, body.accepted) == (", ".join(devices), there)


def test_the_cpu_has_as_many_ranks_as_are_asked_for() -> None:
    check_present(("cpu",) * 8, gpus=0)
    check_present(("cuda:0", "cuda:1"), gpus=2)


@pytest.mark.parametrize(
    ("told", "wanted"),
    [
        ({}, 1),
        ({"device": "cuda"}, 1),
        ({"device": "cuda:3"}, 0),
        ({"device": "cpu"}, 0),
        ({"devices": "cuda,cuda"}, 2),
        ({"devices": "cuda"}, 1),
        ({"devices": "cuda:2,cuda:3"}, 0),
        ({"devices": "cpu,cpu"}, 0),
    ],
)
def test_gpus_without_a_number_are_claimed(told: dict[str, str], wanted: int) -> None:
    config = DenoiserConfig.model_validate({"model": "m", "device_claims": "/claims", **told})
    assert config.gpus_wanted == wanted


def test_a_pool_of_free_gpus_takes_a_folder_of_claims() -> None:
    assert DenoiserConfig.model_validate(
        {"model": "m", "devices": "cuda, cuda", "device_claims": "/c"}
    ).device_names == ("cuda:0", "cuda:1"), "it sees those that it has claimed, and no others"
    with pytest.raises(ValidationError, match="which takes GIORNATA_DEVICE_CLAIMS"):
        DenoiserConfig(model="m", devices="cuda,cuda")
