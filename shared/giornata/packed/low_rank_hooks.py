"""Low-rank changes of an unmodified network: hooks that add to what its layers make what the sets of a batch make.

Which tokens a layer sees follows from its path and from where the forward is, which tells the hooks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from torch import Tensor, nn

from giornata.packed.low_rank import LoraSpans, SequenceLoras, whole
from giornata.packed.low_rank_products import FactorSpan, choose, convolve

Where = Callable[[str], LoraSpans]
"""What sets change of the tensor that enters the module of this path now."""
_OF_TEXT: Final = re.compile(r"(^|\.)(add_[qkv]_proj|to_add_out|\w*_context|context_embedder|txt_\w+)(\.|$)")


def of_text(path: str) -> bool:
    """Whether a layer of a transformer with two streams sees the text's, by diffusers' names."""
    return _OF_TEXT.search(path) is not None


class LowRankHooks:
    """The hooks of one network, on all of its linear layers and convolutions but those `apart`.

    What is called otherwise than as a module asks for :meth:`add` or :meth:`parts` itself. Not thread-safe: one forward
    at a time. Hooks are set when the first set acts, so that a network without LoRAs is called as it is.
    """

    def __init__(self, network: nn.Module, apart: Collection[nn.Module] = ()) -> None:
        self._paths: dict[nn.Module, str] = {
            module: path
            for path, module in network.named_modules()
            if isinstance(module, (nn.Linear, nn.Conv2d))
        }
        self._hooked = [module for module in self._paths if module not in set(apart)]
        self._attached = False
        self._where: Where | None = None
        weight = next(network.parameters())
        self._products = choose(weight.device, weight.dtype)

    @property
    def layers(self) -> dict[str, nn.Module]:
        """All layers that sets may change, by path."""
        return {path: module for module, path in self._paths.items()}

    def paths_in(self, part: nn.Module) -> tuple[str, ...]:
        """Paths of the layers of a part of the network, as far as sets may change them."""
        return tuple(self._paths[module] for module in part.modules() if module in self._paths)

    @contextmanager
    def acting(self, where: Where | None) -> Iterator[None]:
        """Let sets act as `where` tells; None for none. What acted before acts again afterwards."""
        if where is not None and not self._attached:
            self._attach()
        before, self._where = self._where, where
        try:
            yield
        finally:
            self._where = before

    def alone(self, low_rank: SequenceLoras | None) -> Any:
        """:meth:`acting` on all that enters any layer: it belongs to one sequence."""
        return self.acting(None if low_rank is None else lambda _: whole(low_rank))

    def parts(self, module: nn.Module, rows: int) -> list[FactorSpan]:
        """What acts now on so many `rows`, or items, that enter `module`.

        Raises:
            ValueError: the rows are not those of the batch.
        """
        if self._where is None:
            return []
        path = self._paths[module]
        spans, units = self._where(path)
        if not spans:
            return []
        each, rest = divmod(rows, units)
        if rest:
            raise ValueError(f"{path} received {rows} rows, expected a multiple of {units}")
        return [
            FactorSpan(factors, start * each, end * each)
            for low_rank, start, end in spans
            if (factors := low_rank.factors(path)) is not None
        ]

    def add(self, module: nn.Module, entering: Tensor, leaving: Tensor, outputs: slice = slice(None)) -> None:
        """Add, in place, what acts now to what a linear layer, or one called as such, makes of `entering`.

        Both are (..., channels); `leaving` may be some `outputs` of the layer alone.
        """
        if self._where is None:
            return
        entering = entering.reshape(-1, entering.shape[-1])
        parts = self.parts(module, len(entering))
        if outputs != slice(None):
            parts = [part._replace(factors=part.factors.rows(outputs)) for part in parts]
        if parts:
            self._products(entering, leaving.view(-1, leaving.shape[-1]), parts)

    def add_each(self, modules: Sequence[nn.Module], entering: Tensor, leaving: Sequence[Tensor]) -> None:
        """:meth:`add` for layers of one input."""
        if self._where is not None:
            for module, part in zip(modules, leaving, strict=True):
                self.add(module, entering, part)

    def _attach(self) -> None:
        for module in self._hooked:
            hook = self._convolution if isinstance(module, nn.Conv2d) else self._linear
            module.register_forward_hook(hook)
        self._attached = True

    def _linear(self, module: nn.Module, entering: tuple[Tensor, ...], leaving: Tensor) -> None:
        self.add(module, entering[0], leaving)

    def _convolution(self, module: nn.Conv2d, entering: tuple[Tensor, ...], leaving: Tensor) -> None:
        convolve(entering[0], leaving, self.parts(module, len(leaving)), module)
