"""ControlNets that are computed before each step, on the engine's own device."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from torch import Tensor

from giornata.control.expansion import Behind, sequences, summed
from giornata.control.protocol import ControlConditions, ControlNet
from giornata.control.running import RowControlNet, RowStep, run
from giornata.packed.moving import moved
from giornata.planning.controls import work_of
from giornata.scheduling.batch import RowKey
from giornata.wire.adapters import ControlWork
from giornata_denoiser.controls.added import RowResiduals
from giornata_denoiser.controls.holding import ResidualCache
from giornata_denoiser.controls.networks import ControlNetTarget
from giornata_denoiser.engine.controls import ControlNotLoaded, OfSequences
from giornata_denoiser.rows.row import Row

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
        """Whether all ControlNets of `row` are here, and what they see."""
        controls = row.adapters.controls
        return len(row.control_images) == len(controls) and all(use.digest in self._nets for use in controls)

    def compute(self, rows: Sequence[Row], whole: Sequence[bool]) -> tuple[OfSequences, ...]:
        """What is added in the next steps of `rows`; each net has one forward.

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
            sums = summed([act.behind for act in step.acts])
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
        """What an earlier step of `row` has made, where it serves this one."""
        if row.region is None:
            return None
        return self._holding.find(row, acts, whole=whole, steps=self._held_steps - 1)

    def _step(self, row: Row, acting: tuple[bool, ...]) -> RowStep:
        acts = [self._act(row, nth) for nth, acts in enumerate(acting) if acts]
        net = acts[0].net
        latents = row.scaled(moved(row.latent, net.device)).to(net.dtype)
        return RowStep(acts, row.step, latents, sequences(self._network.base.kind, len(row.prompts)))

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
            known = _OpenControlNet(image, net.open(conditions(row, nth, self._network)))
            self._opened[row.key, nth] = known
        return known


def costing(row: Row, works: Mapping[str, ControlWork]) -> Row:
    """`row` whose ControlNets cost this process `works`, by digest, the others nothing; itself if they do already."""
    controls = tuple(replace(use, work=works.get(use.digest)) for use in row.adapters.controls)
    if controls == row.adapters.controls:
        return row
    return replace(row, adapters=replace(row.adapters, controls=controls))


def conditions(row: Row, nth: int, network: ControlNetTarget) -> ControlConditions:
    """What the ControlNet `nth` of a row sees of it."""
    return ControlConditions(
        row.control_images[nth],
        row.grid,
        tuple(network.text(prompt) for prompt in row.prompts),
        row.track.times,
        row.adapters.controls[nth].mode,
    )
