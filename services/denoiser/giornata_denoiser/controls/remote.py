"""ControlNets that an instance of the service computes beside a step: asked for before it, and waited for in it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from giornata.control.expansion import Behind, ResidualLayout, count_sequences, sum_residuals
from giornata.control.link.client import ControlLink, ControlStepHandle
from giornata.control.link.messages import ControlFailed, LinkLate, LinkLost
from giornata.packed.packing import to_device
from giornata.scheduling.batch import RowKey
from giornata_denoiser.blocks.slabs import WaitTimer
from giornata_denoiser.controls.local import ControlNetTarget
from giornata_denoiser.controls.residuals import ResidualCache
from giornata_denoiser.engine.adapters import ControlLost, OfSequences
from giornata_denoiser.rows.row import Row

LATE_S: Final = 10.0
"""How long a sample may take before its instance is given up."""


@dataclass(frozen=True, eq=False)
class ControlNetSession:
    """A row that is open at an instance."""

    instance: str
    link: ControlLink
    row: str
    """What the instance knows it by."""
    behind: tuple[Behind, ...]
    """By ControlNet of the row."""


@dataclass(frozen=True, eq=False)
class PendingResiduals:
    """A request for the residuals of a row's step that has not been answered."""

    key: RowKey
    session: ControlNetSession
    asked: ControlStepHandle
    sums: ResidualLayout
    sequences: int
    whole: bool

    @property
    def here(self) -> bool:
        """Return whether all samples have come."""
        return self.asked.arrived == len(self.sums.parts)


@dataclass(frozen=True)
class RemoteControlOptions:
    """Options for rows that use the residuals of an instance."""

    held_steps: int = 1
    """What a step adds serves so many steps of a row that reuses."""
    late_s: float = LATE_S


class RemoteControls:
    """The rows that are open at instances. Sessions come and go in other threads than the engine's.

    `lost` is told of a row whose instance does not compute it any longer, and why.
    """

    def __init__(
        self,
        network: ControlNetTarget,
        dtype: torch.dtype,
        device: torch.device,
        lost: Callable[[RowKey, Exception], None],
        manner: RemoteControlOptions | None = None,
    ) -> None:
        self._network, self._dtype, self._device, self._lost = network, dtype, device, lost
        self._manner = manner or RemoteControlOptions()
        self._lock = threading.Lock()
        self._sessions: dict[RowKey, ControlNetSession] = {}
        self._holding: ResidualCache[PendingResiduals] = ResidualCache()
        self._used: list[PendingResiduals] = []
        """What the last step has used, and no later one will."""

    def put(self, key: RowKey, session: ControlNetSession) -> None:
        """The row is open there from now on."""
        with self._lock:
            self._sessions[key] = session

    def drop(self, key: RowKey) -> None:
        """The row is no longer open."""
        with self._lock:
            self._sessions.pop(key, None)

    def has(self, key: RowKey) -> bool:
        """Return whether the row is open at an instance that can be asked."""
        with self._lock:
            return key in self._sessions

    def ask(self, rows: Sequence[Row], whole: Sequence[bool], waits: WaitTimer) -> tuple[OfSequences, ...]:
        """Ask for what is added in the next steps of `rows`, which are open; what is read of it is waited for then.

        Raises:
            ControlLost: instances do not take the question.
        """
        self._release()
        return tuple(self._of(row, every, waits) for row, every in zip(rows, whole, strict=True))

    def retain(self, keys: Collection[RowKey]) -> None:
        """Keep nothing of steps of other rows. What the device may still read goes when the next step is asked for."""
        self._used += self._holding.retain(keys)
        if not keys:
            self._release()

    def _of(self, row: Row, whole: bool, waits: WaitTimer) -> OfSequences:  # noqa: FBT001 - of one row
        acting = row.adapters.controlling(row.step)
        if not any(acting):
            return ()
        whole = whole or row.region is None
        if row.region is not None:
            held = self._holding.find(row, acting, whole=whole, steps=self._manner.held_steps - 1)
            if held is not None:
                return self._read(held, row, waits)
        if (replaced := self._holding.forget(row.key)) is not None:
            self._let_go((replaced,))  # makes room
        mine = self._asked(row, acting, waits, whole=whole)
        self._holding.keep(row, acting, mine, whole=whole)
        return self._read(mine, row, waits)

    def _asked(
        self, row: Row, acting: tuple[bool, ...], waits: WaitTimer, *, whole: bool
    ) -> PendingResiduals:
        with self._lock:
            session = self._sessions.get(row.key)
        if session is None:
            raise ControlLost({row.key})
        base = self._network.base
        sums = sum_residuals([behind for behind, acts in zip(session.behind, acting, strict=True) if acts])
        count = count_sequences(base.kind, len(row.prompts))
        tokens = count * (row.image_tokens if whole else row.computed_tokens)
        try:
            with waits.waiting():  # for room
                asked = session.link.ask(
                    row=session.row,
                    step=row.step,
                    level=float(row.track.times[row.step]),
                    latents=row.scaled(row.latent),
                    tokens=(tokens,) * len(sums.parts),
                    channels=[base.channels[block] for block in sums.first],
                    dtype=self._dtype,
                    whole=whole,
                )
        except LinkLost as error:
            raise self._gone(self._over(session.link), error) from error
        except LinkLate as error:
            raise self._gone({row.key: session}, error) from error
        return PendingResiduals(row.key, session, asked, sums, count, whole)

    def _read(self, coming: PendingResiduals, row: Row, waits: WaitTimer) -> OfSequences:
        return tuple(_RemoteResiduals(self, coming, nth, waits) for nth in range(len(row.prompts)))

    def sample(self, coming: PendingResiduals, index: int, waits: WaitTimer) -> Tensor:
        """(sequences, tokens, channels) on the engine's device.

        Raises:
            ControlLost: it does not come.
        """
        try:
            with waits.waiting():
                flat = coming.asked.sample(index, self._manner.late_s)
        except LinkLost as error:
            raise self._gone(self._over(coming.session.link), error, coming) from error
        except LinkLate as error:
            raise self._gone(self._as_late(coming), error, coming) from error
        except ControlFailed as error:
            raise self._gone({coming.key: coming.session}, error, coming) from error
        return to_device(flat.view(coming.sequences, -1, flat.shape[1]), self._device)

    def _over(self, link: ControlLink) -> Mapping[RowKey, ControlNetSession]:
        """The rows that are open over a link."""
        with self._lock:
            return {key: session for key, session in self._sessions.items() if session.link is link}

    def _as_late(self, coming: PendingResiduals) -> Mapping[RowKey, ControlNetSession]:
        """Rows of the same link whose samples are not here either, and were asked for no later than what waits here."""
        pending = {key: self._holding.added(key) for key in self._over(coming.session.link)}
        late = (each for each in pending.values() if each is not None and not each.here)
        return {coming.key: coming.session, **{each.key: each.session for each in late}}

    def _gone(
        self, rows: Mapping[RowKey, ControlNetSession], error: Exception, read: PendingResiduals | None = None
    ) -> ControlLost:
        """These `rows` are not open any longer, and their owners are told. `read` is of no use to any step."""
        keys = set(rows) if read is None else {read.key, *rows}
        for key in keys:
            if (coming := self._holding.forget(key)) is not None:
                self._used.append(coming)
        for key, session in rows.items():
            with self._lock:
                current = self._sessions.get(key) is session
                if current:
                    del self._sessions[key]
            if current:  # else it is open elsewhere by now, or its owner has closed it
                self._lost(key, error)
        return ControlLost(keys)

    def _release(self) -> None:
        self._let_go(self._used)
        self._used.clear()

    def _let_go(self, comings: Collection[PendingResiduals]) -> None:
        if comings and self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        for coming in comings:
            coming.asked.release()


@dataclass(frozen=True, eq=False)
class _RemoteResiduals:
    """The residuals of one sequence; satisfies :class:`giornata.packed.compute_set.Residuals`."""

    controls: RemoteControls
    coming: PendingResiduals
    nth: int
    waits: WaitTimer

    @property
    def whole(self) -> bool:
        """Return whether samples are of all tokens."""
        return self.coming.whole

    def sample(self, block: int) -> Tensor | None:
        """(tokens, channels) behind `block`; waited for here."""
        index = self.coming.sums.behind[block]
        if index is None:
            return None
        of = self.controls.sample(self.coming, index, self.waits)
        return of[self.nth if len(of) > 1 else 0]
