"""ControlNets that are computed before each step, on the engine's own device."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from giornata.control.expansion import Behind, sequences, summed
from giornata.control.protocol import Conditions, ControlNet
from giornata.control.running import Act, RowStep, run
from giornata.packed.moving import moved
from giornata.scheduling.batch import RowKey
from giornata_denoiser.controls.added import Added
from giornata_denoiser.controls.networks import Controlled
from giornata_denoiser.engine.controls import ControlNotLoaded, OfSequences
from giornata_denoiser.rows.row import Row

HELD_STEPS: Final = 2
"""What ControlNets add serves so many steps of a row that takes tokens outside its mask from elsewhere."""


@dataclass(frozen=True, eq=False)
class _Held:
    step: int
    acting: tuple[bool, ...]
    added: Added


class LocalControls:
    """The loaded `nets`, by digest, beside the network that is `controlled`.

    It satisfies :class:`giornata_denoiser.engine.controls.Controls`. Rows that reuse take what a step added for
    `held_steps` - 1 steps more; all others have it computed in each step.
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
        self._held: dict[RowKey, _Held] = {}

    def residuals(self, rows: Sequence[Row]) -> tuple[OfSequences, ...]:
        """See :meth:`giornata_denoiser.engine.controls.Controls.residuals`: each net has one forward."""
        acting = [row.adapters.controlling(row.step) for row in rows]
        found = [self._still(row, acts) for row, acts in zip(rows, acting, strict=True)]
        due = [
            n for n, (acts, held) in enumerate(zip(acting, found, strict=True)) if held is None and any(acts)
        ]
        steps = [self._step(rows[number], acting[number]) for number in due]
        made: list[dict[int, Tensor]] = [{} for _ in due]
        for place, index, sample in run(steps):
            made[place][index] = sample
        for number, step, samples in zip(due, steps, made, strict=True):
            sums = summed([act.behind for act in step.acts])
            added = Added(sums.behind, tuple(samples[index] for index in range(len(sums.parts))))
            found[number] = added
            self._held[rows[number].key] = _Held(step.step, acting[number], added)
        return tuple(
            () if added is None else added.of(len(row.prompts))
            for row, added in zip(rows, found, strict=True)
        )

    def retain(self, keys: Collection[RowKey]) -> None:
        """Forget all rows but these."""
        for act in [act for act in self._opened if act[0] not in keys]:
            del self._opened[act]
        for key in self._held.keys() - keys:
            del self._held[key]

    def _still(self, row: Row, acts: tuple[bool, ...]) -> Added | None:
        """What an earlier step of `row` has made, where it serves this one."""
        held = self._held.get(row.key)
        if held is None or row.region is None or held.acting != acts:
            return None
        return held.added if 0 < row.step - held.step < self._held_steps else None

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
