"""The modules of a checkpoint that LoRAs change, without its weights: they are built on the meta device."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers.utils import convert_state_dict_to_peft, convert_unet_state_dict_to_peft
from diffusers.utils.state_dict_utils import StateDictType
from torch import nn

from giornata.families import KINDS
from giornata.lora_names import read_factor_name
from giornata.wire.errors import LoraNotSupported

LAYERS = nn.Linear, nn.Conv2d
BELOW = "text_model."
MIDDLE = "mid_block"
UP = "up_blocks"


@dataclass(frozen=True)
class CheckpointModules:
    """The modules of one checkpoint, as its folder names them."""

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

    @cached_property
    def parts(self) -> dict[str, nn.Module]:
        """The network and the text encoders, by name, on the meta device."""
        parts: dict[str, nn.Module] = {self.network_name: self.network}
        for name in self.text_encoders:
            kind = getattr(transformers, self.index[name][1])
            with torch.device("meta"):
                parts[name] = kind(kind.config_class.from_pretrained(self.folder / name))
        return parts

    def find(self, name: str) -> tuple[str, str, bool] | None:
        """Part, module and side of a factor by its name, whoever spelled it; None where no module has that name."""
        part, rest = self.split(name)
        (renamed,) = (
            convert_unet_state_dict_to_peft({rest: None})
            if part == self.network_name
            else convert_state_dict_to_peft({rest: None}, original_type=StateDictType.DIFFUSERS_OLD)
        )
        found = read_factor_name(renamed)
        path = found and self._paths[part].get(found.module.replace(".", "_"))
        return (part, path, found.is_down) if found and path else None

    def find_module(self, name: str) -> tuple[str, str] | None:
        """Part and path of a module by its name; None where there is none."""
        part, rest = self.split(name)
        path = self._paths[part].get(rest.replace(".", "_"))
        return (part, path) if path else None

    def split(self, name: str) -> tuple[str, str]:
        """The part that a name begins with, and the rest; without one, the network."""
        return next(
            (part, name[found.end() :]) for part, begin in self._begins if (found := begin.match(name))
        )

    @cached_property
    def _begins(self) -> list[tuple[str, re.Pattern[str]]]:
        """Return how names of each part begin, in diffusers, trainers and ComfyUI; PEFT's begin with the module."""
        begins = []
        for name in self.text_encoders:
            number, clip = ("2", "g") if name.endswith("_2") else ("1?", "l")
            begins.append((name, rf"{name}\.|lora_te{number}_|text_encoders\.clip_{clip}\.transformer\."))
        dotted = rf"(?:(?:base_model\.model|diffusion_model|{self.network_name})\.)*"
        begins.append((self.network_name, rf"lora_(?:unet|transformer)_|lycoris_|{dotted}"))
        return [(part, re.compile(begin)) for part, begin in begins]

    @cached_property
    def _paths(self) -> dict[str, dict[str, str]]:
        """Paths of each part's modules, by their spelling with underscores.

        Files have text encoders' modules below `text_model` or not, whatever the encoder has.
        """
        paths: dict[str, dict[str, str]] = {}
        for part, module in self.parts.items():
            layers = [path for path, layer in module.named_modules() if isinstance(layer, LAYERS)]
            paths[part] = {path.replace(".", "_"): path for path in layers}
            if part != self.network_name:
                bare = {path.removeprefix(BELOW): path for path in layers}
                paths[part] |= {
                    begin + each.replace(".", "_"): path
                    for each, path in bare.items()
                    for begin in ("", "text_model_")
                }
        return paths

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
