"""ControlNets that are computed before each step, on the engine's own device."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

from torch import Tensor

from giornata.control.expansion import Behind, sequences, summed
from giornata.control.protocol import Conditions, ControlNet
from giornata.control.running import Act, RowStep, run
from giornata.packed.moving import moved
from giornata.scheduling.batch import RowKey
from giornata_denoiser.controls.added import Added
from giornata_denoiser.controls.holding import Holding
from giornata_denoiser.controls.networks import Controlled
from giornata_denoiser.engine.controls import ControlNotLoaded, OfSequences
from giornata_denoiser.rows.row import Row

HELD_STEPS: Final = 2
"""What ControlNets add serves so many steps of a row that takes tokens outside its mask from elsewhere."""


class LocalControls:
    """The loaded `nets`, by digest, beside the network that is `controlled`.

    Rows that reuse take what a step added for `held_steps` - 1 steps more; all others have it computed in each step.
    """

    def __init__(
        self, nets: Mapping[str, ControlNet], network: Controlled, *, held_steps: int = HELD_STEPS
    ) -> None:
        self._nets, self._network, self._held_steps = nets, network, held_steps
        self._behind: Mapping[str, Behind] = {
            digest: net.behind(network.base) for digest, net in nets.items()
        }
        self._opened: dict[tuple[RowKey, int], tuple[Tensor, object]] = {}
        """By row and number of its ControlNet, with the control image that it is of."""
        self._holding: Holding[Added] = Holding()

    def has(self, row: Row) -> bool:
        """Whether all ControlNets of `row` are here, and what they see."""
        controls = row.adapters.controls
        return len(row.control_images) == len(controls) and all(use.digest in self._nets for use in controls)

    def compute(self, rows: Sequence[Row]) -> tuple[OfSequences, ...]:
        """What is added in the next steps of `rows`; each net has one forward.

        Raises:
            ControlNotLoaded: a net that acts is not here.
        """
        acting = [row.adapters.controlling(row.step) for row in rows]
        found = [self._still(row, acts) for row, acts in zip(rows, acting, strict=True)]
        due = [
            n for n, (acts, held) in enumerate(zip(acting, found, strict=True)) if held is None and any(acts)
        ]
        steps = [self._step(rows[number], acting[number]) for number in due]
        made: list[dict[int, Tensor]] = [{} for _ in due]
        for place, nth, sample in run(steps):
            made[place][nth] = sample
        for number, step, samples in zip(due, steps, made, strict=True):
            sums = summed([act.behind for act in step.acts])
            added = Added(sums.behind, tuple(samples[nth] for nth in range(len(sums.parts))))
            found[number] = added
            self._holding.keep(rows[number], acting[number], added, whole=True)
        return tuple(
            () if added is None else added.of(len(row.prompts))
            for row, added in zip(rows, found, strict=True)
        )

    def retain(self, keys: Collection[RowKey]) -> None:
        """Forget all rows but these."""
        for act in [act for act in self._opened if act[0] not in keys]:
            del self._opened[act]
        self._holding.retain(keys)

    def _still(self, row: Row, acts: tuple[bool, ...]) -> Added | None:
        """What an earlier step of `row` has made, where it serves this one."""
        if row.region is None:
            return None
        return self._holding.find(row, acts, whole=True, steps=self._held_steps - 1)

    def _step(self, row: Row, acting: tuple[bool, ...]) -> RowStep:
        acts = [self._act(row, nth) for nth, acts in enumerate(acting) if acts]
        net = acts[0].net
        latents = row.scaled(moved(row.latent, net.device)).to(net.dtype)
        return RowStep(acts, row.step, latents, sequences(self._network.base.kind, len(row.prompts)))

    def _act(self, row: Row, nth: int) -> Act:
        use = row.adapters.controls[nth]
        net = self._nets.get(use.digest)
        if net is None:
            raise ControlNotLoaded(f"the ControlNet {use.digest[:12]} is not loaded here")
        return Act(net, self._open(net, row, nth), use.scale, self._behind[use.digest])

    def _open(self, net: ControlNet, row: Row, nth: int) -> object:
        image, known = row.control_images[nth], self._opened.get((row.key, nth))
        if known is None or known[0] is not image:
            known = image, net.open(conditions(row, nth, self._network))
            self._opened[row.key, nth] = known
        return known[1]


def conditions(row: Row, nth: int, network: Controlled) -> Conditions:
    """What the ControlNet `nth` of a row sees of it."""
    return Conditions(
        row.control_images[nth],
        row.grid,
        tuple(network.text(prompt) for prompt in row.prompts),
        row.track.times,
        row.adapters.controls[nth].mode,
    )
