"""A CUDA device that is not there: the project's branches for GPUs run on a torch for the CPU, and are watched.

Tensors on ``cuda:0`` wrap tensors of the CPU, or shapes alone (`values="meta"`: models of any size). A :class:`World`
counts what would cost a real device time, and finds what would be wrong on it:

- host synchronisations: copies from pageable memory, copies to the host, `.item()`, `nonzero`, masks as indices;
- races: by vector clocks of streams and events, what is read before it was written, written while it is read, or freed
  while another stream may use it, and pinned memory that the host reads before its copy was waited for;
- launches, by operation;
- live and peak memory, in blocks as torch's allocator gives them, up to a limit beyond which it is out of memory;
- an operation that mixes tensors of host and device, which raises as on a GPU.

It computes nothing as a GPU would round it, and no time that it takes says anything of one.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from types import FrameType, SimpleNamespace
from typing import Any, Final, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

from giornata.packed import attention, flux

CUDA: Final = torch.device("cuda:0")
BLOCK: Final = 512
"""Bytes of which torch's allocator gives multiples."""
DEVICE_BYTES: Final = 80 << 30
ALLOCATING: Final = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
HOST_ONLY: Final = {"record_stream", "set_", "resize_", "is_pinned", "_pin_memory"}
SYNCHRONISING: Final = {
    *("_local_scalar_dense", "nonzero", "masked_select", "equal", "unique_consecutive", "_unique2"),
    *("unique_dim", "bincount", "is_nonzero"),
}
INDEXING: Final = {"index", "index_put", "index_put_"}
OVERWRITING: Final = {"copy_", "fill_", "zero_"}
NESTED: Final = (tuple, list, dict)
ELSEWHERE: Final = ("/fakes/cuda.py", "site-packages/torch/", "/triton/", "/threading.py", "/concurrent/")
"""Files that a finding is not told of: it is told of who called them."""
WRITTEN: Final = {
    "_rotate": {"query_out", "key_out", "value_out"},
    "_gather": {"key", "value"},
}
"""Arguments that Triton's kernels write to; the others' is `out`."""
aten: Final = torch.ops.aten

Clock = dict[int, int]
"""How far each stream is known to have come."""


class Finding(NamedTuple):
    """A synchronisation, or a race."""

    what: str
    where: str
    """File, line and function that caused it."""


class Memory:
    """One allocation on the device, and how far its streams have used it."""

    __slots__ = ("__weakref__", "reads", "recorded", "size_bytes", "stream", "world", "write")

    def __init__(self, world: World, size_bytes: int) -> None:
        self.world, self.stream = world, world.working().id
        self.size_bytes = 0  # until it is given
        self.write: tuple[int, int] | None = None
        self.reads: Clock = {}
        self.recorded: set[int] = set()
        blocks = -(-size_bytes // BLOCK) * BLOCK
        world.allocate(blocks)
        self.size_bytes = blocks

    def __del__(self) -> None:
        self.world.free(self)


class World:
    """What happens on the device. Safe in several threads."""

    def __init__(self, *, values: bool, limit_bytes: int) -> None:
        self.values, self.limit_bytes = values, limit_bytes
        self.lock = threading.RLock()
        self.clocks: dict[int, Clock] = defaultdict(dict)
        self.host: Clock = {}
        """What the host knows to be done."""
        self.synchronisations: list[Finding] = []
        self.races: list[Finding] = []
        self.launches: Counter[str] = Counter()
        self.variants: set[tuple[Any, ...]] = set()
        """What Triton would have compiled."""
        self.live_bytes = self.peak_bytes = 0
        self.reserved_bytes = 0
        """What the allocator has of the device: it keeps what was freed until its cache is emptied."""
        self.pinned: set[int] = set()
        self.coming: dict[int, tuple[int, int]] = {}
        """Copies to pinned memory that the host has not waited for."""
        self._streams = 0
        self.default = Stream(self)
        self.local = threading.local()

    def clear(self) -> None:
        """Count from now on."""
        with self.lock:
            self.synchronisations.clear()
            self.races.clear()
            self.launches.clear()
            self.peak_bytes = self.live_bytes

    def number(self) -> int:
        """Of a new stream."""
        with self.lock:
            self._streams += 1
            return self._streams - 1

    def working(self) -> Stream:
        """The current thread's stream."""
        stream: Stream = getattr(self.local, "stream", None) or self.default
        return stream

    def allocate(self, size_bytes: int) -> None:
        """Raises torch.OutOfMemoryError beyond the limit."""
        with self.lock:
            if self.live_bytes + size_bytes > self.limit_bytes:
                raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size_bytes} bytes")
            self.live_bytes += size_bytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
            self.reserved_bytes = max(self.reserved_bytes, self.live_bytes)

    def empty_cache(self) -> None:
        """Give the device back what is free."""
        with self.lock:
            self.reserved_bytes = self.live_bytes

    def free(self, memory: Memory) -> None:
        """Let memory go; the allocator gives it out again behind what its own stream has been given."""
        with self.lock:
            self.live_bytes -= memory.size_bytes
            uses = dict(memory.reads)
            if memory.write is not None:
                _merge(uses, dict((memory.write,)))
            known = self.clocks[memory.stream]
            for stream, number in uses.items():
                told = stream == memory.stream or stream in memory.recorded
                if not told and max(known.get(stream, 0), self.host.get(stream, 0)) < number:
                    self.races.append(Finding("freed while another stream may use it", _caller()))

    def synchronise(self, what: str) -> None:
        """The host waits for the current stream."""
        with self.lock:
            self.synchronisations.append(Finding(what, _caller()))
            _merge(self.host, self.clocks[self.working().id])

    def tick(self, stream: Stream) -> int:
        """The number of what the stream is given now; the host has given it, so that it comes after what it knows."""
        clock = self.clocks[stream.id]
        _merge(clock, self.host)
        clock[stream.id] = clock.get(stream.id, 0) + 1
        return clock[stream.id]

    def launch(self, name: str) -> None:
        """Count a launch on the stream that computes; others are beside it."""
        with self.lock:
            self.launches[name] += self.working() == self.default

    def note(self, reads: Sequence[Fake], writes: Sequence[Fake]) -> None:
        """One launch on the current stream reads and writes these."""
        stream = self.working()
        with self.lock:
            number, known = self.tick(stream), self.clocks[stream.id]
            for tensor in (*reads, *writes):
                written = tensor.memory.write if tensor.memory.world is self else None  # else kept by a cache
                if written is not None and known.get(written[0], 0) < written[1]:
                    self.races.append(Finding("used before it was written", _caller()))
            for tensor in reads:
                tensor.memory.reads[stream.id] = number
            for tensor in writes:
                if any(known.get(other, 0) < read for other, read in tensor.memory.reads.items()):
                    self.races.append(Finding("written while it is read", _caller()))
                tensor.memory.write = stream.id, number

    def read_by_host(self, tensors: Iterator[Tensor] | Sequence[Tensor]) -> None:
        """The host reads or writes its own memory."""
        if not self.coming:
            return
        with self.lock:
            for tensor in tensors:
                copy = self.coming.get(_address(tensor))
                if copy is None:
                    continue
                if self.host.get(copy[0], 0) < copy[1]:
                    self.races.append(
                        Finding("host memory is read before its copy was waited for", _caller())
                    )
                else:
                    del self.coming[_address(tensor)]

    def pin(self, tensor: Tensor) -> Tensor:
        """`tensor`, whose memory counts as pinned from now on."""
        address = _address(tensor)
        self.pinned.add(address)
        weakref.finalize(tensor.untyped_storage(), self.pinned.discard, address)
        return tensor


class Stream:
    """As torch.cuda.Stream."""

    def __init__(self, world: World) -> None:
        self._world, self.id, self.device = world, world.number(), CUDA
        _merge(world.clocks[self.id], world.host)

    def wait_event(self, event: Event) -> None:
        with self._world.lock:
            _merge(self._world.clocks[self.id], event.clock)

    def wait_stream(self, other: Stream) -> None:
        with self._world.lock:
            _merge(self._world.clocks[self.id], self._world.clocks[other.id])

    def synchronize(self) -> None:
        world = self._world
        with world.lock:
            world.synchronisations.append(Finding("stream.synchronize", _caller()))
            _merge(world.host, world.clocks[self.id])

    def query(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.id == self.id

    def __hash__(self) -> int:
        return self.id


class Event:
    """As torch.cuda.Event; waiting for it is no synchronisation of the stream, and is not counted as one."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        where = stream or self._world.working()
        with self._world.lock:
            self._world.tick(where)
            self.clock = dict(self._world.clocks[where.id])

    def synchronize(self) -> None:
        with self._world.lock:
            _merge(self._world.host, self.clock)

    def query(self) -> bool:
        self.synchronize()
        return True

    def elapsed_time(self, _other: Event) -> float:
        return 1.0


class Fake(Tensor):
    """A tensor on the device: `inner` has its values, or its shape."""

    inner: Any
    memory: Memory

    @staticmethod
    def __new__(cls: type[Fake], inner: Tensor, memory: Memory) -> Fake:  # noqa: PYI034 - torch makes it
        made: Any = Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=CUDA,
            requires_grad=False,
        )
        made.inner, made.memory = inner, memory
        return made  # type: ignore[no-any-return]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Fake({tuple(self.shape)}, {self.dtype})"

    @property
    def world(self) -> World:
        return self.memory.world

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def data(self) -> Any:
        return self.detach()

    @data.setter
    def data(self, value: Any) -> None:
        self.inner, self.memory = value.inner, value.memory

    def data_ptr(self) -> int:
        return self.inner.data_ptr() if self.world.values else id(self.memory)

    def untyped_storage(self) -> Any:
        return self.inner.untyped_storage()

    def __getitem__(self, index: Any) -> Tensor:
        parts = index if isinstance(index, tuple) else (index,)
        if not any(isinstance(part, Tensor | list) for part in parts):
            return Fake(self.inner[index], self.memory)
        return aten.index.Tensor(self, [_index(part) for part in parts])  # type: ignore[no-any-return]

    def __setitem__(self, index: Any, value: Any) -> None:
        parts = index if isinstance(index, tuple) else (index,)
        if any(isinstance(part, Tensor | list) for part in parts):
            if not isinstance(value, Tensor):
                value = torch.full((), value, dtype=self.dtype, device=CUDA)
            aten.index_put_.default(self, [_index(part) for part in parts], value)
            return
        view = Fake(self.inner[index], self.memory)
        (aten.copy_.default if isinstance(value, Tensor) else aten.fill_.Scalar)(view, value)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.unbind(0))

    def __bool__(self) -> bool:
        return bool(self._value("bool"))

    def tolist(self) -> Any:
        return self._value("tolist").tolist()

    def item(self) -> Any:
        return self._value("item").item()

    def numpy(self, **_: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def nonzero(self, **_: Any) -> Any:
        return aten.nonzero.default(self)

    def copy_(self, src: Tensor, non_blocking: bool = False) -> Any:
        return aten.copy_.default(self, src, non_blocking)

    def contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> Any:
        kept = self.inner.is_contiguous(memory_format=memory_format)
        return self if kept else aten.clone.default(self, memory_format=memory_format)

    def record_stream(self, stream: Any) -> None:
        self.memory.recorded.add(stream.id)

    def pin_memory(self, *_: Any) -> Tensor:
        raise RuntimeError("cannot pin a cuda tensor")

    def _value(self, how: str) -> Tensor:
        self.world.synchronise(how)
        return self.inner if self.world.values else torch.ones(self.shape, dtype=self.dtype)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            return _attended(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if _composite(func):
            return func.decompose(*args, **(kwargs or {}))
        [world, *_] = [each.world for each in _leaves((args, kwargs)) if isinstance(each, Fake)]
        return _dispatched(world, func, args, kwargs or {})


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's is not typed
    """Has the world see what is done with tensors of the host, too."""

    def __init__(self, world: World) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # likewise
        self._world = world

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _composite(func):  # in inference mode these are not taken apart before they come here
            with self:
                return func.decompose(*args, **(kwargs or {}))
        return _dispatched(self._world, func, args, kwargs or {})


@contextmanager
def pretended(
    *, values: bool = True, limit_bytes: int = DEVICE_BYTES, triton: bool = True
) -> Iterator[World]:
    """This process has a GPU, whose tensors have `values` or shapes alone; it has none again afterwards.

    With `triton` its kernels are launched, and compute zeros; else torch's operations stand in for them.
    """
    world = World(values=values, limit_bytes=limit_bytes)
    _forget()
    with pytest.MonkeyPatch.context() as patch:
        _as_cuda(world, patch)
        _as_host(world, patch)
        varlen = importlib.import_module("torch.nn.attention.varlen")
        patch.setattr(varlen, "varlen_attn", functools.partial(_varlen, world))
        patch.setattr(flux, "Tensor", Fake)
        if triton:
            _launching(world, patch)
        else:
            patch.setattr(attention, "find_spec", lambda _: None)
        run = threading.Thread.run

        def watched(thread: threading.Thread) -> None:
            with Watch(world):
                run(thread)

        patch.setattr(threading.Thread, "run", watched)
        before = torch.__future__.get_overwrite_module_params_on_conversion()
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        try:
            with Watch(world):
                yield world
        finally:
            torch.__future__.set_overwrite_module_params_on_conversion(before)
            _forget()


def _forget() -> None:
    """Empty the caches that may hold tensors of the device: the next world has other ones."""
    for name, module in list(sys.modules.items()):
        if name.startswith(("giornata_denoiser.", "giornata.packed.")):
            for kept in vars(module).values():
                if isinstance(kept, functools._lru_cache_wrapper):
                    kept.cache_clear()


def _as_cuda(world: World, patch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def on_stream(stream: Stream | None) -> Iterator[None]:
        before = world.working()
        world.local.stream = stream or before
        try:
            yield
        finally:
            world.local.stream = before

    def free_and_all(*_: Any) -> tuple[int, int]:
        return world.limit_bytes - world.reserved_bytes, world.limit_bytes

    def reset(*_: Any) -> None:
        world.peak_bytes = world.live_bytes

    def synchronize(*_: Any) -> None:
        with world.lock:
            _merge(world.host, world.clocks[world.working().id])

    found = SimpleNamespace(
        name="pretended",
        total_memory=world.limit_bytes,
        major=9,
        minor=0,
        multi_processor_count=132,
        uuid="0",
    )
    told: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_capability": lambda *_: (9, 0),
        "get_device_name": lambda *_: found.name,
        "get_device_properties": lambda *_: found,
        "mem_get_info": free_and_all,
        "memory_allocated": lambda *_: world.live_bytes,
        "memory_reserved": lambda *_: world.reserved_bytes,
        "max_memory_allocated": lambda *_: world.peak_bytes,
        "reset_peak_memory_stats": reset,
        "memory_stats": lambda *_: {"num_ooms": 0},
        "empty_cache": world.empty_cache,
        "set_device": lambda _: None,
        "synchronize": synchronize,
        "Stream": lambda *_, **__: Stream(world),
        "Event": lambda *_, **__: Event(world),
        "stream": on_stream,
        "current_stream": lambda *_: world.working(),
    }
    for name, value in told.items():
        patch.setattr(torch.cuda, name, value)


def _as_host(world: World, patch: pytest.MonkeyPatch) -> None:
    def tensor(data: Any, *args: Any, _made: Any = torch.tensor, device: Any = None, **kwargs: Any) -> Tensor:
        if isinstance(data, list):
            data = [each.item() if isinstance(each, Fake) else each for each in data]
        made: Tensor = _made(data, *args, **kwargs)
        return _to_device(world, made) if _is_cuda(device) else made

    _device_constructors()  # which remembers torch's own for good, not what stands in for it here
    patch.setattr(torch, "tensor", tensor)
    patch.setattr(Tensor, "pin_memory", lambda self, *_: world.pin(self.clone()))
    patch.setattr(Tensor, "is_pinned", lambda self, *_: _is_pinned(world, self))

    def read(of: Any, self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, Fake):
            world.read_by_host([self])
        return of(self, *args, **kwargs)

    for name in ("tolist", "numpy", "item"):
        patch.setattr(Tensor, name, functools.partialmethod(functools.partial(read, getattr(Tensor, name))))


def _launching(world: World, patch: pytest.MonkeyPatch) -> None:
    """Kernels are launched: what they read and write is noted, and zeros are written."""
    from triton.runtime.interpreter import InterpretedFunction  # noqa: PLC0415 - only where there is Triton
    from triton.runtime.jit import JITFunction  # noqa: PLC0415 - likewise

    from giornata.packed import kernels  # noqa: PLC0415 - likewise

    def run(self: Any, *args: Any, grid: Any = None, warmup: bool = False, **constants: Any) -> None:
        code = self.fn.__code__
        given = dict(zip(code.co_varnames[: code.co_argcount], args, strict=False)) | constants
        tensors: dict[str, Any] = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        for name, value in tensors.items():
            if not isinstance(value, Fake):
                raise TypeError(f"Pointer argument {name} cannot be accessed from Triton (cpu tensor?)")
        world.variants.add(_variant(self, given))
        written = WRITTEN.get(self.fn.__name__, {"out"})
        world.launch(self.fn.__name__)
        world.note(
            [value for name, value in tensors.items() if name not in written],
            [value for name, value in tensors.items() if name in written],
        )
        if world.values:
            with _disable_current_modes():
                for name in written & tensors.keys():
                    tensors[name].inner.zero_()

    def gather(placed: Any, own: Any, key: Tensor, value: Tensor, _of: Any = kernels.gather) -> None:
        for pages, _ in placed:  # which the kernel reads by their addresses
            levels = (pages.key, pages.value, pages.key_delta, pages.value_delta)
            parts = [part for each in levels if each is not None for part in each]
            world.note([part for part in (*parts, pages.index) if isinstance(part, Fake)], ())
        _of(placed, own, key, value)

    for kind in (InterpretedFunction, JITFunction):
        patch.setattr(kind, "run", run)
    patch.setattr(kernels, "TRITON", replace(kernels.TRITON, gather=gather))


def _variant(kernel: Any, given: dict[str, Any]) -> tuple[Any, ...]:
    """What Triton compiles a kernel for: constants, dtypes, addresses of 16 bytes, and numbers that are 1 or 16 n."""
    options = getattr(kernel, "kwargs", None) or vars(kernel)
    free, unaligned = (options[f"do_not_specialize{what}"] or () for what in ("", "_on_alignment"))

    def kind(name: str, value: Any) -> Any:
        if isinstance(value, Fake):
            return value.dtype, name in unaligned or value.data_ptr() % 16 == 0
        if name.isupper() or name == "num_warps":
            return value
        return type(value) if isinstance(value, float) or name in free else (value == 1, value % 16 == 0)

    return kernel.fn.__name__, *((name, kind(name, value)) for name, value in sorted(given.items()))


def _varlen(world: World, query: Fake, key: Fake, value: Fake, *spans: Any, **_: Any) -> Tensor:
    """torch.nn.attention.varlen.varlen_attn by sequences; refuses what FlashAttention 2 refuses."""
    queries, keys, longest_query, longest_key = spans
    for tensor in (query, key, value):
        if tensor.dtype not in {torch.bfloat16, torch.float16}:
            raise RuntimeError(
                f"FlashAttention only support fp16 and bf16 data type, received {tensor.dtype}"
            )
        if tensor.dim() != 3 or tensor.stride(-1) != 1:
            raise RuntimeError("varlen_attn takes three dimensions, the last one contiguous")
    if query.shape[2] % 8 or query.shape[2] > 256 or query.shape[1] != key.shape[1]:
        raise RuntimeError(f"heads of {tuple(query.shape)} and {tuple(key.shape)}")
    for offsets in (queries, keys):
        if offsets.dtype != torch.int32 or not isinstance(offsets, Fake):
            raise RuntimeError("cu_seqlens must be int32 on the device")
    world.launch("varlen_attn")
    out = torch.empty_like(query.inner, memory_format=torch.contiguous_format)
    if world.values:
        with _disable_current_modes():
            bounds = [offsets.inner.tolist() for offsets in (queries, keys)]
            lengths = [[b - a for a, b in pairwise(each)] for each in bounds]
            if list(map(max, lengths)) != [longest_query, longest_key]:
                raise RuntimeError(f"the longest of {lengths} are not {longest_query} and {longest_key}")
            parts = [tensor.inner.transpose(0, 1).float() for tensor in (query, key, value)]
            for (a, b), (c, d) in zip(*(pairwise(each) for each in bounds), strict=True):
                of = torch.nn.functional.scaled_dot_product_attention(
                    parts[0][:, a:b], parts[1][:, c:d], parts[2][:, c:d]
                )
                out[a:b] = of.transpose(0, 1).to(out.dtype)
    made = _wrapped(world, out, {})
    world.note((query, key, value, queries, keys), (made,))
    return made


def _attended(query: Fake, key: Fake, value: Fake, *args: Any, **kwargs: Any) -> Tensor:
    """torch's attention as one kernel."""
    world, parts = query.world, (query, key, value)
    out = torch.nn.functional.scaled_dot_product_attention(
        query.inner, key.inner, value.inner, *args, **kwargs
    )
    world.launch("scaled_dot_product_attention")
    made = _wrapped(world, out, {})
    world.note(parts, (made,))
    return made


def _to_device(
    world: World, tensor: Tensor, dtype: torch.dtype | None = None, *, non_blocking: bool = False
) -> Fake:
    world.launch("copy to the device")
    if not (_is_pinned(world, tensor) and non_blocking):
        # of pageable memory a copy waits for all that the stream has to do
        world.synchronise("copy to the device")
    wanted = dtype or tensor.dtype
    inner = (
        tensor.to(wanted, copy=True)
        if world.values
        else torch.empty_like(tensor, dtype=wanted, device="meta")
    )
    made = _wrapped(world, inner, {})
    world.note((), (made,))
    return made


def _to_host(
    world: World,
    tensor: Fake,
    dtype: torch.dtype | None = None,
    *,
    non_blocking: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    world.launch("copy to the host")
    world.note((tensor,), ())
    if out is None or not (non_blocking and _is_pinned(world, out)):
        world.synchronise("copy to the host")
    else:
        stream = world.working().id
        world.coming[_address(out)] = stream, world.clocks[stream][stream]
    inner = tensor.inner if world.values else torch.ones(tensor.shape, dtype=tensor.dtype)
    value = inner.to(dtype or tensor.dtype, copy=True)
    return value if out is None else out.copy_(value.expand_as(out))


def _dispatched(world: World, func: Any, args: Any, kwargs: Any) -> Any:
    name = func.overloadpacket.__name__ if hasattr(func, "overloadpacket") else str(func)
    tensors = [each for each in _leaves((args, kwargs)) if isinstance(each, Tensor)]
    fakes = [each for each in tensors if isinstance(each, Fake)]
    moves = _moved(world, name, args, kwargs)
    if moves is not None:
        return moves
    if not fakes and not _is_cuda(kwargs.get("device")):
        world.read_by_host(tensors)
        if not kwargs.get("pin_memory"):
            return func(*args, **kwargs)
        return world.pin(func(*args, **{**kwargs, "pin_memory": False}))
    _refuse_hosts(world, name, tensors)
    _synchronise(world, name, args, kwargs)
    if name == "_local_scalar_dense" and not world.values:
        return 1
    inner = torch.device("cpu" if world.values else "meta")

    def unwrapped(each: Any) -> Any:
        if isinstance(each, Fake):
            return each.inner
        if isinstance(each, Tensor) and each.dim() and not world.values:
            return each.to("meta")
        return inner if isinstance(each, torch.device) and each.type == "cuda" else each

    plain = {key: unwrapped(value) for key, value in kwargs.items() if key != "pin_memory"}
    positional = _mapped(unwrapped, args)
    out = func(*positional, **plain) if world.values else _shaped(func, positional, plain)
    if (
        name in ALLOCATING and world.values
    ):  # what no kernel computes here stays what it is: no leftovers, which may be NaN
        out.zero_()
    return _noted(world, func, name, fakes, (args, kwargs), out)


def _moved(world: World, name: str, args: Any, kwargs: Any) -> Any:
    """What a copy between host and device gives; None of anything else."""
    made: Any = None
    if name in {"_pin_memory", "pin_memory"}:
        made = world.pin(args[0].clone())
    elif name == "is_pinned":
        made = _is_pinned(world, args[0])
    elif name == "_to_copy" and (device := kwargs.get("device")) is not None:
        how = {"dtype": kwargs.get("dtype"), "non_blocking": kwargs.get("non_blocking", False)}
        if isinstance(args[0], Fake) != _is_cuda(device):
            made = (_to_device if _is_cuda(device) else _to_host)(world, args[0], **how)
    elif name == "copy_" and isinstance(args[0], Fake) != isinstance(args[1], Fake):
        target, source = args[:2]
        at_once = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
        if not isinstance(target, Fake):
            return _to_host(world, source, target.dtype, non_blocking=at_once, out=target)
        brought = _to_device(world, source, non_blocking=at_once)
        if world.values:
            target.inner.copy_(brought.inner)
        world.note((), (target,))
        made = target
    return made


def _refuse_hosts(world: World, name: str, tensors: Sequence[Tensor]) -> None:
    """Raise where tensors of the host are mixed with those of the device; numbers and indices are not."""
    for tensor in tensors:
        if isinstance(tensor, Fake) or tensor.dim() == 0:
            continue
        if name not in INDEXING:
            raise RuntimeError(f"Expected all tensors to be on the same device: {name} at {_caller()}")
        world.synchronise(f"{name} by an index on the host")


def _synchronise(world: World, name: str, args: Any, kwargs: Any) -> None:
    """Note that the host waits where it has to know how large a result is."""
    if name in SYNCHRONISING:
        world.synchronise(name)
    if name in INDEXING:
        masks = (each for each in _leaves(args[1]) if isinstance(each, Tensor))
        if any(each.dtype in {torch.bool, torch.uint8} for each in masks):
            world.synchronise(f"{name} by a mask")
    if name == "repeat_interleave" and not kwargs.get("output_size"):
        world.synchronise("repeat_interleave without output_size")


_shapes: Final[dict[Any, tuple[bool, list[tuple[Any, ...]]]]] = {}
"""What operations made of shapes: equal blocks ask for the same, and torch takes long to tell of many operations."""


def _shaped(func: Any, args: Any, kwargs: Any) -> Any:
    """What an operation makes of shapes."""
    if _arguments(func):  # a view, or in place
        return func(*args, **kwargs)
    asked = func, torch.get_default_dtype(), _signature(args), _signature(kwargs)
    if asked not in _shapes:
        out = func(*args, **kwargs)
        made: list[Any] = (
            [out] if isinstance(out, Tensor) else list(out) if isinstance(out, tuple | list) else [None]
        )
        given = {
            each.untyped_storage()._cdata for each in _leaves((args, kwargs)) if isinstance(each, Tensor)
        }
        if any(not isinstance(each, Tensor) or each.untyped_storage()._cdata in given for each in made):
            return out
        told = [(each.size(), each.stride(), each.dtype) for each in made]
        _shapes[asked] = isinstance(out, Tensor), told
    alone, told = _shapes[asked]
    made = [torch.empty_strided(size, stride, dtype=dtype, device="meta") for size, stride, dtype in told]
    return made[0] if alone else tuple(made)


def _signature(value: Any) -> Any:
    """All that an operation's result may depend on where nothing has values."""
    if isinstance(value, Tensor):
        return value.device.type, value.size(), value.stride(), value.dtype
    if isinstance(value, dict):
        return tuple((key, _signature(each)) for key, each in value.items())
    if isinstance(value, NESTED):
        return tuple(map(_signature, value))
    return type(value), value


def _noted(world: World, func: Any, name: str, fakes: Sequence[Fake], given: Any, out: Any) -> Any:
    """`out` as tensors of the device, once it is noted what was read and written."""
    args, kwargs = given
    known = {id(each.inner): each for each in fakes}
    storages = {each.inner.untyped_storage()._cdata: each.memory for each in fakes}
    fresh: list[Fake] = []
    plain = torch.is_inference_mode_enabled() and any(not each.is_inference() for each in fakes)

    def wrapped(each: Any) -> Any:
        if not isinstance(each, Tensor):
            return each
        if id(each) in known:
            return known[id(each)]
        new = each.untyped_storage()._cdata not in storages
        if plain and not new:  # a view of a tensor that was not made for inference is none either
            with torch.inference_mode(mode=False):
                return _wrapped(world, each, storages)
        made = _wrapped(world, each, storages)
        if new:
            fresh.append(made)
        return made

    result = _mapped(wrapped, out)
    changed = [
        tensor
        for place, name_of, written in _arguments(func)
        if written
        for tensor in _leaves(args[place] if place < len(args) else kwargs.get(name_of))
        if isinstance(tensor, Fake)
    ]
    if name not in HOST_ONLY and ((fresh and name not in ALLOCATING) or changed):
        world.launch(name)
        overwritten = set(map(id, changed)) if name in OVERWRITING else set()
        world.note([each for each in fakes if id(each) not in overwritten], [*changed, *fresh])
    return result


def _leaves(value: Any) -> list[Any]:
    """As torch's own `tree_leaves` of what operations take, which is slower."""
    if not isinstance(value, NESTED):
        return [value]
    found: list[Any] = []
    for each in value.values() if isinstance(value, dict) else value:
        if isinstance(each, NESTED):
            found += _leaves(each)
        else:
            found.append(each)
    return found


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """As torch's own `tree_map`, likewise."""
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([_mapped(change, each) for each in value])
    return tree_map(change, value) if isinstance(value, NESTED) else change(value)


@functools.cache
def _arguments(func: Any) -> tuple[tuple[int, str, bool], ...]:
    """Places and names of an operation's arguments that a result may share, and whether it writes to them."""
    told = enumerate((each.name, each.alias_info) for each in func._schema.arguments)
    return tuple((place, name, alias.is_write) for place, (name, alias) in told if alias is not None)


@functools.cache
def _composite(func: Any) -> bool:
    kept = func._overloadpacket.__name__ in {"scaled_dot_product_attention", "is_pinned", "pin_memory"}
    return not kept and torch._C._dispatch_has_kernel_for_dispatch_key(
        func.name(), "CompositeImplicitAutograd"
    )


def _wrapped(world: World, tensor: Tensor, storages: dict[int, Memory]) -> Fake:
    storage = tensor.untyped_storage()
    if storage._cdata not in storages:
        storages[storage._cdata] = Memory(world, storage.nbytes())
    return Fake(tensor, storages[storage._cdata])


def _index(part: Any) -> Any:
    if isinstance(part, slice):
        return None
    return torch.as_tensor(part) if isinstance(part, list) else part


def _merge(clock: Clock, other: Clock) -> None:
    for stream, number in other.items():
        clock[stream] = max(clock.get(stream, 0), number)


def _is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_pinned(world: World, tensor: Tensor) -> bool:
    return not isinstance(tensor, Fake) and _address(tensor) in world.pinned


def _caller() -> str:
    """File, line and function of the project, or of diffusers, that is computing."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if not any(part in code.co_filename for part in ELSEWHERE):
            name = code.co_filename.rpartition("site-packages/")[2].rpartition("/giornata_denoiser/")[2]
            return f"{name.rpartition('/shared/')[2]}:{frame.f_lineno} {code.co_name}"
        frame = frame.f_back
    return "?"
