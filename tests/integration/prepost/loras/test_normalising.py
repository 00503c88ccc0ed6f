"""Canonical files against diffusers: what it adds to each weight when it loads and fuses the same source."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from giornata.families import Family
from giornata.wire.errors import GiornataError, LoraMismatch, LoraNotFinite, LoraNotSupported, LoraUnreadable
from giornata_prepost.loras.normalisation import normalise
from tests.integration.prepost.loras import oracle

Checkpoint = Callable[[Family], Path]
FAMILIES = (Family.SDXL, Family.SD3, Family.FLUX_INPAINT, Family.FLUX2_KLEIN_KV, Family.QWEN_IMAGE_21)
"""Those whose text encoders have factors, too, and those of which no naming is read in `test_namings.py`."""


@pytest.mark.parametrize("family", FAMILIES)
def test_it_changes_each_weight_as_diffusers_does(
    family: Family, tiny_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = tiny_checkpoint(family)
    source = oracle.saved(folder, tmp_path)
    made = normalise(source, tmp_path / "canonical", folder, {"model": "tiny"})
    oracle.check_equal(tmp_path / "canonical", folder, source)
    assert made.rank == 4
    assert made.modules > 0
    written = load_file(tmp_path / "canonical")
    assert made.weights == sum(part.numel() for name, part in written.items() if "text_encoder" not in name)


def test_the_file_is_ordered_by_block_and_the_same_every_time(
    tiny_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = tiny_checkpoint(Family.SDXL)
    source = oracle.saved(folder, tmp_path)
    told = {"model": "tiny", "source_sha256": "s"}
    for name in ("one", "two"):
        normalise(source, tmp_path / name, folder, told)
    data = (tmp_path / "one").read_bytes()
    assert data == (tmp_path / "two").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    facts = header.pop("__metadata__")
    assert (facts["form"], facts["model"], facts["rank"]) == ("giornata-lora-1", "tiny", "4")
    assert facts["text_encoders"] == "text_encoder,text_encoder_2"
    names = sorted(header, key=lambda name: header[name]["data_offsets"])
    blocks = [key for key, _ in itertools.groupby(name.partition(".")[0] for name in names)]
    assert blocks == ["down_blocks", "mid_block", "up_blocks", "text_encoder", "text_encoder_2"]
    assert [name.rpartition(".")[2] for name in names[:2]] == ["down", "up"]


def _pair(name: str, down: str, up: str, into: int = 8, out: int = 8) -> dict[str, Tensor]:
    return {f"{name}.{down}.weight": torch.ones(4, into), f"{name}.{up}.weight": torch.ones(out, 4)}


def _bad(folder: Path) -> dict[str, tuple[dict[str, Tensor], type[GiornataError], str]]:
    module = "transformer.transformer_blocks.0.attn.to_q"
    out, into = oracle.loaded(folder).transformer.transformer_blocks[0].attn.to_q.weight.shape
    whole = _pair(module, "lora_A", "lora_B", into, out)

    def with_down(down: Tensor) -> dict[str, Tensor]:
        return whole | {f"{module}.lora_A.weight": down}

    other = "unet.down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"
    lost = "transformer.nowhere.to_q"
    return {
        "not a number": (with_down(torch.full((4, into), math.nan)), LoraNotFinite, module),
        "infinite": (with_down(torch.full((4, into), math.inf)), LoraNotFinite, module),
        "another shape": (with_down(torch.ones(4, into + 8)), LoraMismatch, "to_q: "),
        "a module that is not there": (
            whole | _pair(lost, "lora_A", "lora_B"),
            LoraMismatch,
            "nowhere",
        ),
        "another base": (_pair(other, "lora_A", "lora_B"), LoraMismatch, "unet.down_blocks"),
        "half a module": (
            {name: tensor for name, tensor in whole.items() if "lora_A" in name},
            LoraNotSupported,
            "one factor",
        ),
    }


def test_what_does_not_fit_is_refused_by_name(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = tiny_checkpoint(Family.FLUX_INPAINT)
    for kind, (tensors, error, said) in _bad(folder).items():
        save_file(tensors, tmp_path / "bad.safetensors")
        with pytest.raises(error) as raised:
            normalise(tmp_path / "bad.safetensors", tmp_path / "canonical", folder, {})
        assert said in str(raised.value), kind
        assert not (tmp_path / "canonical").exists(), kind


def _dropped() -> dict[str, tuple[Family, dict[str, Tensor], str]]:
    """Files of which diffusers leaves something out without a word: family, tensors, and what is refused."""
    block = "0_1_transformer_blocks_0_attn1_to_q"
    sgm, named = f"lora_unet_input_blocks_4_{block[2:]}", "lora_unet_down_blocks_1_attentions_0_proj_in"
    module = "transformer_blocks.0.attn.to_q"
    return {
        "names of the original UNet beside diffusers'": (
            Family.SDXL,
            _pair(sgm, "lora_down", "lora_up") | _pair(named, "lora_down", "lora_up"),
            sgm,
        ),
        "an alpha under another name": (
            Family.QWEN_IMAGE,
            _pair(module, "lora_down", "lora_up") | {f"{module}.extra.alpha": torch.tensor(1.0)},
            f"{module}.extra.alpha",
        ),
        "a module under two names": (
            Family.FLUX_INPAINT,
            _pair(module, "lora_A", "lora_B") | _pair(f"base_model.model.{module}", "lora_A", "lora_B"),
            module,
        ),
    }


@pytest.mark.parametrize("kind", list(_dropped()))
def test_a_file_that_diffusers_reads_in_part_is_refused(
    kind: str, tiny_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    family, tensors, said = _dropped()[kind]
    save_file(tensors, tmp_path / "part.safetensors")
    with pytest.raises(LoraNotSupported) as raised:
        normalise(tmp_path / "part.safetensors", tmp_path / "canonical", tiny_checkpoint(family), {})
    assert said in str(raised.value)


@pytest.mark.parametrize("told", [0, 1, 2])
def test_alphas_are_told_of_every_module_or_of_none(
    told: int, tiny_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = tiny_checkpoint(Family.FLUX_INPAINT)
    names = [f"transformer.transformer_blocks.0.attn.{name}" for name in ("to_q", "to_k")]
    wide = oracle.loaded(folder).transformer.transformer_blocks[0].attn.to_q.weight.shape
    tensors: dict[str, Tensor] = {}
    for name in names:
        tensors |= _pair(name, "lora_A", "lora_B", wide[1], wide[0])
    tensors |= {f"{name}.alpha": torch.tensor(2.0) for name in names[:told]}
    save_file(tensors, tmp_path / "alphas.safetensors")
    if told == 1:
        with pytest.raises(LoraNotSupported, match="others have none") as raised:
            normalise(tmp_path / "alphas.safetensors", tmp_path / "canonical", folder, {})
        assert "to_k" in str(raised.value)
        return
    normalise(tmp_path / "alphas.safetensors", tmp_path / "canonical", folder, {})
    change = oracle.products(tmp_path / "canonical")["transformer_blocks.0.attn.to_k.weight"]
    assert torch.equal(change, torch.full(wide, 2.0 if told else 4.0))


def test_a_pickle_is_never_opened(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    source = tmp_path / "pickle.safetensors"
    torch.save({"x": torch.ones(1)}, source)
    with pytest.raises(LoraUnreadable):
        normalise(source, tmp_path / "canonical", tiny_checkpoint(Family.FLUX_INPAINT), {})
