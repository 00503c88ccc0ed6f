"""The denoiser's subscriptions and telemetry: it answers at once whether it takes rows.

:mod:`giornata_denoiser.attempts.attempt` does the rest. The engine runs in a thread of its own; its reports hop to the
event loop, where one task tells them in order.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Final, TypeVar

import structlog

from giornata.blobs import BlobStore
from giornata.bus.bus import Bus, Endpoint, publish_state, state_of, telemetry
from giornata.bus.connection import read_just_made
from giornata.planning.cost_model import CostModel, Profile
from giornata.records import JobRecordStore, TemplateRecords
from giornata.scheduling.batch import RowKey
from giornata.wire import subjects
from giornata.wire.controlnets import ControlBase
from giornata.wire.errors import InternalError
from giornata.wire.messages import (
    CancelRows,
    PrefetchTemplate,
    RecordRequest,
    RemoveTemplate,
    RunAnswer,
    RunReply,
    RunRequest,
)
from giornata.wire.values import BlockMode
from giornata.wire.workers import (
    AdapterCounters,
    AdapterLoad,
    HostDevice,
    LoadSample,
    RankState,
    RowProgress,
    ServiceName,
    ServiceState,
    StepCacheCounters,
    StepSample,
    TemplateCounters,
    Tier,
    WorkerState,
)
from giornata_denoiser.attempts.attempt import (
    AttemptInputs,
    AttemptResultWriter,
    AttemptRunner,
    EpochFence,
    EventPublisher,
)
from giornata_denoiser.attempts.inputs import TemplateLookup, adapters_of, rows_of
from giornata_denoiser.checkpoint import Checkpoint
from giornata_denoiser.config import DenoiserConfig, TextReusePolicy
from giornata_denoiser.controls.controlnets import DenoiserControlNets, control_room, controls_of, open_rows
from giornata_denoiser.engine.engine import EngineLoop
from giornata_denoiser.engine.model_runner import StepReport
from giornata_denoiser.engine.step_budget import renew_steps
from giornata_denoiser.loras import LoraTiers, hold_loras, tier_in, tiers_of
from giornata_denoiser.pool.leader import DevicePool, pool_of
from giornata_denoiser.pool.ranks import RankSupervisor
from giornata_denoiser.pool.shared_memory import Arena
from giornata_denoiser.pool.state import shared_memory
from giornata_denoiser.startup import engine_of
from giornata_denoiser.templates.runs import TemplateRegistrations, TemplateRuns, form_of
from giornata_denoiser.templates.store import ORDINARY, PINNED, HostMemory, TemplateStore

Sample = TypeVar("Sample", StepSample, LoadSample, AdapterLoad)

MAX_SAMPLES: Final = 16
"""Step and load samples that one telemetry message carries."""


class Reporter:
    """Gathers what happens between two messages. Loads may be added in any thread."""

    def __init__(
        self, config: DenoiserConfig, checkpoint: Checkpoint, profile: Profile, costs: CostModel
    ) -> None:
        self._config, self._costs = config, costs
        self._told_of_costs = {
            "device": profile.device,
            "reused": BlockMode(form_of(config, checkpoint.family)),
            "renewed_every": renew_steps(config.renew_steps, checkpoint.family),
            "keeps_padding": config.reuse_text is TextReusePolicy.PADDING,
        }
        self._blocks = checkpoint.family.operations.specs
        self._samples: deque[StepSample] = deque(maxlen=MAX_SAMPLES)
        self._loads: deque[LoadSample] = deque(maxlen=MAX_SAMPLES)
        self._adapter_loads: deque[AdapterLoad] = deque(maxlen=MAX_SAMPLES)
        self._steps_total = 0
        self._cached = StepCacheCounters()
        self._late = 0
        """Rows that made their first step without their LoRAs, since these were not loaded."""

    def stepped(self, report: StepReport) -> None:
        """A step has ended."""
        self._steps_total += len(report.advanced)
        begun = (row.adapters for row in report.advanced if row.step == 1)
        self._late += sum(adapters.loras_from > 0 and adapters.joins_early for adapters in begun)
        self._cached = StepCacheCounters(
            computed_blocks=self._cached.computed_blocks + report.cached.computed_blocks,
            skipped_blocks=self._cached.skipped_blocks + report.cached.skipped_blocks,
        )
        if report.sample is not None:
            self._samples.append(report.sample)

    def loaded(self, load: LoadSample) -> None:
        """A load has ended."""
        self._loads.append(load)

    def adapter_loaded(self, load: AdapterLoad) -> None:
        """A hop of a LoRA has ended."""
        self._adapter_loads.append(load)

    def state(
        self,
        running: Iterable[RowKey],
        rows: Iterable[RowProgress],
        *,
        stepping_ms: float,
        templates: TemplateCounters,
        resident: dict[Tier, tuple[str, ...]],
        adapters: AdapterCounters,
        adapters_resident: dict[Tier, tuple[str, ...]],
        lora_host: str | None = None,
        controlled: ControlBase | None = None,
        ranks: tuple[RankState, ...] = (),
    ) -> WorkerState:
        """The next message; samples are told once.

        `running` are the rows in the batch, as of the engine's last step; `rows` are those of all accepted attempts,
        until they are reported: the router takes unlisted rows for lost. `stepping_ms` counts from the beginning of
        the step that is being computed.
        """
        joined = set(running)
        told = [(row, RowKey(row.job_id, row.attempt, row.index) in joined) for row in rows]
        return WorkerState(
            capacity_rows=self._config.capacity_rows,
            capacity_tokens=self._config.capacity_tokens,
            running=tuple(row for row, here in told if here),
            waiting=tuple(row for row, here in told if not here),
            steps_total=self._steps_total,
            stepping_ms=stepping_ms,
            templates=templates,
            resident=resident,
            adapters=adapters.model_copy(update={"late": self._late}),
            adapters_resident=adapters_resident,
            lora_host=lora_host,
            samples=_taken(self._samples),
            loads=_taken(self._loads),
            adapter_loads=_taken(self._adapter_loads),
            adapter_lanes=self._config.lora_loads,
            blocks=self._blocks,
            controlled=controlled,
            ranks=ranks,
            step_cache=self._cached,
            quantized=self._config.quantize,
            cost_model=self._costs.state.model_copy(update=self._told_of_costs),
        )


def _taken(samples: deque[Sample]) -> tuple[Sample, ...]:
    return tuple(samples.popleft() for _ in range(len(samples)))


HAND_BACK_S: Final = 10.0
"""Time to write unfinished rows down, beyond the configured time to drain."""

log = structlog.get_logger(__name__)


class Denoiser:
    """One instance with one model; `costs` follow what its steps and loads take, from what the profile says.

    With `ranks` it is the leader of a pool: these have loaded the model, and its own `checkpoint` is an outline.
    `gpus` are told.
    """

    _engine: EngineLoop | DevicePool
    _loras: LoraTiers
    _carrier: AttemptRunner
    _store: TemplateStore
    _runs: TemplateRuns
    _lookup: TemplateLookup

    def __init__(
        self,
        config: DenoiserConfig,
        bus: Bus,
        blobs: BlobStore,
        records: JobRecordStore,
        checkpoint: Checkpoint,
        *,
        profile: Profile,
        costs: CostModel,
        ranks: RankSupervisor | None = None,
        gpus: tuple[HostDevice, ...] = (),
    ) -> None:
        self._ranks, self._arena, self._gpus = ranks, Arena(), gpus
        self._controls: DenoiserControlNets | None = None
        self._config, self._bus, self._blobs, self._checkpoint = config, bus, blobs, checkpoint
        self._profile, self._costs = profile, costs
        self._outcomes = AttemptResultWriter(blobs, records, config.instance)
        self._reports: asyncio.Queue[StepReport] = asyncio.Queue()
        self._telling = EventPublisher(bus)
        self._reporter = Reporter(config, checkpoint, profile, self._costs)
        self._epochs = EpochFence()
        self._draining = False
        self._crash: Exception | None = None

    async def run(self, stop: asyncio.Event) -> None:
        """Take rows and tell of this instance until `stop`; then finish or hand back what is here.

        Raises:
            ExceptionGroup: of an InternalError, when the engine has lost its device.
        """
        config, bus = self._config, self._bus
        templates = await read_just_made(partial(TemplateRecords.open, bus.jetstream))
        registrations = TemplateRegistrations(templates, config.instance)
        async with AsyncExitStack() as stack:
            network, told = self._checkpoint.family.network, self._reporter.adapter_loaded
            self._loras = stack.enter_context(tiers_of(config, bus, network, told))
            room = control_room(
                config, bus, self._checkpoint, self._costs, self._resume, pooled=self._ranks is not None
            )
            self._controls = await stack.enter_async_context(room)
            self._engine = await self._opened_engine(stack, stop)
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            self._make_rooms(registrations, tasks)
            stack.callback(self._runs.close)
            stack.callback(tasks.create_task(self._relay(), name="relay").cancel)
            stack.callback(tasks.create_task(self._telling.shown(), name="show").cancel)
            await self._hear(stack)
            await stack.enter_async_context(telemetry(bus, config.telemetry_hz, self._state))
            log.info("ready", model=self._checkpoint.card.name, digest=self._checkpoint.card.digest[:12])
            await stop.wait()
            await self._drain()

    async def _hear(self, stack: AsyncExitStack) -> None:
        """Subscribe to cancels first, so that accepted rows can be cancelled."""
        bus, instance = self._bus, self._config.instance
        for listening in (
            bus.listen(subjects.worker(instance, "cancel"), CancelRows, self._drop),
            bus.listen(subjects.ALL_CANCELS, CancelRows, lambda m: self._carrier.drop_job(m.job_id)),
            bus.listen(subjects.worker(instance, "prefetch"), PrefetchTemplate, self._prefetch),
            bus.listen(subjects.TEMPLATE_REMOVED, RemoveTemplate, self._runs.remove),
            bus.answer(
                Endpoint(subjects.worker(instance, "run"), RunRequest, self._run_rows),
                Endpoint(subjects.worker(instance, "record"), RecordRequest, self._record),
            ),
        ):
            await stack.enter_async_context(listening)

    async def _opened_engine(self, stack: AsyncExitStack, stop: asyncio.Event) -> EngineLoop | DevicePool:
        """What computes rows: this process, or the ranks of a pool. It ends with `stack`, and a pool in a thread."""
        loop = asyncio.get_running_loop()

        def crashed(error: Exception) -> None:
            self._crash = error
            stop.set()

        def on_report(report: StepReport) -> None:
            loop.call_soon_threadsafe(self._reports.put_nowait, report)

        def on_crash(error: Exception) -> None:
            loop.call_soon_threadsafe(crashed, error)

        config, checkpoint = self._config, self._checkpoint
        if self._ranks is not None:
            pool = pool_of(
                config,
                self._ranks,
                self._arena,
                checkpoint,
                self._costs,
                on_report,
                on_crash,
                self._loras,
                None if self._controls is None else self._controls.pool,
            )
            return await stack.enter_async_context(pool)
        engine = engine_of(
            config,
            checkpoint,
            self._profile,
            self._costs,
            told=self._reporter.loaded,
            low_ranks=self._loras,
            controls=controls_of(self._controls),
        )
        return stack.enter_context(EngineLoop(stack.enter_context(engine), on_report, on_crash))

    def _make_rooms(self, registrations: TemplateRegistrations, tasks: asyncio.TaskGroup) -> None:
        config, checkpoint = self._config, self._checkpoint
        self._store = TemplateStore(
            config.template_memory_mb << 20,
            config.template_folder,
            config.cache_disk_mb << 20,
            corrections_bytes=config.template_corrections_mb << 20,
            first_bytes=config.template_first_mb << 20,
            host=self._host(),
            told=self._reporter.loaded,
        )
        self._runs = TemplateRuns(
            config,
            checkpoint,
            self._blobs,
            self._store,
            engine=self._engine,
            registrations=registrations,
            tasks=tasks,
        )
        self._lookup = TemplateLookup(
            config,
            checkpoint,
            self._store,
            runs=self._runs,
            registrations=registrations,
            costs=lambda: self._costs.costs,
            tasks=tasks,
        )
        self._carrier = AttemptRunner(
            config.instance,
            capacity_rows=config.capacity_rows,
            engine=self._engine,
            fetch=self._fetch,
            outcomes=self._outcomes,
            publish=self._telling.publish,
            tasks=tasks,
        )

    @asynccontextmanager
    async def _fetch(self, request: RunRequest) -> AsyncIterator[AttemptInputs]:
        async with self._lookup.held(request) as reusing:
            rows = await rows_of(request, self._checkpoint, self._blobs, reusing)
            async with (
                hold_loras(self._loras, rows) as arriving,
                open_rows(self._controls, request, rows) as kept,
            ):
                yield AttemptInputs(kept.rows, arriving, kept.failed)

    def _host(self) -> HostMemory:
        """Return where templates are to lie: ranks map them, a GPU of this process reads pinned ones."""
        if self._ranks is not None:
            return shared_memory(self._arena)
        return PINNED if self._checkpoint.family.device.type == "cuda" else ORDINARY

    def _resume(self, job_id: str, attempt: int) -> None:
        """An attempt's ControlNets can be asked for, or are computed here after all."""
        self._engine.resume(job_id, attempt)

    async def _run_rows(self, request: RunRequest) -> RunReply:
        """Endpoint ``giornata.worker.<worker>.run``."""
        if not self._obeys(request):
            return RunReply(answer=RunAnswer.STALE)
        request.job.check_model(self._checkpoint.card)
        return RunReply(answer=self._carrier.take(request))

    async def _record(self, request: RecordRequest) -> RunReply:
        """Endpoint ``giornata.worker.<worker>.record``: a template run takes no place of an edit's."""
        if not self._obeys(request):
            return RunReply(answer=RunAnswer.STALE)
        request.template.check_model(self._checkpoint.card)
        if self._draining:
            return RunReply(answer=RunAnswer.DRAINING)
        await self._runs.record(request)
        return RunReply(answer=RunAnswer.ACCEPTED)

    def _drop(self, message: CancelRows) -> None:
        """Subject ``giornata.worker.<worker>.cancel``."""
        if self._obeys(message):
            end = self._carrier.hand_back if message.hand_back else self._carrier.drop
            end((message.job_id, message.attempt))

    def _prefetch(self, message: PrefetchTemplate) -> None:
        """Subject ``giornata.worker.<worker>.prefetch``."""
        if self._obeys(message):
            self._lookup.prefetch(message)
            self._loras.prefetch(adapters_of(message.job, steps=1).loras)

    def _obeys(self, message: RunRequest | RecordRequest | CancelRows | PrefetchTemplate) -> bool:
        obeys = self._epochs.admits(message.epoch)
        if not obeys:
            log.warning("router_superseded", kind=type(message).__name__, epoch=message.epoch)
        return obeys

    async def _relay(self) -> None:
        """Tell what the engine did, in order; runs until it is cancelled."""
        while True:
            report = await self._reports.get()
            self._reporter.stepped(report)
            self._runs.advance(report)
            self._lookup.learn(report.advanced)
            carried = [(self._carrier.attempt_of(preview.key), preview) for preview in report.previews]
            await self._carrier.advance(report)
            for attempt, preview in carried:
                if attempt is not None:
                    self._telling.show(attempt.request, preview)

    async def _drain(self) -> None:
        if self._crash is not None:
            raise InternalError("The engine has lost its device.") from self._crash
        self._draining = True
        log.info("draining")
        if self._bus.client.is_connected:
            await publish_state(self._bus, self._state())
        await self._carrier.drain(self._config.drain_s, HAND_BACK_S)
        log.info("drained")

    def _state(self) -> ServiceState:
        engine, now = self._engine.state(), time.perf_counter()
        worker = self._reporter.state(
            [row.key for row in engine.running],
            [row for attempt in self._carrier.attempts for row in attempt.progress(now)],
            stepping_ms=0.0 if engine.began_s is None else (now - engine.began_s) * 1e3,
            templates=self._runs.counters(),
            resident=self._store.resident(),
            adapters=self._loras.counted().model_copy(update={"paused": self._engine.paused}),
            adapters_resident=self._loras.resident(),
            lora_host=tier_in(self._config.lora_host_folder),
            controlled=None if self._controls is None else self._controls.base,
            ranks=self._engine.ranks() if isinstance(self._engine, DevicePool) else (),
        )
        return state_of(
            ServiceName.DENOISER,
            self._config,
            draining=self._draining,
            models=(self._checkpoint.card,),
            controlnets=tuple(self._checkpoint.control_cards.values()),
            worker=worker,
            gpus=self._gpus,
        )
