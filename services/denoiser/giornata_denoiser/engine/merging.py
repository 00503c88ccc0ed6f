"""LoRAs in the weights themselves, for as long as all rows of a step have the same.

One set for all rows can be part of the weights: its products are then free. Merging and restoring take time, so that it
happens only where the same rows go on for long enough. It happens in float32 alone: half precision would round part of
the change away, and a row's picture would depend on who shares its steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor, nn

from giornata.packed.low_rank import Factors, LowRank
from giornata_denoiser.rows.row import Row

COPIED_BYTES: Final = 32 << 20
"""Size of a copy that is timed."""
COPIES: Final = 3
"""Passes over the weights for a merge and its restoring, beside the product: kept, changed, written back."""


class Merging:
    """The weights of one network, as they are or with one set in them.

    Originals are kept beside them and written back: subtracting would leave rounding in a quarter of the weights.

    Args:
        layers: what sets may change, by path.
        saves: whether merging a set is worth it for the coming steps of these rows; by default it never is.
    """

    def __init__(
        self,
        layers: Mapping[str, nn.Module] = MappingProxyType({}),
        saves: Callable[[LowRank, Sequence[Row]], bool] = lambda *_: False,
    ) -> None:
        self.merged: LowRank | None = None
        """The set that is in the weights."""
        self.merges = 0
        """How often one was put there."""
        self._weights = {
            path: layer.weight for path, layer in layers.items() if isinstance(layer, (nn.Linear, nn.Conv2d))
        }
        self._exact = all(weight.dtype in {torch.float32, torch.float64} for weight in self._weights.values())
        self._saves = saves
        self._originals: dict[str, Tensor] = {}

    def settle(self, rows: Sequence[Row], low_ranks: Sequence[LowRank | None], *, steady: bool) -> None:
        """Have the weights as the next step of `rows` needs them; `low_ranks` are the sets that act, by row.

        Where no other row is to join (`steady`), a set that all rows have may be merged.
        """
        one = low_ranks[0] if len(set(map(id, low_ranks))) == 1 else None
        if self.merged is not None and self.merged is not one:
            self.restore()
        if one is not None and self.merged is None and steady and self._exact and self._saves(one, rows):
            self._merge(one)

    def beside(self, low_rank: LowRank | None) -> LowRank | None:
        """The set of a row, if it is still to be added to what the layers make."""
        return None if low_rank is self.merged else low_rank

    def restore(self) -> None:
        """Write the originals back, bit for bit."""
        with torch.no_grad():
            for path, original in self._originals.items():
                self._weights[path].data.copy_(original)
        self._originals.clear()
        self.merged = None

    def _merge(self, low_rank: LowRank) -> None:
        """Without memory for the originals, nothing is merged from now on."""
        try:
            with torch.no_grad():
                for path in low_rank.paths:
                    weight, factors = self._weights[path].data, low_rank.factors(path)
                    if factors is not None:
                        self._originals[path] = weight.clone()
                        weight.add_(_change(factors).view_as(weight))
        except torch.OutOfMemoryError:
            self.restore()
            self._exact = False
        else:
            self.merged = low_rank
            self.merges += 1


def merge_work(low_rank: LowRank) -> tuple[float, float]:
    """Multiplications of merging a set, and of adding its products to one token of every layer."""
    pairs = [factors for path in low_rank.paths if (factors := low_rank.factors(path)) is not None]
    merging = sum(factors.up.numel() * factors.down[0].numel() for factors in pairs)
    token = sum(factors.up.numel() + factors.down.numel() for factors in pairs)
    return float(merging), float(token)


def merged_bytes(low_rank: LowRank) -> int:
    """Bytes of the weights that a set changes: those of the originals that are kept while it is merged."""
    pairs = [factors for path in low_rank.paths if (factors := low_rank.factors(path)) is not None]
    return sum(len(factors.up) * factors.down[0].nbytes for factors in pairs)


def pays(low_rank: LowRank, rows: Sequence[Row], *, linear_ms: float, byte_ms: float) -> bool:
    """Whether the products that the coming steps of `rows` are spared take longer than merging and restoring.

    `linear_ms` is the time of one multiplication of a linear layer, `byte_ms` that of copying a byte on the device.
    """
    merging, token = merge_work(low_rank)
    steps = min(row.steps - row.step for row in rows)
    spared = steps * sum(row.tokens for row in rows) * token
    return spared * linear_ms > merging * linear_ms + COPIES * merged_bytes(low_rank) * byte_ms


def _change(factors: Factors) -> Tensor:
    """(out_features, everything else): the change of a weight."""
    return factors.up.flatten(1) @ factors.down.flatten(1)


def byte_ms(device: torch.device) -> float:
    """Milliseconds of copying one byte on `device`, the quickest of some copies."""
    source = torch.ones(COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(4):
        began = time.perf_counter()
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append((time.perf_counter() - began) * 1e3)
    return min(times) / COPIED_BYTES
