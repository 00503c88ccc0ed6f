"""What a step asks of a GPU: operations that launch kernels, and bytes that they read and write, by rows.

``python -m giornata_lab.bench.launches`` needs no GPU: on the device `meta` nothing is computed, at FLUX.1-dev's
whole shape, or that of a transformer with ``--family``. A kernel's start takes 5 to 10 microseconds of the host, so
that a step of 1,000 operations cannot take less than 5 to 10 milliseconds. `÷ full` compares with a step in full of
as many rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, Final, Self
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from giornata.packed.packing import TraceLane
from giornata_lab.bench.compute.batches import MASK, Batches, StepKind
from giornata_lab.bench.compute.models import described
from giornata_lab.bench.harness import write
from giornata_lab.bench.options import family_option, rows_of, shared
from giornata_lab.flags import Several, option, parsed

ALLOCATING: Final = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
WITHOUT_KERNEL: Final = {"record_stream", "set_", "resize_"}
"""They change a tensor, not its memory."""
WRITTEN_ONLY: Final = {"copy_", "fill_", "zero_"}
"""What they change is not read before."""
GATHERING: Final = {"index_select", "index", "gather", "embedding"}
"""They read as much of their first tensor as they write."""
SCATTERING: Final = {"index_put_", "index_copy_", "scatter_"}
"""They write as much of their first tensor as their last one holds."""


class Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's is without types
    """Counts what is dispatched to a type of device while its context lasts, in one thread.

    An operation counts once, however many kernels it is made of, unless it only allocates memory or looks at some in
    another shape. A copy between host and device counts. Satisfies :class:`giornata.packed.packing.LaneTracer`: what
    runs within a span of loading is counted apart.

    A kernel of Triton counts once, and its bytes are those of all tensors that it is given. On `meta` none runs.

    The device may be `meta`, which computes nothing: shapes of any size then take no memory, and the code takes the
    branches that it takes on a GPU wherever it asks whether the device is a CPU.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's is without types
        self.operations: dict[TraceLane, Counter[str]] = {
            TraceLane.COMPUTE: Counter(),
            TraceLane.LOAD: Counter(),
        }
        """How often each operation ran."""
        self.moved_bytes: Counter[TraceLane] = Counter()
        """Bytes that operations read and wrote, each tensor once an operation: what no cache could spare."""
        self._device_type = device_type
        self._lane = TraceLane.COMPUTE
        self._kernels = ExitStack()

    def __enter__(self) -> Self:
        """Triton's kernels pass no dispatcher: their classes are changed meanwhile."""
        for kind in (JITFunction, InterpretedFunction):
            self._kernels.enter_context(patch.object(kind, "run", self._counting(kind.run)))
        super().__enter__()  # type: ignore[no-untyped-call]  # torch's is without types
        return self

    def __exit__(self, *raised: object) -> None:
        """Count no more, and let go of the kernels that were watched."""
        super().__exit__(*raised)  # type: ignore[no-untyped-call]  # likewise
        self._kernels.close()

    def _counting(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return how a kernel is launched, counted."""

        def counted(kernel: Any, *args: Any, **named: Any) -> Any:
            tensors = _tensors((args, named))
            if all(tensor.device.type != self._device_type for tensor in tensors):
                return run(kernel, *args, **named)
            self.operations[self._lane][kernel.fn.__name__] += 1
            self.moved_bytes[self._lane] += sum(map(_size_bytes, tensors))
            return None if self._device_type == "meta" else run(kernel, *args, **named)

        return counted

    def count(self, lane: TraceLane) -> int:
        """Operations of a lane: computing or loading."""
        return self.operations[lane].total()

    @contextmanager
    def span(self, lane: TraceLane, name: str, **arguments: object) -> Iterator[None]:
        """Loads within computing are counted as loads."""
        before, self._lane = self._lane, TraceLane.LOAD if lane is TraceLane.LOAD else self._lane
        try:
            yield
        finally:
            self._lane = before

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        made = func(*args, **named)
        name = str(func.overloadpacket.__name__)
        if name == "scaled_dot_product_attention" and self._device_type == "meta":
            made = torch.empty_like(args[0])  # a GPU's kernels answer in the query's layout, meta's does not
        given, results = _tensors((args, named)), _tensors(made)
        if any(tensor.device.type == self._device_type for tensor in (*given, *results)):
            changed = _changed(func, args, named)
            fresh = _fresh(results, given)
            if (fresh and name not in ALLOCATING) or (changed and name not in WITHOUT_KERNEL):
                self.operations[self._lane][name] += 1
                self.moved_bytes[self._lane] += _moved_bytes(name, given, changed, fresh)
        return made


def _tensors(tree: Any) -> list[Tensor]:
    """Each once."""
    found = {id(each): each for each in tree_iter(tree) if isinstance(each, Tensor)}
    return list(found.values())


def _changed(func: Any, args: Sequence[Any], named: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that an operation changes in place."""
    arguments = func._schema.arguments
    by_name = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | dict(named)
    written = [
        by_name.get(argument.name)
        for argument in arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return _tensors(written)


def _fresh(results: Iterable[Tensor], given: Iterable[Tensor]) -> list[Tensor]:
    """Results in memory of their own: the others are views, or what was given."""
    known = {_storage(tensor) for tensor in given}
    return [tensor for tensor in results if _storage(tensor) not in known]


def _moved_bytes(
    name: str, given: Sequence[Tensor], changed: Sequence[Tensor], fresh: Sequence[Tensor]
) -> int:
    made = sum(map(_size_bytes, fresh))
    if name in GATHERING:
        return 2 * made + sum(map(_size_bytes, given[1:]))
    if name in SCATTERING:
        return sum(map(_size_bytes, given[1:])) + _size_bytes(given[-1])
    alone = {id(tensor) for tensor in changed} if name in WRITTEN_ONLY or fresh == [] else set()
    accumulates = name.endswith("_") and name not in WRITTEN_ONLY
    read = sum(_size_bytes(tensor) for tensor in given if accumulates or id(tensor) not in alone)
    return read + made + sum(map(_size_bytes, changed))


def _size_bytes(tensor: Tensor) -> int:
    """Bytes of what is there: a broadcast tensor is read once."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def counted(step: Callable[[Launches], object], device_type: str) -> Launches:
    """Return what one call of `step` dispatches; another one before it makes what is kept from step to step."""
    with Launches(device_type) as before:
        step(before)
    found = Launches(device_type)
    with found:
        step(found)
    return found


SHOWN: Final = 6
"""Names of operations in the table."""


def options_of(arguments: Sequence[str] | None = None) -> SimpleNamespace:
    """Flags."""
    return parsed(
        __doc__,
        [
            *shared(tokens=4096, text=512, repeats=1, model="real", device="meta"),
            family_option(),
            option("--rows", type=Several(int), default=[1, 8], help="of a step"),
        ],
        arguments,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Count, print, write ``out/bench/launches.json``."""
    options = options_of(arguments)
    rows = rows_of(options)
    batches = Batches(rows)
    lines = []
    for count in options.rows:
        found = {kind: counted(batches.prepared(kind, count), rows.family.device.type) for kind in StepKind}
        lines += [_line(kind, count, found) for kind in StepKind]
    workload = {
        **vars(options),
        "model": described(rows.family),
        "mask": MASK,
        "setting": rows.setting.as_dict(),
    }
    write("launches", lines, workload=workload)


def _line(kind: StepKind, count: int, found: dict[StepKind, Launches]) -> dict[str, Any]:
    own, full = found[kind], found[StepKind.FULL]
    most = own.operations[TraceLane.COMPUTE].most_common(SHOWN)
    return {
        "rows": count,
        "step": str(kind),
        "operations": own.count(TraceLane.COMPUTE),
        "÷ full": round(own.count(TraceLane.COMPUTE) / full.count(TraceLane.COMPUTE), 3),
        "in loads": own.count(TraceLane.LOAD),
        "GB": round(own.moved_bytes[TraceLane.COMPUTE] / 1e9, 2),
        "GB in loads": round(own.moved_bytes[TraceLane.LOAD] / 1e9, 2),
        "most": ", ".join(f"{name} {times}" for name, times in most),
    }


if __name__ == "__main__":
    main()
