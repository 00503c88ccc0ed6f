"""ControlNets that a denoiser computes itself, before each step, on the engine's own device."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol, runtime_checkable

import torch
from torch import Tensor

from giornata.checkpoints import CONTROL_FILES, checkpoint_folder
from giornata.control.expansion import Behind, count_sequences, sum_residuals
from giornata.control.naming import parse_checkpoints
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
from giornata_denoiser.controls.residuals import ResidualCache, RowResiduals
from giornata_denoiser.engine.adapters import ControlNotLoaded, OfSequences
from giornata_denoiser.families.protocol import Network
from giornata_denoiser.rows.row import Prompt, Row

# What ControlNets have to know of the networks that they add to.


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


# ControlNets that are computed before each step, on the engine's own device.


HELD_STEPS: Final = 2
"""What ControlNets add serves so many steps of a row that takes tokens outside its mask from elsewhere."""


@dataclass(frozen=True, eq=False)
class _OpenControlNet:
    """One ControlNet of a row."""

    image: Tensor
    """The control image that it is of."""
    row: object
    """What :meth:`ControlNet.open` made."""


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
        self._opened: dict[tuple[RowKey, int], _OpenControlNet] = {}
        """By row and number of its ControlNet."""
        self._holding: ResidualCache[RowResiduals] = ResidualCache()

    def has(self, row: Row) -> bool:
        """Return whether all ControlNets of `row` are here, and what they see."""
        controls = row.adapters.controls
        return len(row.control_images) == len(controls) and all(use.digest in self._nets for use in controls)

    def compute(self, rows: Sequence[Row], whole: Sequence[bool]) -> tuple[OfSequences, ...]:
        """Return what is added in the next steps of `rows`; each net has one forward.

        `whole` are the rows of which all tokens are needed.

        Raises:
            ControlNotLoaded: a net that acts is not here.
        """
        acting = [row.adapters.controlling(row.step) for row in rows]
        found = [self._still(*each) for each in zip(rows, acting, whole, strict=True)]
        due = [n for n, acts in enumerate(acting) if found[n] is None and any(acts)]
        steps = [self._step(rows[number], acting[number]) for number in due]
        made: list[dict[int, Tensor]] = [{} for _ in due]
        for place, nth, sample in run(steps):
            made[place][nth] = sample
        for number, step, samples in zip(due, steps, made, strict=True):
            sums = sum_residuals([act.behind for act in step.acts])
            added = RowResiduals(sums.behind, tuple(samples[nth] for nth in range(len(sums.parts))))
            found[number] = added
            # As long as one that an instance made of the region would serve, so that pictures are equal.
            asked = whole[number] or rows[number].region is None
            self._holding.keep(rows[number], acting[number], added, whole=asked)
        return tuple(
            () if added is None else added.of(len(row.prompts))
            for row, added in zip(rows, found, strict=True)
        )

    def retain(self, keys: Collection[RowKey]) -> None:
        """Forget all rows but these."""
        for act in [act for act in self._opened if act[0] not in keys]:
            del self._opened[act]
        self._holding.retain(keys)

    def _still(self, row: Row, acts: tuple[bool, ...], whole: bool) -> RowResiduals | None:  # noqa: FBT001 - of one row
        """Return what an earlier step of `row` has made, where it serves this one."""
        if row.region is None:
            return None
        return self._holding.find(row, acts, whole=whole, steps=self._held_steps - 1)

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
        opened = self._open(net, row, nth)
        return RowControlNet(net, opened.row, use.scale, self._behind[use.digest])

    def _open(self, net: ControlNet, row: Row, nth: int) -> _OpenControlNet:
        image, known = row.control_images[nth], self._opened.get((row.key, nth))
        if known is None or known.image is not image:
            known = _OpenControlNet(image, net.open(control_conditions(row, nth)))
            self._opened[row.key, nth] = known
        return known


def with_control_costs(row: Row, works: Mapping[str, ControlWork]) -> Row:
    """`row` whose ControlNets cost this process `works`, by digest, the others nothing; itself if they do already."""
    controls = tuple(replace(use, work=works.get(use.digest)) for use in row.adapters.controls)
    if controls == row.adapters.controls:
        return row
    return replace(row, adapters=replace(row.adapters, controls=controls))


def control_conditions(row: Row, nth: int) -> ControlConditions:
    """Return what the ControlNet `nth` of a row sees of it."""
    return ControlConditions(
        row.control_images[nth],
        row.grid,
        tuple(map(control_text, row.prompts)),
        row.track.times,
        row.adapters.controls[nth].mode,
    )


# The ControlNets that a denoiser is configured with, loaded beside its checkpoint.


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
