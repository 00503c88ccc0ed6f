"""The telemetry of an instance, 2-4 times a second. Silence means death."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Final

from pydantic import Field

from giornata.wire import codec
from giornata.wire.adapters import ControlCard
from giornata.wire.controlnets import ControlBase, ControlState
from giornata.wire.loras import HostTier, LoraCounters
from giornata.wire.messages import MaskCard
from giornata.wire.models import BlockSpec, ModelCard
from giornata.wire.values import BlockMode, WireModel


class HostDevice(WireModel):
    """A GPU of a host."""

    device: str
    """As the process saw it before it took its own alone: ``cuda:3``."""
    id: str
    """What names it on the host, whoever looks: ``GPU-8f7d4a5c-…``."""
    claimed: bool = False
    """Whether the instance has claimed it; others may use one that is not."""


class CostFit(WireModel):
    """A worker's linear cost model; see :mod:`giornata.planning.cost_model`."""

    weights: tuple[float, ...]
    """ms per unit; of computing, by :data:`giornata.planning.operations.NETWORK`."""
    adapting: tuple[float, ...] = ()
    """By :data:`giornata.planning.operations.ADAPTING`; empty of loads."""
    r2: float
    """Over the worker's latest samples; the first fit's, while they are too few."""
    residual_ms: float
    """Median of absolute residuals over the same samples."""
    samples: int
    outliers: int


class ModelDeviceCosts(WireModel):
    """The router's regressions for all workers of one model and device."""

    model_digest: str
    device: str
    compute: CostFit
    load: CostFit


class QueueState(WireModel):
    """Telemetry of the active router: the jobs that wait for a worker."""

    jobs: int = 0
    """Jobs that no worker has taken: in the queue, and prepared."""
    rows: int = 0
    steps: int = 0
    full: bool = False
    """As many jobs of a priority are accepted as may be: more of them are refused."""
    unreadable: int = 0
    """Messages in the work queue that this router cannot read."""
    wait_ms: float | None = None
    """Time until the denoising of one more picture would begin. None: unknown, since no worker's speed is, or several
    models are served.
    """
    costs: tuple[ModelDeviceCosts, ...] = ()


class StoreRoom(WireModel):
    """The fill level of one of JetStream's streams."""

    store: str
    used_bytes: int
    limit_bytes: int

    @property
    def nearly_full(self) -> bool:
        """Return whether an operator should look at it: it holds four fifths of what it may."""
        return 5 * self.used_bytes >= 4 * self.limit_bytes


class ServiceName(StrEnum):
    """The six services, as they are called in subjects and distributions."""

    GATEWAY = "gateway"
    ROUTER = "router"
    PREPOST = "prepost"
    DENOISER = "denoiser"
    CONTROLNET = "controlnet"
    LORA_STORE = "lora-store"


class Tier(StrEnum):
    """The tier in which a worker has a template or an adapter."""

    DEVICE = "device"
    """Adapters alone: on the device, where rows use them."""
    MEMORY = "memory"
    DISK = "disk"


class RowProgress(WireModel):
    """A row that a worker has."""

    job_id: str
    attempt: int
    index: int
    step: int
    """Steps computed; 0 while it waits."""
    steps: int
    tokens: int
    computed_tokens: int | None = None
    """Image tokens that its next step computes, unless that is its first; None: all."""
    text_tokens: int = 0
    """Text tokens of one sequence that pass the network's blocks; 0 where they only are attended to."""
    padding_tokens: int = 0
    """Part of `text_tokens` that its steps take and do not compute, the first one and steps in full aside."""
    prefix_tokens: int = 0
    """Beside these, those of one sequence that its first step here computes, and that each attends to."""
    sequences: int = 1
    """2 with true classifier-free guidance."""
    begun: bool = False
    """Whether the row has made a step here; the first step of an edit that reuses is computed in full."""
    renewed_every: int = 0
    """Without a template: one step in so many is computed in full; 0 for a row with one, or that computes all so."""
    companion_tokens: int = 0
    """Tokens beside the picture's, which steps in full compute."""
    low_rank: float = 0.0
    """Weights in the factors of the LoRAs that act in its next step."""
    control: float = 0.0
    """Multiplications of ControlNets in this process that its next step takes, of one sequence."""
    skipped_steps: int = 0
    """Steps still to come that a step cache extrapolates."""
    degree: int = 0
    """Devices of the worker that computed its last step together, or compute its present one; 0 before the first."""
    due_ms: float | None = None
    """Time left until its last step should end; negative once that has passed. None for no wish."""
    encoded: bool | None = None
    """Whether its inputs are here, which tell its shape; None: it has text tokens."""

    @property
    def shape_known(self) -> bool:
        """Return whether the fields that tell its shape are those of its inputs."""
        return self.text_tokens > 0 if self.encoded is None else self.encoded


class StepSample(WireModel):
    """One engine step: what it computed and how long it took. The router fits its regressions to these.

    Tokens and pairs are means over the network's blocks, of all sequences together.
    """

    rows: int
    degree: int = 1
    halves: bool = False
    """Whether one of two devices computed the unconditional sequences."""
    sequences: int
    """Rows, counted twice where true classifier-free guidance runs a negative branch."""
    image_tokens: int
    """Computed image tokens, on average over blocks; the others are taken from recordings."""
    text_tokens: int
    """Computed text tokens; padding that is kept from step to step is not among them."""
    projected_tokens: int = 0
    """Tokens whose keys and values are projected again, on average over blocks."""
    attention_pairs: int
    """Sum over sequences of their computed tokens times all of their tokens, on average over blocks."""
    calls: int = 1
    """Forwards of the network. This, `sequences` and the next seven are the features of a step,
    :data:`giornata.planning.operations.COMPUTE`."""
    linear: float = 0.0
    """Multiplications of linear layers, in all blocks; as in the next three, of all sequences together."""
    attention: float = 0.0
    convolution: float = 0.0
    gathered: float = 0.0
    """Values that tiles gather from their neighbours."""
    low_rank: float = 0.0
    segments: int = 0
    """Sets of LoRAs that differ."""
    control: float = 0.0
    blocks: int = 0
    skipped_blocks: int = 0
    """Blocks that step caches stood in for: all of rows whose outputs were extrapolated. Nothing else of this sample
    counts them."""
    loaded_bytes: int = 0
    """Bytes of recordings that were loaded while the step ran or waited."""
    assemble_ms: float
    step_ms: float
    """The whole step, assembly included, without the time that it waited for ControlNets."""
    waited_ms: float = 0.0
    """Time within the step that it waited for loads."""
    controls_waited_ms: float = 0.0
    """Time that it waited for what ControlNet instances compute."""
    predicted_ms: float = 0.0
    reusing_ms: float = 0.0
    """The part of the prediction that reusing rows compute at the least: what their masks touch, in every block."""
    excess_ms: float = 0.0
    """The part of the prediction beyond the least of all rows: loads that do not hide behind computing, computing
    instead of loads, and steps without a recorded entry."""


class LoadSample(WireModel):
    """The load of a recording, or of a part, from one tier to the next. The router fits its regressions to these."""

    tier: Tier
    size_bytes: int
    load_ms: float


class AdapterLoad(WireModel):
    """One hop of a LoRA, or of a set of them: into memory, or onto the device from there.

    The router learns from these how long the LoRAs of other jobs take to arrive.
    """

    source: Tier | None = None
    """Where it came from; None: the LoRA store."""
    size_bytes: int
    load_ms: float


class DegreeCosts(WireModel):
    """The cost of steps that several devices compute together."""

    degree: int
    halves: bool = False
    """One of two devices computes the unconditional sequences."""
    compute: CostFit


class WorkerCosts(WireModel):
    """The cost of a worker's steps and loads, as the worker sees it now."""

    compute: CostFit
    load: CostFit
    """By :data:`giornata.planning.operations.COMPUTE` and :data:`giornata.planning.operations.LOAD`."""
    degrees: tuple[DegreeCosts, ...] = ()
    """What steps on several devices cost; empty for one device. A degree that is not here is not used."""
    device: str = ""
    """Torch's name of it; workers of one model and device share regressions at the router."""
    reused: BlockMode = BlockMode.KV
    """How edits take from recordings here."""
    renewed_every: int = 0
    """Edits without a recording compute one step in so many in full here, or more; 0: all."""
    keeps_padding: bool = False
    """Whether steps of edits that reuse take what an earlier one made of their prompts' padding."""


class TemplateCounters(WireModel):
    """Counts of a denoiser's template runs since its start, and their size now."""

    hits_memory: int = 0
    hits_disk: int = 0
    """Read from disk, by the edit or ahead of it."""
    hits_first: int = 0
    """Edits that found what an earlier one of the picture had left, and no recording."""
    misses: int = 0
    prefetched: int = 0
    """Recordings that were read from disk ahead of their edits."""
    evicted_memory: int = 0
    evicted_disk: int = 0
    recorded: int = 0
    failed: int = 0
    memory_bytes: int = 0
    disk_bytes: int = 0
    corrected: int = 0
    """Rows that were given the correction of an earlier edit, and have no step to compute in full."""
    corrections_bytes: int = 0
    first: int = 0
    """Pictures of which an edit has left what serves the next ones."""
    first_bytes: int = 0


class AdapterCounters(WireModel):
    """Counts of a denoiser's LoRAs since its start, and their size now."""

    hits_device: int = 0
    hits_memory: int = 0
    hits_disk: int = 0
    misses: int = 0
    """Rows whose LoRA had to come from the LoRA store."""
    prefetched: int = 0
    evicted_device: int = 0
    evicted_memory: int = 0
    evicted_disk: int = 0
    failed: int = 0
    paused: int = 0
    """Rows that waited for a LoRA while others went on."""
    late: int = 0
    """Rows that began without theirs."""
    device_bytes: int = 0
    memory_bytes: int = 0
    memory_limit_bytes: int = 0
    """Most bytes of unpinned LoRAs in memory."""
    disk_bytes: int = 0
    waited_ms: float = 0.0
    """Time that loads for rows took, together."""


class RankPhase(StrEnum):
    """The present activity of a rank of a pool."""

    LOADING = "loading"
    """Its model; also after it was lost and started again."""
    READY = "ready"
    LOST = "lost"
    """Its process ended or was ended; another one is not there yet."""


class RankState(WireModel):
    """One device of a worker that has several."""

    device: str
    """As configured: ``cuda:0``."""
    phase: RankPhase
    busy: bool = False
    starts: int = 1


class StepCacheCounters(WireModel):
    """Counts of rows with step caches since the worker's start."""

    computed_blocks: int = 0
    """Blocks that their sequences passed."""
    skipped_blocks: int = 0
    """Blocks that caches stood in for."""


class WorkerState(WireModel):
    """Telemetry of a denoiser."""

    capacity_rows: int
    capacity_tokens: int
    running: tuple[RowProgress, ...] = ()
    waiting: tuple[RowProgress, ...] = ()
    steps_total: int = 0
    stepping_ms: float = 0.0
    """Time since the present step began; 0 between steps."""
    templates: TemplateCounters | None = None
    resident: dict[Tier, tuple[str, ...]] | None = None
    """Ids (:func:`giornata.wire.jobs.picture_id`) of pictures with a recording here, at most 256 a tier, the last
    used first. None: as the worker told last; telemetry has them when they change, and every few seconds
    (:mod:`giornata.bus.bus`).
    """
    adapters: AdapterCounters | None = None
    adapters_resident: dict[Tier, tuple[str, ...]] | None = None
    """sha-256 of canonical files of LoRAs that are here, as `resident`."""
    samples: tuple[StepSample, ...] = ()
    """Steps since the last telemetry, at most 16."""
    loads: tuple[LoadSample, ...] = ()
    """Loads since the last telemetry, at most 16."""
    lora_host: str | None = None
    """The host tier that it takes LoRAs from, by name; None where there is none."""
    adapter_loads: tuple[AdapterLoad, ...] = ()
    """Loads of LoRAs since the last telemetry, at most 16."""
    adapter_lanes: int = 2
    """How many loads of LoRAs run at a time; each takes those of a job one after the other."""
    cost_model: WorkerCosts | None = None
    blocks: tuple[BlockSpec, ...] | None = None
    """The blocks of its network, equal ones counted, in the order of the first of each. None: as the worker, or another
    one of its model, told last; telemetry has them every few seconds, as `resident`."""
    controlled: ControlBase | None = None
    """What ControlNets of a service may add to here; None where it asks none."""
    ranks: tuple[RankState, ...] = ()
    quantized: str = "off"
    """In which numbers it has its network's weights; `off`: in those of the model's dtype."""
    step_cache: StepCacheCounters | None = None


class PrepostState(WireModel):
    """Telemetry of a prepost. The router asks it by its own name, and not for more than it can begin."""

    image_processes: int
    """Pictures that it decodes, pastes and encodes at a time; its model computes one stage at a time."""


class ServiceState(WireModel):
    """Telemetry of any instance."""

    service: ServiceName
    instance: str
    """Unique per process start, so that a restarted worker is another worker."""
    host: str
    version: str
    ready: bool
    """The instance can serve: its model is loaded, its connections are up, its endpoints registered."""
    draining: bool = False
    active: bool = True
    models: tuple[ModelCard, ...] = ()
    worker: WorkerState | None = None
    queue: QueueState | None = None
    stores: tuple[StoreRoom, ...] | None = None
    """Every stream with a limit, as the active router has read it; None from others, and before it has."""
    controlnets: tuple[ControlCard, ...] = ()
    """ControlNets that the instance has: a denoiser's or a ControlNet service's."""
    control: ControlState | None = None
    loras: LoraCounters | None = None
    host_tier: HostTier | None = None
    gpus: tuple[HostDevice, ...] = ()
    """GPUs that this process computes on, claimed or not (:mod:`giornata.gpus`)."""
    masks: MaskCard | None = None
    """What makes masks from words in a prepost; None where nothing does."""
    prepost: PrepostState | None = None
    answering: tuple[str, ...] | None = None
    """Questions that a prepost works on (:func:`giornata.wire.messages.question`)."""
    log_lines_lost: int = 0
    """Lines of its log that this process could not write, such as to a full disk."""


# Reading telemetry, of which most is what the same instance has told before.


KEPT: Final = 8192
"""Instances of which the last message is kept; beyond it, all are forgotten and told again."""
OF_STATE: Final = ("models",)
OF_WORKER: Final = ("cost_model", "blocks")
"""What an instance repeats, and its worker."""


class TelemetryReader:
    """Decodes states; what an instance repeats is not validated again, and stays the same object."""

    def __init__(self) -> None:
        self._told: dict[str, dict[str, tuple[Any, Any]]] = {}
        """By instance and path: a part as it came last, and as it was read."""

    def read(self, data: bytes) -> ServiceState:
        """The state in a message; raises as :func:`giornata.wire.codec.decode`."""
        fields = codec.fields_of(ServiceState, data)
        worker, name = fields.get("worker"), fields.get("instance")
        of_worker: dict[str, Any] = worker if isinstance(worker, dict) else {}
        told = self._told.get(name, {}) if isinstance(name, str) else {}
        came = {
            part: whole[part]
            for whole, parts in ((fields, OF_STATE), (of_worker, OF_WORKER))
            for part in parts
            if whole.get(part) is not None
        }
        for part, value in came.items():
            if part in told and told[part][0] == value:
                (fields if part in OF_STATE else of_worker)[part] = told[part][1]
        state = codec.validated(ServiceState, fields)
        if len(self._told) >= KEPT:
            self._told.clear()
        read = {part: getattr(state if part in OF_STATE else state.worker, part) for part in came}
        self._told[state.instance] = told | {part: (came[part], read[part]) for part in came}
        return state


# The fleet as the active router tells it: a summary for every gateway, and a report of each instance on demand.


class FleetSummary(WireModel):
    """router → gateways: what an edit can be done with now; told when it changes, and every second."""

    router: str
    ready: dict[ServiceName, int]
    """Ready instances of each service; a service without one is left out. Routers that stand by count, too."""
    gateways: tuple[str, ...] = ()
    """At most two of the ready gateways: enough for each to know whether it is alone."""
    models: tuple[ModelCard, ...] = ()
    """Models that a ready denoiser and a ready prepost serve with the same digest."""
    controlnets: dict[str, tuple[ControlCard, ...]] = Field(default_factory=dict)
    """ControlNets that ready denoisers compute beside a model, by the model's name; one card of each ControlNet's name.
    A model without any is left out."""
    masks: dict[str, MaskCard] = Field(default_factory=dict)
    """What makes masks from words in a ready prepost, by that prepost's model, which is in the subject to ask on."""
    wait_ms: dict[str, float] = Field(default_factory=dict)
    """About how long a picture would wait for a worker, by model; a model whose workers' speed is unknown is left out.
    """
    nearly_full: tuple[str, ...] = ()
    """JetStream's streams that may soon take nothing more."""


class FleetRequest(WireModel):
    """gateway → router: the instances of one page, counted from 0."""

    page: int = 0
    remaining_ms: int


class InstanceReport(WireModel):
    """A router's knowledge of an instance, its rows counted."""

    state: ServiceState
    """Without rows, samples and recordings."""
    running_rows: int = 0
    waiting_rows: int = 0
    steps_per_s: float | None = None
    """Row steps per second over the last seconds; None while it is unknown."""
    step_ms: float | None = None
    """Median time of its recent steps; None without any."""


class InstanceReports(WireModel):
    """The instances of a page."""

    reports: tuple[InstanceReport, ...]


class FleetPage(WireModel):
    """router → gateway."""

    pages: int
    packed: bytes
    """An :class:`InstanceReports` as :mod:`giornata.wire.codec` writes it: many gateways get the same bytes."""


class WorkerView(WireModel):
    """The present work of a denoiser."""

    running_rows: int
    waiting_rows: int
    """Pictures that it has taken and that are not in the batch yet."""
    free_rows: int
    """Pictures that it would take now."""
    capacity_rows: int
    steps_per_s: float | None = None
    """Row steps per second over the last seconds; null while it is unknown."""
    step_ms: float | None = None
    """Median time of its recent steps, each of which advances every running row by one; null without any."""
    ranks: tuple[RankState, ...] = ()
    adapters: AdapterCounters | None = None
    lora_host: str | None = None


class ControlView(WireModel):
    """The present work of a ControlNet service."""

    controlnets: list[str]
    open_rows: int
    """Pictures whose ControlNets it computes."""
    free_rows: int
    """Pictures that it would take now."""


class InstanceView(WireModel):
    """One instance of a service."""

    service: ServiceName
    instance: str
    host: str
    version: str
    ready: bool
    draining: bool
    active: bool
    models: list[str]
    running_rows: int
    waiting_rows: int
    worker: WorkerView | None = None
    control: ControlView | None = None
    host_tier: HostTier | None = None
    gpus: tuple[HostDevice, ...] = ()
    """GPUs that it computes on; of a pool those alone that it has claimed, since `ranks` tell the others."""


class FleetView(WireModel):
    """Answer of ``GET /v1/fleet``, and the data of its stream's events, which leave out what is null: unknown."""

    instances: list[InstanceView]
    """For who is told of its own load alone, the ready ones with nothing but their service, a number and models."""
    router_active: bool = True
    """False where no router tells: then nothing is known of the fleet."""
    workers: int
    running_rows: int
    waiting_rows: int
    free_rows: int | None = None
    """Null for who is told of its own load alone."""
    queued_jobs: int | None = None
    """Jobs that are prepared and that no worker has taken yet; null while no router is active."""
    queued_rows: int | None = None
    steps_per_s: float | None = None
    predicted_wait_s: float | None = None
    """Seconds until the denoising of one more picture would begin where it would begin first, as routers predict it."""
    templates: TemplateCounters | None = None
    stores: tuple[StoreRoom, ...] | None = None
    """How full the streams are that hold jobs, records and events; null while no router is active."""
