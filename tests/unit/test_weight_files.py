"""Which weight files are loaded, and so downloaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import HfApi, RepoFile, _snapshot_download, constants
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

from giornata.checkpoints import CONTROL_FILES, checkpoint_folder, chosen_weights, pipeline_variant
from giornata.model_cards import read_control_card

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


COMMIT = "c" * 40


class Hub:
    """A hub with one repository, which knows what it was asked; one that is `offline` answers nothing."""

    def __init__(self, files: Sequence[str], cache: Path) -> None:
        self.files, self.offline = files, False
        self.snapshot = cache / "models--owner--name" / "snapshots" / COMMIT
        self.asked: list[str] = []

    @property
    def downloaded(self) -> set[str]:
        return {
            path.relative_to(self.snapshot).as_posix() for path in self.snapshot.rglob("*") if path.is_file()
        }

    def repo_info(self, *_: object, **__: object) -> SimpleNamespace:
        if self.offline:
            raise OfflineModeIsEnabled
        self.asked.append("commit")
        return SimpleNamespace(sha=COMMIT)

    def list_repo_tree(self, *_: object, **__: object) -> list[RepoFile]:
        if self.offline:
            raise OfflineModeIsEnabled
        self.asked.append("list")
        return [RepoFile(path=name, size=1, oid="b") for name in self.files]  # type: ignore[no-untyped-call]  # of the hub

    def hf_hub_download(self, _model: str, *, filename: str, **_: object) -> str:
        path = self.snapshot / filename
        if not path.exists():
            if self.offline:
                raise LocalEntryNotFoundError(filename)
            self.asked.append(filename)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        return str(path)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    made = Hub(SDXL, tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(HfApi, "repo_info", made.repo_info)
    monkeypatch.setattr(HfApi, "list_repo_tree", made.list_repo_tree)
    monkeypatch.setattr(_snapshot_download, "hf_hub_download", made.hf_hub_download)
    return made


def test_only_the_variant_that_is_loaded_is_downloaded(hub: Hub) -> None:
    assert checkpoint_folder("owner/name") == hub.snapshot
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
    checkpoint_folder("owner/name", CONTROL_FILES)
    assert hub.downloaded == {"config.json", downloaded}


def test_the_hub_is_asked_once_at_each_start(hub: Hub) -> None:
    checkpoint_folder("owner/name")
    assert sorted(hub.asked) == sorted(["commit", "list", *hub.downloaded])
    hub.asked.clear()
    checkpoint_folder("owner/name")
    assert hub.asked == ["commit"]


def test_a_cache_without_the_other_variants_is_whole_where_the_hub_does_not_answer(hub: Hub) -> None:
    checkpoint_folder("owner/name")
    hub.offline = True
    assert checkpoint_folder("owner/name") == hub.snapshot
    (hub.snapshot / "unet" / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(OSError, match="diffusion_pytorch_model"):
        checkpoint_folder("owner/name")


def test_what_a_cache_without_a_list_has_is_taken_where_the_hub_does_not_answer(
    hub: Hub, tmp_path: Path
) -> None:
    hub.offline = True
    with pytest.raises(OSError):
        checkpoint_folder("owner/name")
    (hub.snapshot / "unet").mkdir(parents=True)
    refs = hub.snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text(COMMIT)
    assert checkpoint_folder("owner/name") == hub.snapshot


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
