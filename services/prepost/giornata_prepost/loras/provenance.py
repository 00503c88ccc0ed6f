"""Which tensors of a LoRA's source a converter has used, though it neither returns them by name nor warns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class Traced(Tensor):
    """A tensor that knows from which sources it was computed; so does every result of an operation on it."""

    sources: frozenset[str] = frozenset()
    """Names of the source's tensors."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Carry out an operation. Its result has the sources of all its operands."""
        result = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]  # torch annotates it in part
        operands = _traced((*args, *(kwargs or {}).values()))
        sources = frozenset[str]().union(*(operand.sources for operand in operands))
        for made in _traced((result,)):
            made.sources = sources
        return result


def traced(name: str, tensor: Tensor) -> Traced:
    """The same tensor as its own source."""
    made = tensor.as_subclass(Traced)
    made.sources = frozenset({name})
    return made


def untraced(tensor: Tensor) -> Tensor:
    """The tensor itself."""
    return tensor.as_subclass(torch.Tensor)


def _traced(values: Iterable[Any]) -> Iterable[Traced]:
    for value in values:
        if isinstance(value, Traced):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _traced(value)
