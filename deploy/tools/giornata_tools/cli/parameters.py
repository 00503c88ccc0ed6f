"""The options of a request's fields, made from its type, and adapters as options write them. Pure."""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from itertools import count
from typing import Annotated, Any, Final, Literal, TypeVar, Union, get_args, get_origin

import click
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from giornata.wire.adapters import AskedControl, AskedLora
from giornata.wire.errors import GiornataError
from giornata.wire.requests import GenerationParameters, asked
from giornata_tools.cli.options import option_name

# Adapters as options write them. Pure.


class AdapterParamType(click.ParamType[dict[str, object]]):
    """The fields of an adapter, which `read` makes of a text; its ValueError tells what is wrong."""

    def __init__(self, name: str, read: Callable[[str], dict[str, object]]) -> None:
        self.name, self._read = name, read

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> dict[str, object]:
        """The fields."""
        if isinstance(value, dict):
            return value
        try:
            return self._read(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


def lora_fields(text: str) -> dict[str, object]:
    """Fields of an :class:`AskedLora` from ``ID`` or ``ID:SCALE``."""
    lora_id, colon, scale = text.partition(":")
    if not colon:
        return {"id": lora_id}
    try:
        return {"id": lora_id, "scale": float(scale)}
    except ValueError:
        raise ValueError(f"{scale!r} is no scale: ID:SCALE, such as {lora_id}:0.8") from None


KEYS: Final[Mapping[str, Callable[[str], object]]] = {
    "image": int,
    "annotator": str,
    "scale": float,
    "start": float,
    "end": float,
    "mode": int,
}
"""What may follow a ControlNet's name, and what reads it."""


def control_fields(text: str) -> dict[str, object]:
    """Fields of an :class:`AskedControl` from ``NAME`` or ``NAME,KEY=VALUE,…``."""
    model, *pairs = text.split(",")
    read: dict[str, object] = {"model": model}
    for key, equals, value in (pair.partition("=") for pair in pairs):
        if not equals or key not in KEYS or key in read:
            known = ", ".join(f"{name}=…" for name in KEYS)
            raise ValueError(f"{key}{equals}{value} is none of {known}, each once: {model},scale=0.8")
        try:
            read[key] = KEYS[key](value)
        except ValueError:
            raise ValueError(f"{value!r} is no number: {key}=1") from None
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


# The options of a request's fields, made from its type so that none is forgotten. Pure.


P = TypeVar("P", bound=GenerationParameters)

LIMITS: Final = {"ge": ("min",), "gt": ("min", "min_open"), "le": ("max",), "lt": ("max", "max_open")}
"""Pydantic's limits of a number → arguments of click's ranges."""


LISTS: Final[Mapping[Any, click.ParamType[Any]]] = {
    AskedLora: AdapterParamType("ID[:SCALE]", lora_fields),
    AskedControl: AdapterParamType("NAME[,KEY=VALUE...]", control_fields),
}
"""Elements of lists → the type of the option that brings one of them."""


def options(kind: type[BaseModel], **defaults: str) -> list[click.Parameter]:
    """An option for each field of `kind`: its name in kebab case, its range, its description and default.

    `defaults` are the texts of defaults that differ from the field's.

    Raises:
        TypeError: a field has a type that no option stands for.
    """
    return [_option(name, field, kind, defaults.get(name)) for name, field in kind.model_fields.items()]


def sort_first(command: click.Command, *names: str) -> None:
    """Have the help name these parameters first, in this order."""
    command.params.sort(key=lambda one: names.index(one.name) if one.name in names else len(names))


def validated(kind: type[P], given: Mapping[str, object]) -> P:
    """The parameters that were given, with nothing filled in.

    Raises:
        click.UsageError: names the options at fault.
    """
    try:
        return asked(kind, given)
    except GiornataError as error:
        raise click.UsageError(_in_options(error.message, kind)) from error


def _option(name: str, field: FieldInfo, kind: type[BaseModel], default: str | None) -> click.Option:
    plain, flag, own = _plain(field.annotation), option_name(name), field.get_default()
    own = own.value if isinstance(own, StrEnum) else own
    if get_origin(plain) is tuple and get_args(plain)[0] in LISTS:
        told = _in_options(field.description or "", kind).replace("`", "")
        one = LISTS[get_args(plain)[0]]
        return click.Option([name, flag], type=one, multiple=True, help=f"{told} May be given several times.")
    declarations = [name, f"{flag}/--no-{flag[2:]}" if plain is bool else flag]
    if len(name) == 1:
        declarations.append(f"-{name}")
    return click.Option(
        declarations,
        type=None if plain is bool else _option_type(name, plain, field),
        required=field.is_required(),
        default=None if field.is_required() or default else own,
        show_default=default or True,
        help=_in_options(field.description or "", kind).replace("`", ""),
    )


def _plain(annotation: Any) -> Any:
    """The type itself, without None and without annotations."""
    if get_origin(annotation) is Annotated:
        return _plain(get_args(annotation)[0])
    if get_origin(annotation) in {types.UnionType, Union}:
        [one] = [part for part in get_args(annotation) if part is not type(None)]
        return _plain(one)
    return annotation


def _option_type(name: str, plain: Any, field: FieldInfo) -> click.ParamType[Any]:
    if isinstance(plain, type) and issubclass(plain, StrEnum):
        return click.Choice([member.value for member in plain])
    if get_origin(plain) is Literal:
        return click.Choice(get_args(plain))
    limits: dict[str, Any] = {}
    for rule in field.metadata:
        for limit, range_ in LIMITS.items():
            if hasattr(rule, limit):
                limits |= {range_[0]: getattr(rule, limit), **dict.fromkeys(range_[1:], True)}
    if plain is int:
        return click.IntRange(**limits)
    if plain is float:
        return click.FloatRange(**limits)
    if plain is str:
        return click.STRING
    raise TypeError(f"no option stands for the field {name}: {plain}")


def _in_options(text: str, kind: type[BaseModel]) -> str:
    """`text` with the fields that it names as options; one-word names only where it is plain that a field is meant."""
    for name in kind.model_fields:
        if "_" in name:
            text = re.sub(rf"\b{name}\b", option_name(name), text)
        text = re.sub(rf"(^|; ){name}: ", rf"\g<1>{option_name(name)}: ", text)
        text = text.replace(f"`{name}`", option_name(name))
    return text
