"""Cards of ControlNets: what a folder tells, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from giornata.control.layout import control_input
from giornata.model_cards import read_control_card
from giornata.wire.adapters import ControlKind

FLUX = {"_class_name": "FluxControlNetModel", "joint_attention_dim": 4096, "num_mode": None}
UNET = {"_class_name": "ControlNetModel", "cross_attention_dim": 768}


def folder(at: Path, config: object, weights: bytes = b"weights") -> Path:
    (at / "config.json").write_text(json.dumps(config))
    if weights:
        (at / "diffusion_pytorch_model.safetensors").write_bytes(weights)
    return at


@pytest.mark.parametrize(
    ("config", "kind", "channels", "modes"),
    [
        (FLUX, ControlKind.FLUX, 4096, 0),
        ({**FLUX, "num_mode": 10}, ControlKind.FLUX, 4096, 10),
        ({**FLUX, "_class_name": "SD3ControlNetModel"}, ControlKind.SD3, 4096, 0),
        (UNET, ControlKind.UNET, 768, 0),
        (
            {**UNET, "addition_embed_type": "text_time", "cross_attention_dim": 2048},
            ControlKind.UNET,
            2048,
            0,
        ),
    ],
)
def test_a_card_tells_what_the_folder_holds(
    config: dict[str, Any], kind: ControlKind, channels: int, modes: int, tmp_path: Path
) -> None:
    card = read_control_card(folder(tmp_path, config), "outline")
    assert (card.name, card.kind, card.text_channels, card.modes) == ("outline", kind, channels, modes)
    assert (card.weight_bytes, card.sees) == (len(b"weights"), control_input(config))


def test_the_name_is_the_folders_and_the_digest_follows_the_weights(tmp_path: Path) -> None:
    first = read_control_card(folder(tmp_path, FLUX))
    again = read_control_card(folder(tmp_path, FLUX, b"others!"))
    assert first.name == again.name == tmp_path.name
    assert first.digest != again.digest


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({**UNET, "_class_name": "ControlNetUnionModel"}, "served ControlNets are"),
        ({**UNET, "global_pool_conditions": True}, "global_pool_conditions is True; served is False"),
        ({**UNET, "addition_embed_type": "image"}, "served is None or text_time"),
        ({**UNET, "cross_attention_dim": [768, 768]}, "a number of channels"),
        ({"_class_name": "SD3ControlNetModel", "joint_attention_dim": None}, "joint_attention_dim is None"),
        ({**FLUX, "_class_name": "SD3ControlNetModel", "use_pos_embed": False}, "no positions of its own"),
        ({**FLUX, "_class_name": "SD3ControlNetModel", "pos_embed_type": None}, "no positions of its own"),
        (
            {**FLUX, "_class_name": "SD3ControlNetModel", "extra_conditioning_channels": 3},
            "3 extra channels",
        ),
        ([], "does not hold a JSON object"),
    ],
)
def test_what_is_not_served_is_refused(config: object, said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        read_control_card(folder(tmp_path, config))


def test_a_folder_needs_a_configuration_and_safetensors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json is missing"):
        read_control_card(tmp_path)
    with pytest.raises(ValueError, match=r"no \*\.safetensors"):
        read_control_card(folder(tmp_path, FLUX, b""))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        read_control_card(tmp_path)
