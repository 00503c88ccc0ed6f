"""The card of a ControlNet, read from its folder as diffusers writes it. Free of torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from giornata.control_inputs import control_input
from giornata.model_cards import digest
from giornata.weight_files import chosen_weights, unloadable
from giornata.wire.adapters import ControlCard, ControlKind

KINDS: Final[Mapping[str, ControlKind]] = {
    "FluxControlNetModel": ControlKind.FLUX,
    "SD3ControlNetModel": ControlKind.SD3,
    "ControlNetModel": ControlKind.UNET,
}
TEXT: Final[Mapping[ControlKind, str]] = {
    ControlKind.FLUX: "joint_attention_dim",
    ControlKind.SD3: "joint_attention_dim",
    ControlKind.UNET: "cross_attention_dim",
}
"""Where a configuration tells the width of the text embeddings."""
FIXED: Final[Mapping[str, tuple[object, ...]]] = {
    "class_embed_type": (None,),
    "num_class_embeds": (None,),
    "encoder_hid_dim_type": (None,),
    "addition_embed_type": (None, "text_time"),
    "global_pool_conditions": (False,),
}
"""Options of a ControlNet of UNets, and what is served; diffusers' defaults for what is missing are among it."""


def read_control_card(folder: Path, name: str | None = None) -> ControlCard:
    """The card of the ControlNet in `folder`; requests call it `name`, by default the folder's.

    Raises:
        ValueError: it holds no ControlNet, or one that is not served; says what is.
    """
    config = _config(folder)
    network = str(config.get("_class_name"))
    if network not in KINDS:
        raise ValueError(f"{folder} holds a {network}; served ControlNets are: {', '.join(KINDS)}")
    kind = KINDS[network]
    if (reason := _unserved(kind, config)) is not None:
        raise ValueError(f"{folder} cannot be served: {reason}")
    weights = sum(
        Path(path).stat().st_size for path in chosen_weights(map(str, folder.glob("*.safetensors")))
    )
    if not weights:
        raise ValueError(f"{folder} holds no *.safetensors; other formats are not read")
    return ControlCard(
        name=name or folder.resolve().name,
        digest=digest(folder),
        kind=kind,
        text_channels=int(config[TEXT[kind]]),
        modes=int(config.get("num_mode") or 0),
        sees=control_input(config),
        weight_bytes=weights,
    )


def _unserved(kind: ControlKind, config: Mapping[str, Any]) -> str | None:
    """Why a ControlNet is not served, as the end of a sentence; None where it is."""
    if (reason := unloadable(config)) is not None:
        return f"it {reason}"
    if not isinstance(config.get(TEXT[kind]), int):
        return f"its {TEXT[kind]} is {config.get(TEXT[kind])}; served is a number of channels"
    placed = config.get("use_pos_embed", True) and config.get("pos_embed_type", "sincos") is not None
    if kind is ControlKind.SD3 and not placed:
        return "it has no positions of its own"
    if kind is not ControlKind.UNET:
        return None
    for option, served in FIXED.items():
        if (found := config.get(option, served[0])) not in served:
            return f"its {option} is {found}; served is {' or '.join(map(str, served))}"
    return None


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{folder} is not a ControlNet of diffusers: config.json is missing") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} does not hold a JSON object")  # noqa: TRY004 - the file's content is at fault, not a type
    return content
