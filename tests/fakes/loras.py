"""Random LoRAs of a module, as PEFT holds and applies them, and the same as sets of factors."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from diffusers.utils.peft_utils import set_weights_and_activate_adapters
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from giornata.packed.low_rank import SequenceLoras, low_rank

Chosen = tuple[tuple[str, float], ...]
"""A row's LoRAs and their scales."""
RANKS: Final[Mapping[str, tuple[int, int]]] = {"a": (4, 4), "b": (8, 16), "c": (16, 4)}
"""Rank and alpha by name."""
SIZE: Final = 0.1
"""Standard deviation of all factors."""


class Loras:
    """LoRAs `a` (attention), `b` (every layer) and `c` (every third layer), put into `module`: the oracle."""

    def __init__(self, module: Any, dtype: torch.dtype = torch.float64) -> None:
        layers = [path for path, part in module.named_modules() if isinstance(part, (nn.Linear, nn.Conv2d))]
        targets = {"a": [path for path in layers if ".att" in path], "b": layers, "c": layers[::3]}
        for name, (rank, alpha) in RANKS.items():
            config = LoraConfig(
                r=rank, lora_alpha=alpha, target_modules=targets[name], init_lora_weights=False
            )
            with warnings.catch_warnings():  # several LoRAs in one module are meant
                warnings.filterwarnings("ignore", "Already found a `peft_config`", UserWarning)
                inject_adapter_in_model(config, module, name)
        torch.manual_seed(5)
        for path, weight in module.named_parameters():
            if "lora_" in path:
                weight.data = SIZE * torch.randn(weight.shape, dtype=torch.float64).to(dtype)
                weight.requires_grad_(requires_grad=False)
        self.module = module.eval()
        self._sets: dict[Chosen, SequenceLoras | None] = {(): None}

    @contextmanager
    def alone(self, chosen: Chosen) -> Iterator[Any]:
        """The module under these LoRAs, as `set_adapters` has it."""
        parts = [part for part in self.module.modules() if isinstance(part, BaseTunerLayer)]
        for part in parts:
            part.enable_adapters(enabled=bool(chosen))
        if chosen:
            names, scales = zip(*chosen, strict=True)
            set_weights_and_activate_adapters(self.module, list(names), list(scales))
        yield self.module

    def tensors(self, name: str) -> dict[str, Tensor]:
        """One LoRA as its canonical file: alpha and rank folded in."""
        rank, alpha = RANKS[name]
        found: dict[str, Tensor] = {}
        for path, part in self.module.named_modules():
            if isinstance(part, BaseTunerLayer):
                layers: Any = part
                if name in layers.lora_A:
                    found[f"{path}.down"] = layers.lora_A[name].weight.detach()
                    found[f"{path}.up"] = layers.lora_B[name].weight.detach() * (alpha / rank)
        return found

    def set_of(self, chosen: Chosen) -> SequenceLoras | None:
        """The set of these LoRAs, the same object each time."""
        if chosen not in self._sets:
            self._sets[chosen] = low_rank(
                str(chosen), [(self.tensors(name), scale) for name, scale in chosen]
            )
        return self._sets[chosen]

    def sets(self, chosen: Sequence[Chosen]) -> list[SequenceLoras | None]:
        """Those of several rows."""
        return [self.set_of(each) for each in chosen]
