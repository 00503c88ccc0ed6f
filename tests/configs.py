"""Configurations of services in which a test has changed what is fixed for everybody else."""

from __future__ import annotations

import types
from functools import cached_property, partial
from typing import Any, TypeVar

from giornata.config import ServiceConfig, constants

C = TypeVar("C", bound=ServiceConfig)


def configured(kind: type[C], **options: Any) -> C:
    """A configuration with `options`: settings of its kind, constants, and what is derived."""
    fixed = {name: options.pop(name) for name in constants(kind) & options.keys()}
    derived = [name for name in options if isinstance(getattr(kind, name, None), property | cached_property)]
    fixed |= {name: property(partial(_given, options.pop(name))) for name in derived}
    assert options.keys() <= kind.model_fields.keys(), options
    changed: type[C] = types.new_class(kind.__name__, (kind,), {}, lambda body: body.update(fixed))
    return changed(**options)


def _given(value: Any, _: object) -> Any:
    return value
