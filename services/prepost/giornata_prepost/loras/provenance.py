"""Which tensors of a LoRA's source a converter has used, though it neither returns them by name nor warns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

ALPHA: Final = ".alpha"
_READ: Final = frozenset({Tensor.item, Tensor.__float__})


class Traced(Tensor):
    """A tensor that knows from which sources it was computed; so does every result of an operation on it."""

    sources: frozenset[str] = frozenset()
    """Names of the source's tensors."""
    read: set[str]
    """Names of the alphas that were read as numbers, by whichever tensor."""

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
        operands = list(_traced((*args, *(kwargs or {}).values())))
        sources = frozenset[str]().union(*(operand.sources for operand in operands))
        read = next((operand.read for operand in operands if operand.sources), set())
        if func in _READ:
            read |= {name for name in sources if name.endswith(ALPHA)}
        for made in _traced((result,)):
            made.sources, made.read = sources, read
        return result


def traced(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors, each its own source."""
    read: set[str] = set()
    made: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        one = tensor.as_subclass(Traced)
        one.sources, one.read = frozenset({name}), read
        made[name] = one
    return made


def unused(tensors: Mapping[str, Tensor], results: Iterable[Tensor]) -> list[str]:
    """Names of those `tensors` that are in none of the `results` and, as alphas, were never read as numbers.

    `tensors` come from :func:`traced`; `results` were computed from them.
    """
    used = set[str]().union(*(one.sources for one in _traced(results)))
    used |= set[str]().union(*(one.read for one in _traced(tensors.values())))
    return sorted(tensors.keys() - used)


def untraced(tensor: Tensor) -> Tensor:
    """The tensor itself."""
    return tensor.as_subclass(torch.Tensor)


def _traced(values: Iterable[Any]) -> Iterable[Traced]:
    for value in values:
        if isinstance(value, Traced):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _traced(value)
