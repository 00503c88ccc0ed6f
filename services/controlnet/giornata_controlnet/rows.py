"""Rows that are open here, made from requests and asked for by denoisers, and the ControlNets that they use.

Cards of all that are configured are known, weights of those that are in use, or were lately, are resident.
"""

from __future__ import annotations

import asyncio
import functools
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple, Self

import structlog
import torch

from giornata import tensors
from giornata.blobs import BlobStore, intermediate
from giornata.checkpoints import CONTROL_FILES, checkpoint_folder
from giornata.control.layout import (
    Behind,
    ControlMismatch,
    ResidualLayout,
    count_sequences,
    parse_checkpoints,
    sum_residuals,
)
from giornata.control.link.server import is_known_token
from giornata.control.networks import (
    ControlConditions,
    ControlNet,
    RowControlNet,
    import_control_kind,
    load,
    read_control_images,
    read_control_texts,
    select_control_images,
)
from giornata.model_cards import read_control_card
from giornata.packed.packing import Region, region_of
from giornata.planning.operations import control_work
from giornata.residency.tiers import LoadedTier, TierLookup
from giornata.wire.adapters import ControlCard
from giornata.wire.controlnets import ControlBase, OpenControl, control_row
from giornata.wire.errors import (
    ControlNetMismatch,
    ControlNetNotFound,
    ControlNetUnavailable,
    Failed,
    Overloaded,
    SchemaMismatch,
)
from giornata.wire.values import Intermediate

TOKEN_BYTES: Final = 32

log = structlog.get_logger(__name__)


class ConfiguredControlNet(NamedTuple):
    """A ControlNet whose card has been read."""

    card: ControlCard
    folder: Path


def read_cards(configured: str) -> tuple[ConfiguredControlNet, ...]:
    """The ControlNets of a configuration, without their weights; hub ids are downloaded first.

    Raises:
        Failed: names every checkpoint that cannot be served, and why.
    """
    found, mistakes = [], []
    for name, checkpoint in parse_checkpoints(configured).items():
        try:
            folder = checkpoint_folder(checkpoint, CONTROL_FILES)
            found.append(ConfiguredControlNet(read_control_card(folder, name), folder))
            import_control_kind(found[-1].card.kind)  # no row waits for it
        except (ValueError, OSError) as error:
            mistakes.append(f"{name}: {error}")
    if mistakes:
        raise Failed(f"ControlNets cannot be served: {'; '.join(mistakes)}")
    return tuple(found)


class ResidentControlNets:
    """ControlNets by digest on one device, loaded when a row asks for them; a context.

    Those that rows have pinned in `tier` stay; the others are let go of beyond `budget_bytes`, least recently used
    first. Used on the event loop alone, but for what the threads of loads do.
    """

    def __init__(
        self,
        configured: tuple[ConfiguredControlNet, ...],
        device: torch.device,
        dtype: torch.dtype,
        *,
        budget_bytes: int,
        loads: int,
    ) -> None:
        self.cards = tuple(each.card for each in configured)
        self.device, self.dtype = device, dtype
        self.hits, self.misses = 0, 0
        """Rows whose ControlNets were all here when they were opened, and those that waited for one."""
        self._folders: Mapping[str, ConfiguredControlNet] = {each.card.digest: each for each in configured}
        self.tier: LoadedTier[ControlNet] = LoadedTier(
            budget_bytes, lambda one: sum(parameter.nbytes for parameter in one.net.parameters())
        )
        self._loading: dict[str, asyncio.Future[TierLookup[ControlNet]]] = {}
        self._threads = ThreadPoolExecutor(loads, thread_name_prefix="controlnet-load")
        for card in self.cards:
            if card.weight_bytes > budget_bytes:
                log.warning("controlnet_exceeds_budget", name=card.name, budget_bytes=budget_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        """Wait for loads that have begun; those that have not are cancelled."""
        self._threads.shutdown(cancel_futures=True)

    def has(self, digest: str) -> bool:
        """Return whether it is configured."""
        return digest in self._folders

    def count(self, digests: set[str]) -> None:
        """A row that is to be opened uses these."""
        here = digests <= set(self.tier)
        self.hits, self.misses = self.hits + here, self.misses + (not here)

    async def loaded(self, digest: str) -> ControlNet:
        """The ControlNet of this digest, which is configured; one load serves all that wait, and outlives them.

        Raises:
            ControlNetUnavailable: it cannot be loaded, or there is no memory for it.
        """
        if (found := self.tier.get(digest)) is not None:
            return found
        loading = self._loading.get(digest)
        if loading is None:
            work = functools.partial(self.tier.load, digest, lambda: self._read(digest))
            begun = asyncio.get_running_loop().run_in_executor(self._threads, work)
            loading = self._loading[digest] = begun
            begun.add_done_callback(functools.partial(self._ended, digest))
        found = (await asyncio.shield(loading)).value
        if found is None:
            raise RuntimeError(f"the ControlNet {digest} was not read")
        return found

    def _ended(self, digest: str, loading: asyncio.Future[TierLookup[ControlNet]]) -> None:
        del self._loading[digest]
        if not loading.cancelled() and (error := loading.exception()) is not None:
            log.error("controlnet_not_loaded", digest=digest[:12], error=str(error))

    def _read(self, digest: str) -> ControlNet:
        card, folder = self._folders[digest]
        log.info("controlnet_loading", name=card.name, digest=digest[:12])
        try:
            net = load(folder, self.dtype, self.device, card.name)
        except (ValueError, OSError, torch.OutOfMemoryError) as error:
            raise ControlNetUnavailable(f"The ControlNet {card.name} cannot be loaded: {error}") from error
        if net.card.digest != digest:
            raise ControlNetUnavailable(
                f"The files of the ControlNet {card.name} have changed since the start."
            )
        return net


@dataclass(frozen=True, eq=False)
class ActiveControlNet(RowControlNet):
    """A ControlNet of a row, and the steps in which it acts."""

    first: int
    end: int
    """The first step after them."""
    work: float
    """Multiplications in each of them, of all sequences."""


@dataclass(eq=False)
class OpenRow:
    """The part of a row that all of its steps share."""

    key: str
    denoiser: str
    """The instance that has opened it, and alone may ask for its steps."""
    nets: Sequence[ActiveControlNet]
    """Those that act in any step, in the order of the job."""
    behind: tuple[Behind, ...]
    """Which sample each ControlNet of the job adds behind each block; all None for one that never acts."""
    base: ControlBase
    grid: tuple[int, int]
    times: tuple[float, ...]
    """What the network is told of each step."""
    sequences: int
    """For how many of the row's sequences ControlNets are computed."""
    region: Region | None
    """The tokens of steps that are not whole, on the ControlNets' device; None: all tokens."""
    pins: ExitStack
    """Closed when the row is: lets go of its weights."""
    used_s: float = 0.0
    """When it was opened, or last asked for a step."""
    _sums: dict[tuple[Behind, ...], ResidualLayout] = field(default_factory=dict, init=False, repr=False)

    @property
    def tokens(self) -> int:
        """Tokens of the picture."""
        return self.grid[0] * self.grid[1]

    def acting(self, step: int) -> list[ActiveControlNet]:
        """The ControlNets that act in a step."""
        return [net for net in self.nets if net.first <= step < net.end]

    def work(self, step: int) -> float:
        """Multiplications of a step that computes the whole picture."""
        return sum(net.work for net in self.acting(step))

    def sums(self, step: int) -> ResidualLayout:
        """The sums of a step's samples."""
        behind = tuple(net.behind for net in self.acting(step))
        if behind not in self._sums:
            self._sums[behind] = sum_residuals(behind)
        return self._sums[behind]

    def shapes(self, step: int, *, whole: bool) -> tuple[tuple[int, int], ...]:
        """(tokens, channels) of each sum of a step, the sequences one behind the other."""
        tokens = self.tokens if whole or self.region is None else len(self.region.computed)
        return tuple((self.sequences * tokens, self.base.channels[block]) for block in self.sums(step).first)


@dataclass(eq=False)
class _PendingRow:
    """A row that is being opened."""

    ended: asyncio.Event = field(default_factory=asyncio.Event)
    closed: bool = False
    """Whether the row was closed meanwhile."""


class OpenRowTable:
    """Open rows by key, at most `capacity`; a row without a step for `idle_s` is closed.

    It also knows which denoisers may ask for steps. On the event loop, but for what says so.
    """

    def __init__(self, capacity: int, idle_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._capacity, self._idle_s, self._clock = capacity, idle_s, clock
        self._rows: dict[str, OpenRow] = {}
        self._opening: dict[str, _PendingRow] = {}
        self._tokens: dict[str, str] = {}
        """By denoiser."""
        self._changed = asyncio.Event()
        """Set when a row was opened or closed."""
        self._draining = False

    def __len__(self) -> int:
        """Rows that are open, or being opened."""
        return len(self._rows) + len(self._opening)

    def token(self, denoiser: str) -> str:
        """Return what opens the data path to a denoiser: the same while it has rows, and a connection."""
        if denoiser not in self._tokens:
            self._tokens[denoiser] = secrets.token_urlsafe(TOKEN_BYTES)
        return self._tokens[denoiser]

    def admits(self, token: str) -> bool:
        """Return whether a denoiser was given this token. Any thread may ask."""
        return is_known_token(token, tuple(self._tokens.values()))

    def find(self, key: str, token: str) -> OpenRow | None:
        """The row, if it is open to the denoiser with this token, which uses it now. Any thread may ask."""
        row = self._rows.get(key)
        if row is None or not is_known_token(token, (self._tokens.get(row.denoiser, ""),)):
            return None
        row.used_s = self._clock()
        return row

    async def open(self, key: str, denoiser: str, make: Callable[[], Awaitable[OpenRow]]) -> OpenRow:
        """The row of this key: one that is open to this denoiser, else what `make` makes.

        Raises:
            Overloaded: as many rows are open as may be.
            ControlNetUnavailable: this instance stops; or the row was closed while it was being opened.
        """
        while (others := self._opening.get(key)) is not None:
            await others.ended.wait()
        if (kept := self._rows.get(key)) is not None and kept.denoiser == denoiser:
            kept.used_s = self._clock()
            return kept
        if self._draining:
            raise ControlNetUnavailable("This ControlNet instance is stopping.")
        if kept is None and len(self) >= self._capacity:
            raise Overloaded(
                "This ControlNet instance has as many rows open as it may.",
                received=len(self),
                accepted=str(self._capacity),
            )
        self.close(key)
        opening = self._opening[key] = _PendingRow()
        try:
            made = await make()
        finally:
            del self._opening[key]
            opening.ended.set()
            self._changed.set()
        if opening.closed:
            made.pins.close()
            raise ControlNetUnavailable("The row was closed while it was being opened.")
        self._rows[key], made.used_s = made, self._clock()
        self._changed.set()
        return made

    def close(self, key: str) -> bool:
        """Forget a row; whether it was open, or being opened."""
        opening, kept = self._opening.get(key), self._rows.pop(key, None)
        if opening is not None:
            opening.closed = True
        if kept is not None:
            kept.pins.close()
            self._changed.set()
        return kept is not None or opening is not None

    def leave(self, token: str) -> None:
        """The denoiser with this token has no connection any more: it has to open its rows again."""
        for denoiser in [name for name, given in self._tokens.items() if is_known_token(token, (given,))]:
            del self._tokens[denoiser]
            for key in [key for key, kept in self._rows.items() if kept.denoiser == denoiser]:
                log.info("row_left", row=key, denoiser=denoiser)
                self.close(key)

    async def expire(self) -> None:
        """Close rows that have been idle for too long; runs until it is cancelled."""
        while True:
            self._changed.clear()
            now = self._clock()
            for key in [key for key, kept in self._rows.items() if kept.used_s + self._idle_s <= now]:
                log.warning("row_idle", row=key, idle_s=self._idle_s)
                self.close(key)
            due_s = min((kept.used_s for kept in self._rows.values()), default=None)
            with suppress(TimeoutError):
                async with asyncio.timeout(None if due_s is None else due_s + self._idle_s - now):
                    await self._changed.wait()

    async def drained(self) -> None:
        """Open no row any more, and return when none is left."""
        self._draining = True
        while len(self):
            self._changed.clear()
            await self._changed.wait()


async def open_row(request: OpenControl, nets: ResidentControlNets, blobs: BlobStore) -> OpenRow:
    """The row of `request`, whose ControlNets stay loaded until its pins are closed.

    Raises:
        ControlNetNotFound: a ControlNet is not configured here.
        ControlNetMismatch: one does not fit the model, or what it is to see.
        ControlNetUnavailable: one cannot be loaded, or there is no memory for the row.
        IntermediateLost: a claim check is no longer in the blob store.
        SchemaMismatch: the inputs are not those of such a row.
    """
    _check(request, nets)
    steps = len(request.times)
    digests = {
        use.digest
        for use, (first, end) in zip(request.job.controls, request.acting, strict=True)
        if use.scale and max(first, 0) < min(end, steps)
    }
    with ExitStack() as pins:
        nets.count(digests)
        for digest in digests:
            pins.enter_context(nets.tier.pinned(digest))
        images = select_control_images(request.encoding, request.index)
        texts = await intermediate(blobs, request.encoding.text, Intermediate.ENCODING)
        seen = await intermediate(blobs, images, Intermediate.ENCODING)
        loaded = {digest: await nets.loaded(digest) for digest in digests}
        try:
            row = await asyncio.to_thread(_made, request, nets, loaded, texts, seen)
        except ControlMismatch as error:
            raise ControlNetMismatch(str(error), field="controlnets") from error
        except torch.OutOfMemoryError as error:
            raise ControlNetUnavailable("This instance has no memory for another row.") from error
        row.pins.push(pins.pop_all())
        return row


def _check(request: OpenControl, nets: ResidentControlNets) -> None:
    """Raise where a ControlNet is unknown, or where the request's parts do not belong together."""
    uses = request.job.controls
    if missing := [use.model for use in uses if not nets.has(use.digest)]:
        known = ", ".join(card.name for card in nets.cards)
        raise ControlNetNotFound(
            "This instance has no such ControlNet.", field="controlnets", received=missing[0], accepted=known
        )
    if not uses or len(request.acting) != len(uses):
        raise SchemaMismatch(
            "Each ControlNet of a row acts in some steps.",
            field="acting",
            received=len(request.acting),
            accepted=str(len(uses)),
        )
    cells = request.computed
    if cells is not None and (cells.height, cells.width) != request.grid:
        raise SchemaMismatch(
            "The tokens that are asked for are not those of the picture.",
            field="computed",
            received=f"{cells.height}x{cells.width}",
            accepted="x".join(map(str, request.grid)),
        )


@torch.inference_mode()
def _made(
    request: OpenControl,
    nets: ResidentControlNets,
    loaded: Mapping[str, ControlNet],
    texts: bytes,
    seen: bytes,
) -> OpenRow:
    """The row of the ControlNets that act in any step, with empty pins; to be called in a worker thread."""
    told = read_control_texts(tensors.unpack(texts), request.sequences, request.job.parameters.guidance_scale)
    told = tuple(each.mapped(lambda part: part.to(nets.dtype)) for each in told)
    shown = read_control_images(tensors.unpack(seen), len(request.job.controls))
    times = torch.tensor(request.times, dtype=torch.float32)
    region = None if request.computed is None else region_of(request.computed)
    acting: list[ActiveControlNet] = []
    behind: list[Behind] = []
    for nth, (use, (first, end)) in enumerate(zip(request.job.controls, request.acting, strict=True)):
        if not use.scale or max(first, 0) >= min(end, len(request.times)):
            behind.append((None,) * len(request.base.channels))
            continue
        net = loaded[use.digest]
        behind.append(net.behind(request.base))
        opened = net.open(ControlConditions(shown[nth].to(nets.dtype), request.grid, told, times, use.mode))
        tokens = request.grid[0] * request.grid[1]
        work = sum(
            control_work(net.work(request.base), text=len(text.embeds), image=tokens, sequences=len(told))
            for text in told
        )
        acting.append(ActiveControlNet(net, opened, use.scale, behind[-1], first, end, work))
    return OpenRow(
        control_row(request.job.job_id, request.attempt, request.index),
        request.denoiser,
        acting,
        tuple(behind),
        request.base,
        request.grid,
        request.times,
        count_sequences(request.base.kind, len(told)),
        None if region is None else region.on(nets.device),
        ExitStack(),
    )
