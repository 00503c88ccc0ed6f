"""Records of a version that knows more fields than this one, at every depth."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

from pydantic import create_model

from giornata.wire.values import RecordModel

V = TypeVar("V", bound=RecordModel)
Path = tuple[object, ...]
LATER = "later"
"""The field that the next version adds to every part of a record."""


def parts(value: object, path: Path = ()) -> Iterator[tuple[Path, RecordModel]]:
    """Every part of a record and where it is, the record itself first."""
    if isinstance(value, RecordModel):
        yield path, value
        for name in type(value).model_fields:
            yield from parts(getattr(value, name), (*path, name))
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from parts(item, (*path, index))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from parts(item, (*path, key))


def sown(value: V, fields: Callable[[Path], Mapping[str, object]], path: Path = ()) -> V:
    """The record with `fields` added to each part, by its path."""
    known = {name: _sown(item, fields, (*path, name)) for name, item in value.known().items()}
    return value.model_copy(update={**known, **fields(path)})


def _sown(value: Any, fields: Callable[[Path], Mapping[str, object]], path: Path) -> Any:
    if isinstance(value, RecordModel):
        return sown(value, fields, path)
    if isinstance(value, tuple):
        return tuple(_sown(item, fields, (*path, index)) for index, item in enumerate(value))
    if isinstance(value, Mapping):
        return {key: _sown(item, fields, (*path, key)) for key, item in value.items()}
    return value


def unknown(value: RecordModel) -> dict[Path, dict[str, Any]]:
    """The fields that this version does not know, by the path of their part."""
    return {path: dict(part.model_extra or {}) for path, part in parts(value)}


@functools.cache
def next_version(kind: type[V]) -> type[V]:
    """`kind` as the next version knows it: it and its parts have one field more, :data:`LATER`."""
    fields: dict[str, Any] = {LATER: (str | None, None)}
    for name, field in kind.model_fields.items():
        annotation = _next(field.annotation)
        if annotation != field.annotation:
            fields[name] = (annotation, field)
    return create_model(kind.__name__, __base__=kind, **fields)


def _next(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, RecordModel):
        return next_version(annotation)
    origin, arguments = get_origin(annotation), tuple(map(_next, get_args(annotation)))
    if origin in {Union, UnionType}:
        return functools.reduce(operator.or_, arguments)
    if origin in {tuple, dict}:
        return origin[arguments]
    return annotation
