"""The adapters that ship with the trained model, and what tells services to offer them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from giornata_tools.checkout import ADAPTERS, TRAINED
from giornata_tools.launcher.model import StackModel

NETS: Final = "GIORNATA_CONTROLNETS"
LORAS: Final = "GIORNATA_LORA_SHARED_FOLDER"
SHIPPED_NETS: Final = ADAPTERS / "controlnets"
"""A folder for each ControlNet."""
SHIPPED_LORAS: Final = ADAPTERS / "loras"
"""MODEL/NAME.safetensors, as the LoRA store's shared folder has them."""


def with_controlnets(models: Sequence[StackModel], env: Mapping[str, str]) -> tuple[StackModel, ...]:
    """`models`, the trained one with the ControlNets that ship; as they are where `env` says which ones are served."""
    if NETS in env or not SHIPPED_NETS.is_dir():
        return tuple(models)
    return tuple(
        replace(each, env={**each.env, NETS: _shipped()}) if is_trained(each) else each for each in models
    )


def service_controlnets(models: Sequence[StackModel], env: Mapping[str, str]) -> str:
    """What a ControlNet service computes: what `env` names, else what denoisers of one of `models` have; or nothing."""
    return env.get(NETS, "") or next((each.env[NETS] for each in models if each.env.get(NETS)), "")


def _shipped() -> str:
    return ",".join(str(folder) for folder in sorted(SHIPPED_NETS.iterdir()) if folder.is_dir())


def shared_loras(models: Sequence[StackModel], env: Mapping[str, str]) -> Mapping[str, str]:
    """Environment of the LoRA store, for the LoRAs that ship.

    It is empty where `env` names another shared folder, or none of `models` is the trained one by its own name: LoRAs
    are for models by name.
    """
    served = any(is_trained(each) and each.served_name == TRAINED.name for each in models)
    return {LORAS: str(SHIPPED_LORAS)} if served and LORAS not in env and SHIPPED_LORAS.is_dir() else {}


def is_trained(model: StackModel) -> bool:
    """Whether it is the trained model that ships."""
    return Path(model.source).resolve() == TRAINED.resolve()
