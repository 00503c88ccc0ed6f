"""Adapters as options write them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import count
from typing import Any, Final

import click


class LoraParamType(click.ParamType[dict[str, object]]):
    """``ID`` or ``ID:SCALE``."""

    name = "ID[:SCALE]"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> dict[str, object]:
        """The fields of an :class:`AskedLora`, which are validated later."""
        if isinstance(value, dict):
            return value
        lora_id, colon, scale = str(value).partition(":")
        if not colon:
            return {"id": lora_id}
        try:
            return {"id": lora_id, "scale": float(scale)}
        except ValueError:
            self.fail(f"{scale!r} is no scale: ID:SCALE, such as {lora_id}:0.8", param, ctx)


KEYS: Final[Mapping[str, Callable[[str], object]]] = {
    "image": int,
    "annotator": str,
    "scale": float,
    "start": float,
    "end": float,
    "mode": int,
}
"""What may follow a ControlNet's name, and what reads it."""


class ControlNetParamType(click.ParamType[dict[str, object]]):
    """``NAME`` or ``NAME,KEY=VALUE,…``."""

    name = "NAME[,KEY=VALUE...]"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> dict[str, object]:
        """The fields of an :class:`AskedControl`, which are validated later."""
        if isinstance(value, dict):
            return value
        model, *pairs = str(value).split(",")
        read: dict[str, object] = {"model": model}
        for key, equals, text in (pair.partition("=") for pair in pairs):
            if not equals or key not in KEYS or key in read:
                self.fail(
                    f"{key}{equals}{text} is none of {', '.join(f'{name}=…' for name in KEYS)}, each once: "
                    f"{model},scale=0.8",
                    param,
                    ctx,
                )
            try:
                read[key] = KEYS[key](text)
            except ValueError:
                self.fail(f"{text!r} is no number: {key}=1", param, ctx)
        return read


def in_order(controls: Iterable[Mapping[str, object]], images: int) -> list[dict[str, object]]:
    """The `controls`, in their order, with the control image that each sees.

    Those that name neither an image nor an annotator take the `images` control images one after the other.
    """
    numbers = count()
    read = []
    for control in controls:
        told = dict(control)
        if "image" not in told and "annotator" not in told and (number := next(numbers)) < images:
            told["image"] = number
        read.append(told)
    return read
