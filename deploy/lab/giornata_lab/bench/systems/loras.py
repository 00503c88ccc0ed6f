"""Many small LoRAs of the model that ships, as an operator's shared folder has them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import aiohttp
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from giornata.fleet import Fleet
from giornata_tools.checkout import TRAINED

SIZE: Final = 0.01
"""Standard deviation of factors: pictures hardly change."""
RANKS: Final = (4, 8, 16)
READY_MS: Final = 60_000
TAKEN_IN_S: Final = 120.0
"""Within which stores find what lies in their shared folder, and validate it."""


def write_loras(folder: Path, count: int) -> None:
    """Write `style000` to `style…` for the trained model below `folder`, of three ranks in turns."""
    shapes = _linear()
    target = folder / TRAINED.name
    target.mkdir(parents=True)
    for number in range(count):
        draw, rank = torch.Generator().manual_seed(number), RANKS[number % len(RANKS)]
        tensors = {}
        for layer, (out_features, in_features) in shapes.items():
            for part, shape in (("lora_A", (rank, in_features)), ("lora_B", (out_features, rank))):
                tensors[f"transformer.{layer}.{part}.weight"] = SIZE * torch.randn(shape, generator=draw)
        save_file(tensors, target / f"{name_of(number)}.safetensors")


def name_of(number: int) -> str:
    """The name of a LoRA of this number."""
    return f"style{number:03d}"


def taken_in(count: int) -> Callable[[Fleet], bool]:
    """Return whether stores have validated so many LoRAs."""

    def enough(fleet: Fleet) -> bool:
        return sum(state.loras.ready for state in fleet.all() if state.loras is not None) >= count

    return enough


async def ready_loras(url: str, count: int) -> dict[str, str]:
    """Ids by name, once all are ready.

    Raises:
        SystemExit: one is not, or there are not so many.
    """
    found: dict[str, str] = {}
    async with aiohttp.ClientSession(url) as http:
        async with http.get("/v1/loras", params={"limit": 100}) as answer:
            listed = (await answer.json())["data"]
        for one in listed:
            async with http.get(f"/v1/loras/{one['id']}", params={"wait_ms": READY_MS}) as answer:
                told = await answer.json()
            if told.get("state") != "ready":
                raise SystemExit(f"a LoRA is not ready: {told}")
            found[told["name"]] = told["id"]
    if missing := [name for name in map(name_of, range(count)) if name not in found]:
        raise SystemExit(f"the LoRA store does not have {len(missing)} LoRAs, the first of them {missing[0]}")
    return found


def _linear() -> dict[str, tuple[int, int]]:
    """Shapes (out, in) of the attention's linear layers, by path."""
    shapes: dict[str, tuple[int, int]] = {}
    for path in sorted((TRAINED / "transformer").glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                shape = file.get_slice(name).get_shape()
                if name.endswith(".weight") and ".attn." in name and len(shape) == 2:
                    shapes[name.removesuffix(".weight")] = shape[0], shape[1]
    return shapes
