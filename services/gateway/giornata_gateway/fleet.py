"""The fleet as the active router tells it, and the stores: small writes try whether they take what an edit writes."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import Final

import nats.errors
import structlog

from giornata.blobs import BlobStore
from giornata.bus.bus import Bus
from giornata.bus.streams import is_full
from giornata.deadlines import Deadline
from giornata.fleet import SILENCE_S
from giornata.wire import codec, subjects
from giornata.wire.adapters import ControlCard
from giornata.wire.errors import (
    BlobStoreFull,
    GiornataError,
    InvalidField,
    ModelNotFound,
    ServiceUnavailable,
    StorageFull,
    TaskNotSupported,
)
from giornata.wire.messages import MaskCard
from giornata.wire.models import ModelCard, Task
from giornata.wire.workers import (
    FleetPage,
    FleetRequest,
    FleetSummary,
    InstanceReport,
    InstanceReports,
    ServiceName,
)

KEPT_S: Final = 0.25
"""How long reports serve all requests of this gateway."""
ANSWER_MS: Final = 2000
"""How long an answer waits for reports."""

NEEDED: Final = (ServiceName.ROUTER, ServiceName.PREPOST, ServiceName.DENOISER)
"""An edit needs one ready instance of each."""


def choose_card(
    cards: Mapping[str, ModelCard],
    name: str | None,
    missing: Iterable[ServiceName],
    task: Task = Task.EDIT,
    aliases: Mapping[str, str] = MappingProxyType({}),
) -> ModelCard:
    """The model that serves a request: the one of `cards` that it names, or the only one that does the `task`.

    A name of `aliases` stands for the model that it leads to, unless a served one has that name. The services that are
    `missing` explain why nothing is served.

    Raises:
        ServiceUnavailable: nothing is served.
        InvalidField: none was named and there are several.
        ModelNotFound: the one named is not served.
        TaskNotSupported: the one named, or every one, does other tasks.
    """
    if not cards:
        lacking = ", ".join(missing) or "a denoiser and a prepost with the same model"
        raise ServiceUnavailable(f"No model is served now; not ready: {lacking}.", retry_after_s=2)
    fitting = {served: card for served, card in cards.items() if task in card.tasks}
    names = ", ".join(sorted(fitting)) or f"no served model can {task}"
    if name is not None:
        name = find_card(name, cards, aliases).name
    if name in fitting:
        return fitting[name]
    if name is not None or not fitting:
        known = ", ".join(
            f"{card.name} ({card.family})" for card in cards.values() if name in {None, card.name}
        )
        raise TaskNotSupported(
            f"{known} cannot {task}.", field="model", received=name or "none", accepted=names
        )
    if len(fitting) > 1:
        raise InvalidField(
            "Several models are served; name one.", field="model", received="none", accepted=names
        )
    return next(iter(fitting.values()))


def find_card(name: str, cards: Mapping[str, ModelCard], aliases: Mapping[str, str]) -> ModelCard:
    """The served model of a name or an alias; ModelNotFound tells all names, and the closest."""
    card = cards.get(name) or cards.get(aliases.get(name, ""))
    if card is not None:
        return card
    leading = {alias: real for alias, real in aliases.items() if real in cards and alias not in cards}
    stand = (f"{alias} (stands for {real})" for alias, real in sorted(leading.items()))
    names = ", ".join([*sorted(cards), *stand]) or "none now"
    closest = get_close_matches(name, [*cards, *leading], n=1)
    stands = f", which stands for {aliases[name]}" if name in aliases else ""
    raise ModelNotFound(
        f"No running worker serves this model{stands}. Served: {names}."
        + (f" The closest is {closest[0]}." if closest else ""),
        field="model",
        received=name,
        accepted=names,
    )


class FleetListener:
    """A listener to the router's summaries of the fleet. The latest stays known while no router leads.

    A router may be away for `bridged_s` without being missed, since submissions are tried again meanwhile. Requests may
    call models by their `aliases`, too.
    """

    def __init__(self, bridged_s: float, aliases: Mapping[str, str] = MappingProxyType({})) -> None:
        self.aliases = aliases
        self._bridged_s = max(bridged_s, SILENCE_S)
        self.heard = asyncio.Event()
        """A router has told."""
        self._summary = FleetSummary(router="", ready={}, models=())
        """The latest; it came at `_heard_s`."""
        self._heard_s = -math.inf
        self._asking = asyncio.Lock()
        self._reports: list[InstanceReport] | None = None
        self._reported_s = -math.inf

    def hear(self, summary: FleetSummary) -> None:
        """Take in a summary of the router that leads."""
        self._summary, self._heard_s = summary, time.monotonic()
        self.heard.set()

    def cards(self) -> dict[str, ModelCard]:
        """Served models by name."""
        return {card.name: card for card in self._summary.models}

    def choose(self, name: str | None, task: Task = Task.EDIT) -> ModelCard:
        """The model that serves a request that names this one, or none; raises as :func:`choose_card`."""
        return choose_card(self.cards(), name, self.missing(), task, self.aliases)

    def controlnets(self) -> dict[str, tuple[ControlCard, ...]]:
        """ControlNets by model."""
        return self._summary.controlnets

    def masks(self) -> dict[str, MaskCard]:
        """Return what makes masks from words, by the model of its prepost."""
        return self._summary.masks

    def serves(self, model: str, digest: str) -> bool:
        """Return whether a model is served with this digest."""
        card = self.cards().get(model)
        return card is not None and card.digest == digest

    def waits_s(self) -> dict[str, float]:
        """About how long a picture would wait for a worker, by model; what is unknown is left out."""
        led = self._led()
        return {model: wait_ms / 1e3 for model, wait_ms in led.wait_ms.items()} if led else {}

    def missing(self) -> list[ServiceName]:
        """Services that an edit needs and that have no ready instance; the router where none leads.

        Without a router the others are unknown. A router that is being replaced is not missed.
        """
        led = self._led()
        if led is None:
            return [ServiceName.ROUTER]
        return [name for name in NEEDED if name is not ServiceName.ROUTER and not led.ready.get(name)]

    def has_another(self, gateway: str) -> bool:
        """Return whether a gateway other than `gateway` takes requests."""
        return any(name != gateway for name in self._summary.gateways)

    def nearly_full(self) -> tuple[str, ...]:
        """JetStream's streams that may soon take nothing more."""
        return self._summary.nearly_full

    async def reports(self, bus: Bus) -> list[InstanceReport] | None:
        """Every live instance; None where no router answers. Requests of the same moment share an answer."""
        async with self._asking:
            if time.monotonic() - self._reported_s > KEPT_S:
                self._reports = await _reports(bus)
                self._reported_s = time.monotonic()
            return self._reports

    def _led(self) -> FleetSummary | None:
        """The latest summary while a router leads, or is soon followed by one that does."""
        return self._summary if time.monotonic() - self._heard_s < self._bridged_s else None


async def _reports(bus: Bus) -> list[InstanceReport] | None:
    deadline = Deadline.after_ms(ANSWER_MS)

    async def page(number: int) -> FleetPage:
        request = FleetRequest(page=number, remaining_ms=deadline.remaining_ms())
        return await bus.call(subjects.FLEET, request, FleetPage, deadline)

    try:
        first = await page(0)
        others = await asyncio.gather(*map(page, range(1, first.pages)))
    except GiornataError:
        return None
    read = (codec.decode(InstanceReports, one.packed).reports for one in (first, *others))
    return [report for reports in read for report in reports]


BLOBS: Final = "blobs"
"""The blob store's name among the streams'."""
KNOWN_S: Final = 3.0
"""The outcome of a trial serves all requests for this long."""
SHOWN_S: Final = 30.0
"""A store is called full for this long without waiting for the next trial, which has begun."""
TRIAL_S: Final = 1.5
"""Limit of one write. A server that cannot store a message does not answer it at all."""
TRIAL_TTL_S: Final = 1
TRIAL_KEY: Final = "writable"
"""All gateways write one blob, again and again: an object store, which forgets nothing by itself, keeps one object."""
TRIAL: Final = bytes(4096)
"""As much as a file system's block: less may still fit into the last one of a file on a full disk."""

log = structlog.get_logger(__name__)


class StorageProbe:
    """Tries to write into the blob store, and into the streams that an edit needs, one at a time."""

    def __init__(
        self,
        bus: Bus,
        blobs: BlobStore,
        *,
        told: Callable[[Mapping[str, bool]], None],
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._bus, self._blobs, self._told, self._tasks = bus, blobs, told, tasks
        self._full: dict[str, GiornataError] = {}
        self._tried_s: float | None = None
        self._trying: asyncio.Task[None] | None = None

    async def full(self, *, afresh: bool = False) -> Mapping[str, GiornataError]:
        """The stores that take nothing now, and why; a store that does not answer at all is not among them."""
        age_s = None if self._tried_s is None else time.monotonic() - self._tried_s
        if age_s is None or age_s > KNOWN_S or afresh:
            if self._trying is None or self._trying.done():
                self._trying = self._tasks.create_task(self._try(), name="storage")
            if afresh or not self._full or age_s is None or age_s > SHOWN_S:
                await asyncio.shield(self._trying)
        return self._full

    async def full_for_jobs(self, *, afresh: bool = False) -> GiornataError | None:
        """Return why JetStream takes no job; None where it does, or is away."""
        full = await self.full(afresh=afresh)
        return next((full[stream] for stream in _TRIALS if stream in full), None)

    async def _try(self) -> None:
        try:
            errors = await asyncio.gather(self._blob(), *map(self._message, _TRIALS))
        except Exception:  # the task's edge: what was known stays
            log.exception("stores_not_tried")
            return
        outcomes = dict(zip((BLOBS, *_TRIALS), errors, strict=True))
        self._full = {name: error for name, error in outcomes.items() if error is not None}
        self._tried_s = time.monotonic()
        self._told({name: error is not None for name, error in outcomes.items()})

    async def _blob(self) -> GiornataError | None:
        try:
            async with asyncio.timeout(TRIAL_S):
                await self._blobs.write(TRIAL_KEY, TRIAL, TRIAL_TTL_S)
        except (BlobStoreFull, StorageFull) as error:
            return error
        except (GiornataError, TimeoutError):  # it does not answer: `/healthz` says so
            pass
        return None

    async def _message(self, stream: str) -> GiornataError | None:
        """Why `stream` takes no message; None also where it has a limit that is reached, or JetStream is away."""
        client, reason = self._bus.client, "it does not answer writes, but other questions"
        try:
            if not client.is_connected or await self._is_stored(stream):
                return None
            # A server that stands still answers nothing; one that cannot write still answers reads.
            await client.jetstream(timeout=TRIAL_S).stream_info(_RECORDS)
            if await self._is_stored(stream) or not client.is_connected:
                return None
        except nats.errors.Error as error:
            if not is_full(error):
                return None
            reason = str(error)
        message = "JetStream does not store what is written. The disk of the NATS server is probably full."
        return StorageFull(message, received=f"{stream}: {reason}", retry_after_s=10)

    async def _is_stored(self, stream: str) -> bool:
        publish, (subject, headers) = self._bus.jetstream.publish, _TRIALS[stream]
        try:
            await publish(subject, TRIAL, timeout=TRIAL_S, headers=headers, msg_ttl=TRIAL_TTL_S)
        except nats.errors.TimeoutError:
            return False
        return True


_RECORDS: Final = subjects.bucket_stream(subjects.RECORDS)
_TRIALS: Final[Mapping[str, tuple[str, dict[str, str] | None]]] = {
    subjects.JOBS: (subjects.TRIAL_JOB, None),
    _RECORDS: (f"$KV.{subjects.RECORDS}.writable", {"KV-Operation": "DEL"}),
}
"""Subject and headers of a message that is stored for a moment, by the streams into which an accepted job is written.
Readers take a record's trial for a deletion."""
