"""Which weight files are loaded, and so downloaded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import DryRunError, OfflineModeIsEnabled
from huggingface_hub.utils._paths import filter_repo_objects

from giornata import checkpoints
from giornata.checkpoints import CONTROL_FILES, checkpoint_folder
from giornata.control_cards import read_control_card
from giornata.weight_files import chosen_weights, pipeline_variant

SDXL = (
    "README.md",
    "model_index.json",
    "sd_xl_base_1.0.safetensors",
    "text_encoder/config.json",
    "text_encoder/flax_model.msgpack",
    "text_encoder/model.fp16.safetensors",
    "text_encoder/model.safetensors",
    "tokenizer/merges.txt",
    "unet/config.json",
    "unet/diffusion_pytorch_model.bin",
    "unet/diffusion_pytorch_model.fp16.safetensors",
    "unet/diffusion_pytorch_model.non_ema.safetensors",
    "unet/diffusion_pytorch_model.safetensors",
    "vae/config.json",
    "vae/diffusion_pytorch_model.fp16.safetensors",
)
"""As the repository of SDXL has them, but for more of the same; its autoencoder in 16 bits alone."""


@pytest.mark.parametrize(
    ("paths", "chosen"),
    [
        (("a/model.safetensors", "a/model.fp16.safetensors"), {"a/model.safetensors"}),
        (("a/model.fp16.safetensors",), {"a/model.fp16.safetensors"}),
        (("model.bf16.safetensors", "model.fp16.safetensors"), {"model.fp16.safetensors"}),
        (
            (
                "a/model-00001-of-00002.safetensors",
                "a/model-00002-of-00002.safetensors",
                "a/model.fp16-00001-of-00002.safetensors",
            ),
            {"a/model-00001-of-00002.safetensors", "a/model-00002-of-00002.safetensors"},
        ),
        (
            (
                "a/diffusion_pytorch_model-00001-of-00002.fp16.safetensors",
                "a/diffusion_pytorch_model-00001-of-00002.bf16.safetensors",
            ),
            {"a/diffusion_pytorch_model-00001-of-00002.fp16.safetensors"},
        ),
        (("a/weights.safetensors", "b.safetensors"), {"a/weights.safetensors", "b.safetensors"}),
        ((), set()),
    ],
)
def test_of_each_folder_one_variant_is_chosen(paths: Sequence[str], chosen: set[str]) -> None:
    assert chosen_weights(paths) == chosen


def test_a_folders_variant_is_that_of_its_parts(tmp_path: Path) -> None:
    for name in SDXL:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert pipeline_variant(tmp_path) == "fp16"
    assert pipeline_variant(tmp_path, ["vae"]) is None


class Hub:
    """A hub that lists one repository, and knows what was asked of it; one that is `offline` answers nothing."""

    def __init__(self, files: Sequence[str], *, offline: bool = False) -> None:
        self.files, self.offline = files, offline
        self.downloaded: set[str] = set()

    def snapshot_download(
        self, _model: str, *, dry_run: bool = False, **patterns: Any
    ) -> str | list[SimpleNamespace]:
        if self.offline:
            if dry_run:
                raise DryRunError("no connection")
            return "cached"
        asked = list(filter_repo_objects(self.files, **patterns))
        if dry_run:
            return [SimpleNamespace(filename=name) for name in asked]
        self.downloaded = set(asked)
        return "snapshot"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    made = Hub(SDXL)
    monkeypatch.setattr(checkpoints, "snapshot_download", made.snapshot_download)
    return made


def test_only_the_variant_that_is_loaded_is_downloaded(hub: Hub) -> None:
    assert checkpoint_folder("stabilityai/sdxl") == Path("snapshot")
    assert hub.downloaded == {
        "model_index.json",
        "text_encoder/config.json",
        "text_encoder/model.safetensors",
        "tokenizer/merges.txt",
        "unet/config.json",
        "unet/diffusion_pytorch_model.safetensors",
        "vae/config.json",
        "vae/diffusion_pytorch_model.fp16.safetensors",
    }


@pytest.mark.parametrize(
    ("files", "downloaded"),
    [
        (
            ("diffusion_pytorch_model.fp16.safetensors", "diffusion_pytorch_model.safetensors"),
            "diffusion_pytorch_model.safetensors",
        ),
        (
            ("diffusion_pytorch_model.fp16.safetensors", "old_model.safetensors"),
            "diffusion_pytorch_model.fp16.safetensors",
        ),
    ],
)
def test_of_a_controlnet_one_variant_is_downloaded(hub: Hub, files: Sequence[str], downloaded: str) -> None:
    hub.files = ("config.json", "README.md", *files)
    checkpoint_folder("xinsir/canny", CONTROL_FILES)
    assert hub.downloaded == {"config.json", downloaded}


def test_what_the_cache_has_is_taken_where_the_hub_does_not_answer(hub: Hub) -> None:
    hub.offline = True
    assert checkpoint_folder("stabilityai/sdxl") == Path("cached")


def test_a_cache_without_the_other_variants_is_whole_where_the_hub_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unanswered(*_: object, **__: object) -> None:
        raise OfflineModeIsEnabled

    monkeypatch.setattr(HfApi, "repo_info", unanswered)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    commit, files = "c" * 40, ("model.safetensors", "model.fp16.safetensors")
    repository = tmp_path / "models--someone--sdxl"
    snapshot = repository / "snapshots" / commit
    for folder in (repository / "refs", repository / "trees", snapshot / "unet"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    listed = {f"unet/diffusion_pytorch_{name}": {"size": 1, "blob_id": "b"} for name in files}
    (repository / "trees" / f"{commit}.json").write_text(json.dumps({"format_version": 1, "files": listed}))
    (snapshot / "unet" / "diffusion_pytorch_model.safetensors").touch()
    assert checkpoint_folder("someone/sdxl") == snapshot


def test_a_controlnet_weighs_what_is_loaded_of_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"_class_name": "FluxControlNetModel", "joint_attention_dim": 8}')
    (tmp_path / "diffusion_pytorch_model.safetensors").write_bytes(b"1234")
    (tmp_path / "diffusion_pytorch_model.fp16.safetensors").write_bytes(b"12")
    assert read_control_card(tmp_path).weight_bytes == 4


def test_a_controlnet_that_was_saved_quantised_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"_class_name": "FluxControlNetModel", "joint_attention_dim": 8, "quantization_config": {"quant_method": "x"}}'
    )
    with pytest.raises(ValueError, match="saved quantised; received: x; accepted: weights in float32"):
        read_control_card(tmp_path)
