"""PEFT's configuration in a stranger's file: its fields are typed, and its patterns are no programs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from giornata.wire.errors import LoraNotSupported
from giornata_prepost.loras.source import METADATA, AdapterConfig, read_configs

MODULE = "blocks.0.attn.to_q"


def config(**fields: Any) -> AdapterConfig:
    metadata = {METADATA: json.dumps({f"transformer.{name}": value for name, value in fields.items()})}
    return read_configs(metadata, ("transformer", "text_encoder"))["transformer"]


@pytest.mark.parametrize(
    ("pattern", "alpha"),
    [
        ("to_q", 2.0),
        ("attn.to_q", 2.0),
        (MODULE, 2.0),
        (f"^{MODULE}", 2.0),
        (f"^{MODULE}$", 2.0),
        ("^to_q", 16.0),
        ("o_q", 16.0),
        ("blocks.0.attn.to_", 16.0),
    ],
)
def test_a_pattern_is_the_end_of_a_modules_name(pattern: str, alpha: float) -> None:
    assert config(lora_alpha=16, alpha_pattern={pattern: 2}).alpha(MODULE, 4) == alpha


def test_names_of_z_images_layers_have_hyphens() -> None:
    assert config(lora_alpha=1, alpha_pattern={"all_x_embedder.2-1": 3}).alpha("all_x_embedder.2-1", 4) == 3.0


def test_the_first_pattern_counts() -> None:
    assert config(lora_alpha=1, alpha_pattern={"to_k": 5, "to_q": 3, MODULE: 2}).alpha(MODULE, 4) == 3.0


def test_without_an_alpha_it_is_the_rank_and_rslora_scales_by_its_root() -> None:
    assert config().alpha(MODULE, 4) == 4.0
    assert read_configs({}, ("unet",)) == {"unet": AdapterConfig()}
    assert config(lora_alpha=8, use_rslora=True, r=4, target_modules=["to_q"]).alpha(MODULE, 4) == 16.0


@pytest.mark.parametrize(
    ("fields", "received"),
    [
        ({"lora_alpha": "abc"}, "transformer.lora_alpha: 'abc'"),
        ({"lora_alpha": [1]}, "transformer.lora_alpha: [1]"),
        ({"lora_alpha": True}, "transformer.lora_alpha: True"),
        ({"lora_alpha": float("nan")}, "transformer.lora_alpha: nan"),
        ({"lora_alpha": 1e300}, "transformer.lora_alpha: 1e+300"),
        ({"lora_alpha": 1, "alpha_pattern": ["to_q"]}, "transformer.alpha_pattern: ['to_q']"),
        ({"lora_alpha": 1, "alpha_pattern": {"to_q": "x"}}, "transformer.alpha_pattern.to_q: 'x'"),
        ({"lora_alpha": 1, "alpha_pattern": {"(": 1}}, "transformer.alpha_pattern.(: '('"),
        (
            {"lora_alpha": 1, "alpha_pattern": {"([a-z_0-9.]+)+!": 1}},
            "transformer.alpha_pattern.([a-z_0-9.]+)+!",
        ),
        ({"use_rslora": "yes"}, "transformer.use_rslora: 'yes'"),
        ({"use_dora": True}, "transformer.use_dora: True"),
    ],
)
def test_what_is_not_accepted_is_told(fields: dict[str, Any], received: str) -> None:
    with pytest.raises(LoraNotSupported) as refused:
        config(**fields)
    assert (refused.value.received or "").startswith(received)


@pytest.mark.parametrize(
    "text", ["{", "[1]", "1", '{"transformer.lora_alpha": ' + "9" * 5000 + "}", "[" * 100_000]
)
def test_a_text_that_is_no_configuration_is_refused(text: str) -> None:
    with pytest.raises(LoraNotSupported):
        read_configs({METADATA: text}, ("transformer",))


def test_thousands_of_patterns_cost_nothing() -> None:
    patterns = {f"m{number}": number for number in range(4096)}
    many = config(lora_alpha=1, alpha_pattern=patterns)
    assert [many.alpha(f"blocks.{number}.m{number}", 4) for number in range(0, 4096, 8)] == [
        *range(0, 4096, 8)
    ]
    with pytest.raises(LoraNotSupported, match="4096"):
        config(lora_alpha=1, alpha_pattern={f"m{number}": number for number in range(5000)})
