"""Which tokens each layer of a driven transformer sees, for the LoRAs of its sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from giornata.packed.low_rank_hooks import LowRankHooks, Where, of_text
from giornata_denoiser.families.driven.forward import ForwardContext, TokenStream


class LayerStreams:
    """The streams of one transformer's layers: those of blocks of `pairs`, of `singles`, and behind the blocks."""

    def __init__(self, hooks: LowRankHooks, pairs: Sequence[Any], singles: Sequence[Any]) -> None:
        self._streams: dict[str, TokenStream] = {}
        for block in pairs:
            self._streams |= {
                path: TokenStream.TEXT if of_text(path) else TokenStream.IMAGE
                for path in hooks.paths_in(block)
            }
        for block in singles:
            self._streams |= dict.fromkeys(hooks.paths_in(block), TokenStream.JOINT)

    def where(self, forward: ForwardContext) -> Where | None:
        """Where LoRAs act in the blocks of `forward` and behind them; None for nowhere."""
        if not forward.owners:
            return None
        return lambda path: forward.spans(self._streams.get(path, TokenStream.OUTPUT))

    def entering(self, forward: ForwardContext, companions: Sequence[int]) -> Where | None:
        """Where they act on the pictures' tokens before the blocks, without so many `companions` of each sequence."""
        if not forward.owners:
            return None
        live = forward.tokens.now
        lengths = tuple(
            length - (count if whole else 0)
            for length, count, whole in zip(live.layout.image.lengths, companions, live.whole, strict=True)
        )
        return lambda _: forward.owners.over(lengths)
