"""Reports of the fleet to gateways, from telemetry: a summary, and a report of each instance.

A figure that does not follow from recent telemetry is None, which is shown as *unknown*.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter
from statistics import median
from types import MappingProxyType
from typing import Final

import nats.errors
import structlog

from giornata.bus.bus import Bus
from giornata.fleet import Fleet, served_models
from giornata.scheduling.adapters import is_control_of
from giornata.wire import codec, subjects
from giornata.wire.adapters import ControlCard
from giornata.wire.errors import MalformedMessage
from giornata.wire.messages import MaskCard
from giornata.wire.models import ModelCard
from giornata.wire.workers import (
    FleetPage,
    FleetRequest,
    FleetSummary,
    InstanceReport,
    InstanceReports,
    ServiceName,
    ServiceState,
)
from giornata_router.leadership import Leadership

WINDOW_S: Final = 5.0
"""Steps per second are counted over this long."""
SHORTEST_S: Final = 0.5
"""Over less than this, a count says nothing."""
SAMPLES_S: Final = 60.0
"""Step times older than this say nothing about the next step."""
MAX_SAMPLES: Final = 128
_UNFELT_MS: Final = 10.0


@dataclass
class _WorkerTelemetry:
    """The telemetry of one worker."""

    totals: deque[tuple[float, int]] = field(default_factory=deque)
    """(when, row steps since its start)."""
    samples: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES))
    """(when, milliseconds of one engine step)."""


class StepRates:
    """The latest speed of each worker; feed it every telemetry message.

    A restarted worker has another instance name, so that its figures begin with it.
    """

    def __init__(self) -> None:
        self._seen: defaultdict[str, _WorkerTelemetry] = defaultdict(_WorkerTelemetry)

    def observe(self, state: ServiceState, now: float) -> None:
        """Take in one telemetry message, at `now` seconds of any monotonic clock."""
        if state.worker is None:
            return
        seen = self._seen[state.instance]
        seen.totals.append((now, state.worker.steps_total))
        while len(seen.totals) > 2 and seen.totals[1][0] <= now - WINDOW_S:
            seen.totals.popleft()
        seen.samples.extend((now, sample.step_ms) for sample in state.worker.samples if sample.rows)

    def keep(self, instances: Collection[str]) -> None:
        """Forget all workers but these."""
        for gone in self._seen.keys() - set(instances):
            del self._seen[gone]

    def steps_per_s(self, instance: str) -> float | None:
        """Row steps per second over the last :data:`WINDOW_S`; None when it was not heard for long enough."""
        seen = self._seen.get(instance)
        if seen is None:
            return None
        (first_s, first), (last_s, last) = seen.totals[0], seen.totals[-1]
        return (last - first) / (last_s - first_s) if last_s - first_s >= SHORTEST_S else None

    def step_ms(self, instance: str, now: float) -> float | None:
        """Median time of an engine step, in which every running row advances by one; None without recent ones."""
        seen = self._seen.get(instance)
        recent = [] if seen is None else [ms for when, ms in seen.samples if now - when <= SAMPLES_S]
        return median(recent) if recent else None


def coarse(milliseconds: float) -> float:
    """A wait in two digits, so that it is told again only where it has changed."""
    if milliseconds < _UNFELT_MS:
        return 0.0
    return round(milliseconds, 1 - math.floor(math.log10(milliseconds)))


def summary(
    router: str,
    states: Sequence[ServiceState],
    wait_ms: Mapping[str, float] = MappingProxyType({}),
) -> FleetSummary:
    """Return what an edit can be done with now, by the latest telemetry of every live instance; `router` leads.

    `wait_ms` tells how long a picture would wait for a worker, by model.
    """
    taking = [state for state in states if state.ready and not state.draining]
    ready = Counter(state.service for state in taking)
    gateways = (state.instance for state in taking if state.service is ServiceName.GATEWAY)
    rooms = (room for state in taking if state.instance == router for room in state.stores or ())
    models = tuple(card for _, card in sorted(served_models(states).items()))
    return FleetSummary(
        router=router,
        ready=dict(sorted(ready.items())),
        gateways=tuple(islice(gateways, 2)),
        models=models,
        controlnets=_controlnets(models, taking),
        masks=_masks(taking),
        wait_ms={model: coarse(wait) for model, wait in sorted(wait_ms.items())},
        nearly_full=tuple(room.store for room in rooms if room.nearly_full),
    )


def _masks(states: Iterable[ServiceState]) -> dict[str, MaskCard]:
    """Return what makes masks from words, by the model of the prepost that has it; of several, the first by name."""
    serving = [(card.name, state.masks) for state in states if state.masks for card in state.models]
    found: dict[str, MaskCard] = {}
    for model, card in sorted(serving, key=lambda one: (one[0], one[1].name)):
        found.setdefault(model, card)
    return found


def _controlnets(
    models: Iterable[ModelCard], states: Sequence[ServiceState]
) -> dict[str, tuple[ControlCard, ...]]:
    """ControlNets that the denoisers among `states` have, or that instances of the service compute for them, by model.

    Of several with one name, that of the first digest.
    """
    offered = [card for state in states if state.control is not None for card in state.controlnets]
    found: dict[str, tuple[ControlCard, ...]] = {}
    for model in models:
        denoisers = [
            state
            for state in states
            if state.service is ServiceName.DENOISER
            and any((one.name, one.digest) == (model.name, model.digest) for one in state.models)
        ]
        bases = [s.worker.controlled for s in denoisers if s.worker is not None and s.worker.controlled]
        cards = [card for state in denoisers for card in state.controlnets]
        cards += [card for card in offered if any(is_control_of(card, base) for base in bases)]
        by_name: dict[str, ControlCard] = {}
        for card in sorted(cards, key=attrgetter("name", "digest")):
            by_name.setdefault(card.name, card)
        if by_name:
            found[model.name] = tuple(by_name.values())
    return found


def report(state: ServiceState, rates: StepRates, now: float) -> InstanceReport:
    """One instance; `rates` was fed its telemetry, by the clock of `now`."""
    worker = state.worker
    if worker is None:
        tier = state.host_tier and state.host_tier.model_copy(update={"changes": ()})
        return InstanceReport(state=state.model_copy(update={"host_tier": tier}))
    bare = worker.model_copy(
        update={"running": (), "waiting": (), "samples": (), "loads": (), "resident": None}
    )
    return InstanceReport(
        state=state.model_copy(update={"worker": bare}),
        running_rows=len(worker.running),
        waiting_rows=len(worker.waiting),
        steps_per_s=rates.steps_per_s(state.instance),
        step_ms=rates.step_ms(state.instance, now),
    )


PERIOD_S: Final = 0.25
"""Least time between two summaries."""
HEARTBEAT_S: Final = 1.0
"""Time after which an unchanged summary is told again."""
KEPT_S: Final = 0.5
"""How long the pages of reports serve everyone who asks."""
PAGE: Final = 100
"""Instances of a page: it stays well below the limit of a control message."""

log = structlog.get_logger(__name__)


class FleetReporter:
    """The active router's reports of its fleet; a standby only listens."""

    def __init__(self, bus: Bus, fleet: Fleet, instance: str) -> None:
        self._bus, self._fleet, self._instance = bus, fleet, instance
        self.rates = StepRates()
        self._pages: list[bytes] = []
        self._paged_s = -math.inf

    async def tell(self, leadership: Leadership, waits: Callable[[], Mapping[str, float]]) -> None:
        """Publish the summary on change and every second, for ever, but not once the lease has ended.

        `waits` tells how long a picture would wait, in milliseconds, by model.
        """
        told: FleetSummary | None = None
        told_s = -math.inf
        while True:
            now = time.monotonic()
            present = summary(self._instance, self._fleet.all(), waits())
            if leadership.leads and (present != told or now - told_s >= HEARTBEAT_S):
                try:
                    await self._bus.publish(subjects.SUMMARY, present)
                    told, told_s = present, now
                except nats.errors.Error as error:
                    log.warning("summary_not_published", error=repr(error))
            await asyncio.sleep(PERIOD_S)  # the rate of the summary, not a poll

    async def page(self, request: FleetRequest) -> FleetPage:
        """Endpoint ``giornata.router.fleet``.

        Raises:
            MalformedMessage: there is no such page.
        """
        now = time.monotonic()
        if now - self._paged_s > KEPT_S:
            reports = [report(state, self.rates, now) for state in self._fleet.all()]
            self._pages = [
                codec.encode(InstanceReports(reports=tuple(reports[first : first + PAGE])))
                for first in range(0, max(1, len(reports)), PAGE)
            ]
            self._paged_s = now
        if not 0 <= request.page < len(self._pages):
            raise MalformedMessage(received=request.page, accepted=f"a page from 0 to {len(self._pages) - 1}")
        return FleetPage(pages=len(self._pages), packed=self._pages[request.page])
