"""Residuals of ControlNets for steps: computed in this process, or asked of an instance of the service.

:class:`LocalControls` computes them before a step; :class:`RemoteControls` asks before it, and waits in it for what
is read. Both keep what was added for the steps after it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Final, Generic, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from giornata.checkpoints import CONTROL_FILES, checkpoint_folder
from giornata.control.layout import Behind, ResidualLayout, count_sequences, parse_checkpoints, sum_residuals
from giornata.control.link import ControlFailed, LinkLate, LinkLost
from giornata.control.link.client import ControlLink, ControlStepHandle
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
from giornata.wire.controlnets import ControlBase, DataPath
from giornata_denoiser.engine.batch_tensors import ControlLost, ControlNotLoaded, OfSequences
from giornata_denoiser.engine.slabs import WaitTimer
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
    """The residuals of one sequence of a row; satisfies :class:`giornata.packed.packing.Residuals`."""

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
            tuple(
                AddedResiduals(nth, added[0], added[1].__getitem__) for nth in range(len(row.inputs.prompts))
            )
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
        return RowStep(
            acts, row.step, latents, count_sequences(self._network.base.kind, len(row.inputs.prompts))
        )

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
        tuple(map(control_text, row.inputs.prompts)),
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


LATE_S: Final = 10.0
"""How long a sample may take before its instance is given up."""


@dataclass(frozen=True)
class ControlLinkAddress:
    """The way to an instance, which the leader of a pool tells its ranks and does not take itself."""

    path: DataPath
    address: str
    token: str
    slab_bytes: int
    lost: ClassVar[bool] = False

    def open(self, device: torch.device) -> ControlLink:
        """A link of this process; its errors are those of :class:`ControlLink`."""
        return ControlLink(self.path, self.address, self.token, slab_bytes=self.slab_bytes, device=device)

    def close(self) -> None:
        """Do nothing: there is no connection."""


L = TypeVar("L", ControlLink, ControlLinkAddress)
"""The way to an instance; its address, where a pool's leader opens rows for ranks that ask."""


@dataclass(frozen=True, eq=False)
class ControlNetSession(Generic[L]):
    """A row that is open at an instance."""

    instance: str
    link: L
    row: str
    """What the instance knows it by."""
    behind: tuple[Behind, ...]
    """By ControlNet of the row."""


@dataclass(frozen=True, eq=False)
class PendingResiduals:
    """A request for the residuals of a row's step that has not been answered."""

    key: RowKey
    session: ControlNetSession[ControlLink]
    asked: ControlStepHandle
    sums: ResidualLayout
    sequences: int
    whole: bool

    @property
    def here(self) -> bool:
        """Return whether all samples have come."""
        return self.asked.arrived == len(self.sums.parts)


class OpenControls(Generic[L]):
    """The rows that are open at instances. Sessions come and go in other threads than the engine's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sessions: dict[RowKey, ControlNetSession[L]] = {}

    def put(self, key: RowKey, session: ControlNetSession[L]) -> None:
        """The row is open there from now on."""
        with self._lock:
            self._sessions[key] = session

    def drop(self, key: RowKey) -> None:
        """The row is no longer open."""
        with self._lock:
            self._sessions.pop(key, None)

    def session(self, key: RowKey) -> ControlNetSession[L] | None:
        """Return where the row is open."""
        with self._lock:
            return self._sessions.get(key)

    def has(self, key: RowKey) -> bool:
        """Return whether the row is open at an instance that can be asked."""
        return self.session(key) is not None

    def over(self, link: L) -> Mapping[RowKey, ControlNetSession[L]]:
        """Return the rows that are open over a link."""
        with self._lock:
            return {key: session for key, session in self._sessions.items() if session.link is link}

    def end(self, key: RowKey, session: ControlNetSession[L]) -> bool:
        """Drop the row if it is open in this session; whether it was."""
        with self._lock:
            current = self._sessions.get(key) is session
            if current:
                del self._sessions[key]
        return current


class PoolControls(OpenControls[ControlLinkAddress]):
    """The open rows of a pool: its ranks ask for them. `lost` is that of :class:`RemoteControls`."""

    def __init__(self, lost: Callable[[RowKey, Exception], None] = lambda _key, _reason: None) -> None:
        super().__init__()
        self._lost = lost

    def able(self, row: Row) -> Row | None:
        """`row`; None while what acts in its next step is computed by no rank, and the row is open nowhere."""
        elsewhere = any(use.work is None for use in row.adapters.controls)
        waits = elsewhere and any(row.adapters.controlling(row.step)) and not self.has(row.key)
        return None if waits else row

    def lose(self, key: RowKey, session: ControlNetSession[ControlLinkAddress] | None, reason: str) -> None:
        """A rank could not ask for the row in this session."""
        if session is not None and self.end(key, session):
            self._lost(key, LinkLost(reason))


class RemoteControls:
    """Asks for the residuals of rows that are open at instances, in the `sessions` of whoever opens them.

    `lost` is told of a row whose instance does not compute it any longer, and why. What a step adds serves `held_steps`
    of a row that reuses. An instance is given up when a sample takes more than `late_s`.
    """

    def __init__(
        self,
        network: ControlNetTarget,
        dtype: torch.dtype,
        device: torch.device,
        lost: Callable[[RowKey, Exception], None],
        *,
        held_steps: int = 1,
        late_s: float = LATE_S,
        sessions: OpenControls[ControlLink] | None = None,
    ) -> None:
        self.sessions = sessions or OpenControls[ControlLink]()
        self._network, self._dtype, self._device, self._lost = network, dtype, device, lost
        self._held_steps, self._late_s = held_steps, late_s
        self._holding: ResidualCache[PendingResiduals] = ResidualCache()
        self._used: list[PendingResiduals] = []
        """What the last step has used, and no later one will."""

    def ask(self, rows: Sequence[Row], whole: Sequence[bool], waits: WaitTimer) -> tuple[OfSequences, ...]:
        """Ask for what is added in the next steps of `rows`, which are open; what is read of it is waited for then.

        Raises:
            ControlLost: instances do not take the question.
        """
        self._release()
        return tuple(self._of(row, every, waits) for row, every in zip(rows, whole, strict=True))

    def retain(self, keys: Collection[RowKey]) -> None:
        """Keep nothing of steps of other rows. What the device may still read goes when the next step is asked for."""
        self._release()
        self._used += self._holding.retain(keys)
        if not keys:
            self._release()

    def _of(self, row: Row, whole: bool, waits: WaitTimer) -> OfSequences:  # noqa: FBT001 - of one row
        acting = row.adapters.controlling(row.step)
        if not any(acting):
            return ()
        whole = whole or row.region is None
        held = self._holding.find(row, acting, whole=whole, steps=self._held_steps - 1)
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
        session = self.sessions.session(row.key)
        if session is None:
            raise ControlLost({row.key})
        base = self._network.base
        sums = sum_residuals([behind for behind, acts in zip(session.behind, acting, strict=True) if acts])
        count = count_sequences(base.kind, len(row.inputs.prompts))
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
            raise self._gone(self.sessions.over(session.link), error) from error
        except LinkLate as error:
            raise self._gone({row.key: session}, error) from error
        return PendingResiduals(row.key, session, asked, sums, count, whole)

    def _read(self, coming: PendingResiduals, row: Row, waits: WaitTimer) -> OfSequences:
        sums = partial(self._sum, coming, waits)
        return tuple(
            AddedResiduals(nth, coming.sums.behind, sums, coming.whole)
            for nth in range(len(row.inputs.prompts))
        )

    def _sum(self, coming: PendingResiduals, waits: WaitTimer, index: int) -> Tensor:
        """(sequences, tokens, channels) on the engine's device; waited for here.

        Raises:
            ControlLost: it does not come.
        """
        try:
            with waits.waiting():
                flat = coming.asked.sample(index, self._late_s)
        except LinkLost as error:
            raise self._gone(self.sessions.over(coming.session.link), error, coming) from error
        except LinkLate as error:
            raise self._gone(self._as_late(coming), error, coming) from error
        except ControlFailed as error:
            raise self._gone({coming.key: coming.session}, error, coming) from error
        return to_device(flat.view(coming.sequences, -1, flat.shape[1]), self._device)

    def _as_late(self, coming: PendingResiduals) -> Mapping[RowKey, ControlNetSession[ControlLink]]:
        """Rows of the same link whose samples are not here either, and were asked for no later than what waits here."""
        pending = {key: self._holding.added(key) for key in self.sessions.over(coming.session.link)}
        late = (each for each in pending.values() if each is not None and not each.here)
        return {coming.key: coming.session, **{each.key: each.session for each in late}}

    def _gone(
        self,
        rows: Mapping[RowKey, ControlNetSession[ControlLink]],
        error: Exception,
        read: PendingResiduals | None = None,
    ) -> ControlLost:
        """These `rows` are not open any longer, and their owners are told. `read` is of no use to any step."""
        keys = set(rows) if read is None else {read.key, *rows}
        for key in keys:
            if (coming := self._holding.forget(key)) is not None:
                self._used.append(coming)
        for key, session in rows.items():
            # Else it is open elsewhere by now, or its owner has closed it.
            if self.sessions.end(key, session):
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
