"""The source of a checkpoint and the device it runs on, for every service that loads one.

A configuration is judged before torch is loaded: what needs it, or the hub, imports it when it is called.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from glob import escape
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from pydantic import Field

from giornata.config import ServiceConfig
from giornata.wire.errors import Failed

if TYPE_CHECKING:
    import torch

FILES: Final = ["*.json", "*/*.json", "*/*.txt", "*/*.model", "*/*.jinja", "*/*.safetensors"]
"""Files of a hub repository: the whole diffusers folder, no single-file weights, and of variants the one loaded."""
CONTROL_FILES: Final = [
    "config.json",
    "diffusion_pytorch_model*.safetensors",
    "diffusion_pytorch_model*.json",
]
"""Files of a ControlNet's repository: those of `save_pretrained`, and of its variants the one that is loaded."""


class DeviceConfig(ServiceConfig):
    """Configuration of a service that computes with torch."""

    device: str = Field(
        "auto",
        pattern=r"^(auto|cpu|cuda(:\d+)?)$",
        description="Where it computes; auto: a GPU if there is one; cuda: a GPU, or it does not start; "
        "cuda:1, or cpu, where it should have that one.",
    )
    device_claims: Path | None = Field(
        None,
        description="Folder that the replicas of this host share, where several see all of its GPUs: each "
        "claims a free one there, and keeps it while it runs. Without effect on a CPU, or where a GPU is named "
        "by number; default: all take the first one.",
    )
    device_ledger: Path | None = Field(
        None,
        description="Folder in which services of this host state what they need of a GPU's memory, where they "
        "share one, so that none takes what another one needs; default: each takes what is free.",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="Of the weights; auto: bfloat16 on a GPU, float32 on a CPU; another one where a model "
        "needs it, or to compare pictures.",
    )

    @property
    def gpus_wanted(self) -> int:
        """Return how many free GPUs of its host it claims, where it has some and :attr:`device_claims`."""
        return int(self.device in {"auto", "cuda"})

    def torch_device(self) -> torch.device:
        """Return where it computes.

        Raises:
            Failed: a GPU is named that torch does not see. A CPU never stands in for it.
        """
        import torch

        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if self.device == "auto":
            return torch.device("cuda" if gpus else "cpu")
        device = torch.device(self.device)
        if device.type == "cuda" and (device.index or 0) >= gpus:
            raise Failed(
                "GIORNATA_DEVICE names a GPU that torch does not see; look at the driver, the container's GPUs and "
                "torch's build.",
                received=f"{self.device}, where torch {torch.__version__} sees {gpus or 'no'} GPU{'s'[: gpus > 1]}",
                accepted=", ".join(["cpu", "auto", *(f"cuda:{index}" for index in range(gpus))]),
            )
        return device

    def own_devices(self) -> tuple[torch.device, ...]:
        """Return where this process computes itself.

        Raises:
            Failed: as :meth:`torch_device`.
        """
        return (self.torch_device(),)

    def seeing_alone(self) -> Self:
        """This configuration, of a process that sees no other GPU than its own (:func:`giornata.gpus.see_alone`)."""
        from giornata.gpus import see_alone

        return self.model_copy(update={"device": see_alone(self.device)})

    def torch_dtype(self) -> torch.dtype:
        """The type of the weights."""
        import torch

        if self.dtype == "auto":
            return torch.bfloat16 if self.torch_device().type == "cuda" else torch.float32
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[self.dtype]


class ModelConfig(DeviceConfig):
    """Configuration of a service that loads a checkpoint."""

    model: str = Field(description="Checkpoint to serve: a local diffusers folder, or a hub id.")
    model_name: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,95}$",
        description="How requests call the model, where that is not its folder's name.",
    )

    @property
    def served_name(self) -> str:
        """Return how requests call the model."""
        return self.model_name or Path(self.model).resolve().name


def checkpoint_folder(model: str, files: Sequence[str] = FILES) -> Path:
    """The local folder of a checkpoint; of a hub id the `files` are downloaded first, or found in the hub's cache.

    OSError if there is no such repository, or the hub does not answer and its cache has no copy; ValueError if it is
    neither a folder nor a hub id.
    """
    folder = Path(model)
    if folder.is_dir():
        return folder
    from huggingface_hub import get_cached_repo_tree, snapshot_download
    from huggingface_hub.errors import CachedRepoTreeNotFoundError
    from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]  # exported when it is asked for

    # The hub is asked for its newest commit here alone: the list of a commit's files stays in the cache.
    allowed = list(files)
    commit = Path(snapshot_download(model, allow_patterns=allowed, ignore_patterns="*.safetensors")).name
    weights = set[str]()
    with suppress(CachedRepoTreeNotFoundError):  # of a cache that earlier versions filled
        listed = (file.path for file in get_cached_repo_tree(model, revision=commit))
        matching = filter_repo_objects(listed, allow_patterns=allowed)
        weights = {name for name in matching if name.endswith(".safetensors")}
    unused = [escape(name) for name in weights - chosen_weights(weights)]
    return Path(snapshot_download(model, revision=commit, allow_patterns=allowed, ignore_patterns=unused))


# The files of a checkpoint's folder that hold the loaded weights, of several variants.


VARIANTS: Final = (None, "fp16", "bf16", "fp32")
"""Variants of weights that are loaded, the best first; None: `model.safetensors`, not `model.fp16.safetensors`."""
SHARD: Final = r"(?:-\d{5}-of-\d{5})?"
WEIGHTS: Final = re.compile(rf"(?:diffusion_pytorch_)?model{SHARD}(?:\.([^.]+?){SHARD})?\.safetensors")


def chosen_weights(paths: Iterable[str]) -> frozenset[str]:
    """Those of the `paths` to safetensors that are loaded: of each folder one variant. Files of other names stay."""
    paths, best = frozenset(paths), defaultdict[PurePosixPath, set[str | None]](set)
    found = {path: match[1] for path in paths if (match := WEIGHTS.fullmatch(PurePosixPath(path).name))}
    for path, variant in found.items():
        best[PurePosixPath(path).parent].add(variant)
    return paths - {
        path for path, variant in found.items() if variant != _best(best[PurePosixPath(path).parent])
    }


def variant_of(folder: Path) -> str | None:
    """The variant that is loaded of the weights in a component's `folder`.

    Raises:
        ValueError: it has none that is loaded.
    """
    names = (WEIGHTS.fullmatch(path.name) for path in folder.glob("*.safetensors"))
    found = {match[1] for match in names if match}
    if (best := _best(found)) not in VARIANTS:
        raise ValueError(
            f"{folder} holds weights of the variant {best} alone; accepted: weights without a variant's name, or of "
            + ", ".join(filter(None, VARIANTS))
        )
    return best


def pipeline_variant(folder: Path, left_out: Collection[str] = ()) -> str | None:
    """The variant of a folder's components but those `left_out`; some may have none. Raises as :func:`variant_of`."""
    parts = (path for path in sorted(folder.iterdir()) if path.is_dir() and path.name not in left_out)
    return next((variant for part in parts if (variant := variant_of(part)) is not None), None)


def unloadable(config: Mapping[str, Any]) -> str | None:
    """Return why a component with this ``config.json`` is not loaded, as the end of a sentence; None where it is."""
    if not (told := config.get("quantization_config")):
        return None
    method = told.get("quant_method") if isinstance(told, Mapping) else None
    return (
        f"was saved quantised; received: {method or 'an unknown method'}; accepted: weights in float32, float16, "
        "bfloat16 or float8, which GIORNATA_QUANTIZE can make smaller on a GPU"
    )


def _best(found: Collection[str | None]) -> str | None:
    return next((name for name in VARIANTS if name in found), min(filter(None, found), default=None))
