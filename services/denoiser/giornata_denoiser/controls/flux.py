"""ControlNets of Flux, computed before each step on the engine's own device."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, cast

from torch import Tensor

from giornata.control.expansion import Blocks, sample_of
from giornata.control.flux import Conditions, FluxControl, Item, Opened
from giornata.packed.moving import moved
from giornata.packed.uses import Residuals
from giornata.scheduling.batch import RowKey
from giornata_denoiser.engine.controls import ControlNotLoaded
from giornata_denoiser.families.flux.transformer import FluxPrompt
from giornata_denoiser.rows.row import Row

HELD_STEPS: Final = 2
"""What ControlNets add serves so many steps of a row that takes tokens outside its mask from elsewhere."""

Act = tuple[RowKey, int]
"""A row, and which of its ControlNets."""


@dataclass(frozen=True, eq=False)
class Part:
    """What one ControlNet adds in a step."""

    net: FluxControl
    scale: float
    samples: tuple[Tensor, ...]
    """(tokens, inner_dim) each, of the whole picture."""


@dataclass(frozen=True, eq=False)
class Sum:
    """What all ControlNets of a row add; satisfies :class:`giornata.packed.uses.Residuals`.

    Samples are summed behind blocks: nets may have different numbers of them, where diffusers'
    `FluxMultiControlNetModel` drops those that the first net does not have.
    """

    base: Blocks
    parts: tuple[Part, ...]
    whole: bool = True

    def sample(self, block: int) -> Tensor | None:
        """(tokens, inner_dim) behind `block`."""
        total: Tensor | None = None
        for part in self.parts:
            index = sample_of(block, self.base, part.net.samples, repeats=part.net.repeats)
            if index is not None:
                scaled = part.samples[index] * part.scale
                total = scaled if total is None else total + scaled
        return total


@dataclass(frozen=True, eq=False)
class _Held:
    step: int
    acting: tuple[bool, ...]
    sum: Sum


class FluxControls:
    """The loaded `nets`, by digest, beside a network with the blocks `base`.

    It satisfies :class:`giornata_denoiser.engine.controls.Controls`. Rows that reuse take what a step added for
    `held_steps` - 1 steps more; all others have it computed in each step.
    """

    def __init__(
        self, nets: Mapping[str, FluxControl], base: Blocks, *, held_steps: int = HELD_STEPS
    ) -> None:
        self._nets, self._base, self._held_steps = nets, base, held_steps
        self._opened: dict[Act, tuple[Tensor, Opened]] = {}
        self._held: dict[RowKey, _Held] = {}

    def residuals(self, rows: Sequence[Row]) -> tuple[Residuals | None, ...]:
        """See :meth:`giornata_denoiser.engine.controls.Controls.residuals`: each net has one forward."""
        acting = [row.adapters.controlling(row.step) for row in rows]
        found = [self._still(row, acts) for row, acts in zip(rows, acting, strict=True)]
        work: dict[str, list[tuple[int, int]]] = {}
        for index, (row, acts) in enumerate(zip(rows, acting, strict=True)):
            for nth, acts_now in enumerate(acts):
                if acts_now and found[index] is None:
                    work.setdefault(row.adapters.controls[nth].digest, []).append((index, nth))
        made: dict[tuple[int, int], tuple[Tensor, ...]] = {}
        for digest, items in work.items():
            made |= self._computed(digest, rows, items)
        return tuple(
            self._sum(row, acts, index, made) if held is None else held
            for index, (row, acts, held) in enumerate(zip(rows, acting, found, strict=True))
        )

    def retain(self, keys: Collection[RowKey]) -> None:
        """Forget all rows but these."""
        for act in [act for act in self._opened if act[0] not in keys]:
            del self._opened[act]
        for key in self._held.keys() - keys:
            del self._held[key]

    def _still(self, row: Row, acts: tuple[bool, ...]) -> Sum | None:
        """What an earlier step of `row` has made, where it serves this one."""
        held = self._held.get(row.key)
        if held is None or row.region is None or held.acting != acts:
            return None
        return held.sum if 0 < row.step - held.step < self._held_steps else None

    def _computed(
        self, digest: str, rows: Sequence[Row], acts: Sequence[tuple[int, int]]
    ) -> dict[tuple[int, int], tuple[Tensor, ...]]:
        net = self._nets.get(digest)
        if net is None:
            raise ControlNotLoaded(f"the ControlNet {digest[:12]} is not loaded here")
        items = [
            Item(
                self._open(net, rows[index], nth),
                rows[index].step,
                moved(rows[index].latent, net.device).to(net.dtype),
            )
            for index, nth in acts
        ]
        samples = list(net.run(items))
        return {act: tuple(sample[of] for sample in samples) for of, act in enumerate(acts)}

    def _open(self, net: FluxControl, row: Row, nth: int) -> Opened:
        image, known = row.control_images[nth], self._opened.get((row.key, nth))
        if known is not None and known[0] is image:
            return known[1]
        prompt = cast("FluxPrompt", row.prompts[0])
        opened = net.open(
            Conditions(
                image,
                row.grid,
                prompt.embeds,
                prompt.pooled,
                prompt.guidance_scale,
                row.track.times,
                row.adapters.controls[nth].mode,
            )
        )
        self._opened[row.key, nth] = image, opened
        return opened

    def _sum(
        self,
        row: Row,
        acts: tuple[bool, ...],
        index: int,
        made: Mapping[tuple[int, int], tuple[Tensor, ...]],
    ) -> Sum | None:
        if not any(acts):
            return None
        controls = row.adapters.controls
        parts = tuple(
            Part(self._nets[controls[nth].digest], controls[nth].scale, made[index, nth])
            for nth, acts_now in enumerate(acts)
            if acts_now
        )
        total = Sum(self._base, parts)
        self._held[row.key] = _Held(row.step, acts, total)
        return total
