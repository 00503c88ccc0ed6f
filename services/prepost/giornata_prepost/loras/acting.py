"""Text parts of LoRAs act while one job's prompts are encoded: by hooks, so that the weights stay as they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.functional import linear

from giornata.wire.errors import LoraMismatch
from giornata_prepost.families.protocol import AdaptedModel, ImageModel
from giornata_prepost.loras.canonical import TextFactors


class TextLora(NamedTuple):
    """What one LoRA of a job changes in text encoders."""

    scale: float
    encoders: Mapping[str, Mapping[str, TextFactors]]
    """Factors by module, by the text encoder's name."""


@contextmanager
def acting(model: ImageModel, loras: Sequence[TextLora]) -> Iterator[None]:
    """Inside, each module's output has `scale * up @ down @ input` of every LoRA added. In the model's thread.

    Raises:
        LoraMismatch: the model has no such linear layer of such a shape.
    """
    with ExitStack() as stack:
        for lora in loras:
            for name, modules in lora.encoders.items():
                encoder = model.text_encoder(name) if isinstance(model, AdaptedModel) else None
                for path, factors in modules.items():
                    module = _linear(encoder, name, path, factors)
                    down, up = (factor.to(module.weight) for factor in factors)
                    hook = partial(_added, down=down, up=up, scale=lora.scale)
                    stack.callback(module.register_forward_hook(hook).remove)
        yield


def _added(
    _module: nn.Module, given: tuple[Tensor, ...], output: Tensor, *, down: Tensor, up: Tensor, scale: float
) -> Tensor:
    # Encoders that ran out of memory have gone to another device since.
    return output + linear(linear(given[0], down.to(output)), up.to(output)) * scale


def _linear(encoder: nn.Module | None, name: str, path: str, factors: TextFactors) -> nn.Linear:
    module = None if encoder is None else dict(encoder.named_modules()).get(path)
    down, up = (tuple(factor.shape) for factor in factors)
    if not isinstance(module, nn.Linear):
        raise LoraMismatch(
            "The LoRA changes a part of a text encoder that the model does not have.",
            received=f"{name}.{path}",
            accepted=f"linear layers of {'no text encoder' if encoder is None else type(encoder).__name__}",
        )
    rank = down[0] if down else 0
    wanted = (rank, module.in_features), (module.out_features, rank)
    if (down, up) != wanted:
        raise LoraMismatch(
            "The LoRA's factors have other shapes than the text encoder's module.",
            received=f"{name}.{path}: {down} and {up}",
            accepted=f"{wanted[0]} and {wanted[1]}",
        )
    return module
