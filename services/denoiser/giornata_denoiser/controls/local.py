"""ControlNets that a denoiser computes itself, before each step, and what is added, for the steps after it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Generic, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from giornata.checkpoints import CONTROL_FILES, checkpoint_folder
from giornata.control.layout import Behind, count_sequences, parse_checkpoints, sum_residuals
from giornata.control.networks import (
    ControlConditions,
    ControlNet,
    ControlText,
    RowControlNet,
    RowStep,
    load,
    run,
)
from giornata.packed.packing import to_device
from giornata.planning.operations import work_of
from giornata.scheduling.batch import RowKey
from giornata.tensors import SIZES
from giornata.wire.adapters import ControlWork
from giornata.wire.controlnets import ControlBase
from giornata_denoiser.engine.batch_tensors import ControlNotLoaded, OfSequences
from giornata_denoiser.families.network import Network
from giornata_denoiser.rows.row import Prompt, Row


@runtime_checkable
class ControlledNetwork(Protocol):
    """A network for which diffusers has ControlNets."""

    def control_base(self, token_pixels: int) -> ControlBase:
        """Return what a ControlNet has to fit; a token has `token_pixels` pixels of the picture a side."""


@dataclass(frozen=True)
class ControlNetTarget:
    """A network that ControlNets add to."""

    base: ControlBase


def control_text(prompt: Prompt) -> ControlText:
    """The text of one sequence, as ControlNets see it."""
    return ControlText(prompt.embeds, prompt.pooled, prompt.tensors.get(SIZES), prompt.guidance_scale)


def control_target(network: Network, token_pixels: int) -> ControlNetTarget | None:
    """Return what ControlNets have to know of a `network`; None where diffusers has none for it.

    A token has `token_pixels` pixels of the picture a side.
    """
    if not isinstance(network, ControlledNetwork):
        return None
    return ControlNetTarget(network.control_base(token_pixels))


A = TypeVar("A")


class ResidualCache(Generic[A]):
    """A cache of what was added in each row's latest step."""

    def __init__(self) -> None:
        self._held: dict[RowKey, tuple[int, tuple[bool, ...], bool, A]] = {}
        """The step, which of the row's ControlNets acted, whether it is of all tokens, and what was added."""

    def find(self, row: Row, acting: tuple[bool, ...], *, whole: bool, steps: int) -> A | None:
        """Return what one of the `steps` before the row's next one has made, where the same ControlNets act.

        None also where it is of the row's region, and the next step is `whole`; and for a row that reuses nothing.
        """
        if row.region is None or row.key not in self._held:
            return None
        step, acted, is_whole, added = self._held[row.key]
        if acted != acting or (whole and not is_whole):
            return None
        return added if 0 < row.step - step <= steps else None

    def keep(self, row: Row, acting: tuple[bool, ...], added: A, *, whole: bool) -> None:
        """Keep what the row's next step adds."""
        self._held[row.key] = row.step, acting, whole, added

    def added(self, key: RowKey) -> A | None:
        """Return what is kept of a row."""
        return self._held[key][-1] if key in self._held else None

    def forget(self, key: RowKey) -> A | None:
        """Keep nothing of a row; returns what was kept."""
        return self._held.pop(key)[-1] if key in self._held else None

    def retain(self, keys: Collection[RowKey]) -> list[A]:
        """Forget all rows but these; returns what was kept of the others."""
        return [self._held.pop(key)[-1] for key in self._held.keys() - keys]


@dataclass(frozen=True, eq=False)
class AddedResiduals:
    """The residuals of one sequence of a row; satisfies :class:`giornata.packed.compute_set.Residuals`."""

    nth: int
    """Which of the row's sequences."""
    behind: Behind
    """By block, which sum is added behind it."""
    sums: Callable[[int], Tensor]
    """(sequences, tokens, channels) of a sum; one sequence serves all. May wait for it."""
    whole: bool = True
    """Whether samples are of all tokens."""

    def sample(self, block: int) -> Tensor | None:
        """(tokens, channels) behind `block`."""
        index = self.behind[block]
        if index is None:
            return None
        of = self.sums(index)
        return of[self.nth if len(of) > 1 else 0]


HELD_STEPS: Final = 2
"""What ControlNets add serves so many steps of a row that takes tokens outside its mask from elsewhere."""


class LocalControls:
    """The loaded `nets`, by digest, beside the `network`.

    What a step adds serves `held_steps` steps of a row that reuses.
    """

    def __init__(
        self, nets: Mapping[str, ControlNet], network: ControlNetTarget, held_steps: int = HELD_STEPS
    ) -> None:
        self._nets, self._network, self._held_steps = nets, network, held_steps
        self._behind: Mapping[str, Behind] = {
            digest: net.behind(network.base) for digest, net in nets.items()
        }
        self.works: Mapping[str, ControlWork] = {digest: work_of(net.card) for digest, net in nets.items()}
        """What each of them costs."""
        self._opened: dict[tuple[RowKey, int], tuple[Tensor | None, object]] = {}
        """By row and number of its ControlNet: the control image, and what :meth:`ControlNet.open` made of it."""
        self._holding: ResidualCache[tuple[Behind, tuple[Tensor, ...]]] = ResidualCache()
        """Sums, and which of them is added behind each block."""

    def has(self, row: Row) -> bool:
        """Return whether all ControlNets of `row` are here, and what they see."""
        return all(use.image is not None and use.digest in self._nets for use in row.adapters.controls)

    def compute(self, rows: Sequence[Row], whole: Sequence[bool]) -> tuple[OfSequences, ...]:
        """Return what is added in the next steps of `rows`; each net has one forward.

        `whole` are the rows of which all tokens are needed.

        Raises:
            ControlNotLoaded: a net that acts is not here.
        """
        acting = [row.adapters.controlling(row.step) for row in rows]
        found = [
            self._holding.find(row, acts, whole=every, steps=self._held_steps - 1)
            for row, acts, every in zip(rows, acting, whole, strict=True)
        ]
        due = [n for n, acts in enumerate(acting) if found[n] is None and any(acts)]
        steps = [self._step(rows[number], acting[number]) for number in due]
        made: list[dict[int, Tensor]] = [{} for _ in due]
        for place, nth, sample in run(steps):
            made[place][nth] = sample
        for number, step, samples in zip(due, steps, made, strict=True):
            sums = sum_residuals([act.behind for act in step.acts])
            added = found[number] = sums.behind, tuple(samples[nth] for nth in range(len(sums.parts)))
            # As long as one that an instance made of the region would serve, so that pictures are equal.
            asked = whole[number] or rows[number].region is None
            self._holding.keep(rows[number], acting[number], added, whole=asked)
        return tuple(
            tuple(AddedResiduals(nth, added[0], added[1].__getitem__) for nth in range(len(row.prompts)))
            if added
            else ()
            for row, added in zip(rows, found, strict=True)
        )

    def retain(self, keys: Collection[RowKey]) -> None:
        """Forget all rows but these."""
        for act in [act for act in self._opened if act[0] not in keys]:
            del self._opened[act]
        self._holding.retain(keys)

    def _step(self, row: Row, acting: tuple[bool, ...]) -> RowStep:
        acts = [self._act(row, nth) for nth, acts in enumerate(acting) if acts]
        net = acts[0].net
        latents = row.scaled(to_device(row.latent, net.device)).to(net.dtype)
        return RowStep(acts, row.step, latents, count_sequences(self._network.base.kind, len(row.prompts)))

    def _act(self, row: Row, nth: int) -> RowControlNet:
        use = row.adapters.controls[nth]
        net = self._nets.get(use.digest)
        if net is None:
            raise ControlNotLoaded(f"the ControlNet {use.digest[:12]} is not loaded here")
        known = self._opened.get((row.key, nth))
        if known is None or known[0] is not use.image:
            known = self._opened[row.key, nth] = use.image, net.open(control_conditions(row, nth))
        return RowControlNet(net, known[1], use.scale, self._behind[use.digest])


def with_control_costs(row: Row, works: Mapping[str, ControlWork]) -> Row:
    """`row` whose ControlNets cost this process `works`, by digest, the others nothing; itself if they do already."""
    controls = tuple(replace(use, work=works.get(use.digest)) for use in row.adapters.controls)
    if controls == row.adapters.controls:
        return row
    return replace(row, adapters=replace(row.adapters, controls=controls))


def control_conditions(row: Row, nth: int) -> ControlConditions:
    """Return what the ControlNet `nth` of a row sees of it."""
    use = row.adapters.controls[nth]
    if use.image is None:
        raise ControlNotLoaded(f"row {row.key} has no picture for the ControlNet {use.digest[:12]}")
    return ControlConditions(
        use.image,
        row.grid,
        tuple(map(control_text, row.prompts)),
        row.track.times,
        use.mode,
    )


def open_controls(
    configured: str, network: ControlNetTarget | None, *, dtype: torch.dtype, device: torch.device
) -> Mapping[str, ControlNet]:
    """The configured ControlNets by digest, with cards that tell their work; a hub id is downloaded first.

    Raises:
        ValueError: there is none of this name, one that is not served, or one that does not fit the `network`.
    """
    checkpoints = parse_checkpoints(configured)
    if not checkpoints:
        return {}
    if network is None:
        raise ValueError("diffusers has no ControlNets for the model's family")
    nets = [
        load(checkpoint_folder(checkpoint, CONTROL_FILES), dtype, device, name)
        for name, checkpoint in checkpoints.items()
    ]
    for net in nets:
        net.behind(network.base)
        net.card = net.card.model_copy(update={"work": net.work(network.base)})
    return {net.card.digest: net for net in nets}
