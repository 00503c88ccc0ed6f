"""How much memory a step needs beyond its weights and templates."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


def peak_bytes(device: torch.device, compute: Callable[[], object]) -> int:
    """Most memory that `compute` holds at a time beyond what was there before.

    On a GPU as torch's allocator counts it. A processor's allocator keeps no count: there, the tensors alive between
    operations are added up, and what a kernel allocates for itself is not seen.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        compute()
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device)) - before
    with _LiveTensors() as live:
        compute()
    return int(live.peak)


class _LiveTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's is without types
    """Adds up the storages that operations make, from when they are made until they are freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's is without types
        self.peak = 0
        self._live = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = {id(one.untyped_storage()) for one in tree_iter((args, kwargs)) if isinstance(one, Tensor)}
        made = func(*args, **(kwargs or {}))
        for one in tree_iter(made):
            if isinstance(one, Tensor):
                self._take(one.untyped_storage(), given)
        return made

    def _take(self, storage: torch.UntypedStorage, given: set[int]) -> None:
        """Count `storage` unless it is counted already or came from outside, as a view's does."""
        if id(storage) in given or id(storage) in self._known:
            return
        self._known.add(id(storage))
        self._live += storage.nbytes()
        self.peak = max(self.peak, self._live)
        weakref.finalize(storage, self._drop, id(storage), storage.nbytes())

    def _drop(self, key: int, size_bytes: int) -> None:
        self._known.discard(key)
        self._live -= size_bytes
