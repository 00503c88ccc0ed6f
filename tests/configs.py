"""Configurations of services in which a test has changed what is fixed for everybody else."""

from __future__ import annotations

import types
from typing import Any, TypeVar

from giornata.config import ServiceConfig, constants

C = TypeVar("C", bound=ServiceConfig)


def configured(kind: type[C], **options: Any) -> C:
    """A configuration with `options`, settings as well as constants of its kind."""
    fixed = {name: options.pop(name) for name in constants(kind) & options.keys()}
    changed: type[C] = types.new_class(kind.__name__, (kind,), {}, lambda body: body.update(fixed))
    return changed(**options)
