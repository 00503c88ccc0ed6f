"""The modules of a checkpoint that LoRAs change, without its weights: they are built on the meta device."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from torch import nn

from giornata.kinds import KINDS
from giornata.wire.errors import LoraNotSupported

MIDDLE = "mid_block"
UP = "up_blocks"


@dataclass(frozen=True)
class CheckpointModules:
    """What one checkpoint's folder tells of its modules."""

    folder: Path

    @cached_property
    def pipeline(self) -> Any:
        """diffusers' pipeline of the checkpoint, which reads LoRAs; LoraNotSupported where it reads none."""
        found = getattr(diffusers, self.index["_class_name"])
        if not hasattr(found, "lora_state_dict"):
            raise LoraNotSupported("Models of this kind take no LoRA.", received=self.index["_class_name"])
        return found

    @cached_property
    def index(self) -> Mapping[str, Any]:
        """``model_index.json``."""
        found: dict[str, Any] = json.loads((self.folder / "model_index.json").read_text(encoding="utf-8"))
        return found

    @property
    def network_name(self) -> str:
        """`transformer` or `unet`."""
        return KINDS[self.index["_class_name"]].network

    @cached_property
    def network(self) -> Any:
        """The denoising network on the meta device, with its configuration."""
        kind = getattr(diffusers, self.index[self.network_name][1])
        with torch.device("meta"):
            return kind.from_config(kind.load_config(self.folder / self.network_name))

    @property
    def text_encoders(self) -> list[str]:
        """Names of the text encoders for which the pipeline reads LoRAs, and which the checkpoint has."""
        names = [name for name in self.pipeline._lora_loadable_modules if name.startswith("text_encoder")]  # noqa: SLF001 - it has no public name
        return [name for name in names if (self.index.get(name) or [None])[0] is not None]

    def text_encoder(self, name: str) -> nn.Module:
        """A text encoder on the meta device."""
        kind = getattr(transformers, self.index[name][1])
        with torch.device("meta"):
            built: nn.Module = kind(kind.config_class.from_pretrained(self.folder / name))
        return built

    def order(self) -> dict[str, int]:
        """Place of each of the network's modules in the order in which a forward meets their blocks.

        Modules are defined in that order, except that UNets define their middle block last.
        """
        names = [name for name, _ in self.network.named_modules()]
        late = [name for name in names if name.partition(".")[0] == UP] if MIDDLE in names else []
        first_up = names.index(late[0]) if late else len(names)
        middle = [name for name in names[first_up:] if name.partition(".")[0] == MIDDLE]
        rest = [name for name in names[first_up:] if name not in set(middle)]
        return {name: place for place, name in enumerate((*names[:first_up], *middle, *rest))}
