"""What a service instance tells of itself, 2-4 times a second; the latest wins and silence means death."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from giornata.wire.models import ModelCard
from giornata.wire.values import Mode, Wire


class ServiceName(StrEnum):
    """The six services, as they are called in subjects and distributions."""

    GATEWAY = "gateway"
    ROUTER = "router"
    PREPOST = "prepost"
    DENOISER = "denoiser"
    CONTROLNET = "controlnet"
    LORA_STORE = "lora-store"


class Tier(StrEnum):
    """Where a worker has a template."""

    MEMORY = "memory"
    DISK = "disk"


class RowProgress(Wire):
    """A row that a worker has."""

    job_id: str
    attempt: int
    index: int
    step: int
    """Steps computed; 0 while it waits."""
    steps: int
    tokens: int
    """Of the picture."""
    computed_tokens: int | None = None
    """Of them that its next step computes unless it is its first; None: all."""
    text_tokens: int = 0
    """Of one sequence."""
    sequences: int = 1
    """2 with true classifier-free guidance."""
    begun: bool = False
    """Whether it has made a step here; the first one of an edit that reuses is computed in full."""


class StepSample(Wire):
    """One engine step: what was computed and how long it took; the router's regressions are fitted to these.

    Tokens and pairs are means over the transformer's blocks, of all sequences together.
    """

    rows: int
    sequences: int
    """Rows, counted twice where true classifier-free guidance runs a negative branch."""
    image_tokens: int
    """Computed ones, on average over blocks; the others are taken from templates."""
    text_tokens: int
    projected_tokens: int = 0
    """Those whose keys and values are projected again, on average over blocks."""
    attention_pairs: int
    """Sum over sequences of their computed tokens times all of their tokens, on average over blocks."""
    loaded_bytes: int = 0
    """From templates, loaded while the step ran or waited."""
    assemble_ms: float
    """Putting the batch together."""
    step_ms: float
    """The whole step, assembly included."""
    waited_ms: float = 0.0
    """Of it, waiting for loads."""
    predicted_ms: float = 0.0
    """What the worker expected it to take."""
    reusing_ms: float = 0.0
    """Of that, what rows that take from templates compute at least: what their masks touch, in every block."""
    excess_ms: float = 0.0
    """Of that, what is beyond the least of all rows: loads that do not hide behind computing, or computing instead of
    them, and steps that a template was not recorded for.
    """


class LoadSample(Wire):
    """One template's way from one tier to the next, or a part's; the router's regressions are fitted to these."""

    tier: Tier
    """Where it came from."""
    size_bytes: int
    load_ms: float


class CostFit(Wire):
    """A worker's linear model of one thing that takes time; see :mod:`giornata.planning.costs`."""

    weights: tuple[float, ...]
    """ms per unit."""
    r2: float
    """Over the worker's latest samples; of the fit that it began with, where there are too few."""
    residual_ms: float
    """Median of absolute residuals, likewise."""
    samples: int
    """Taken in since the start."""
    outliers: int
    """Left out since the start."""


class WorkerCosts(Wire):
    """What a worker's steps and loads cost, as it sees it now."""

    compute: CostFit
    """By :data:`giornata.planning.costs.COMPUTE`."""
    load: CostFit
    """By :data:`giornata.planning.costs.LOAD`."""
    blocks: int = 1
    """Of the transformer; all weights but a step's own are those of one block."""
    device: str = ""
    """As torch names it; workers of one model and device share regressions at the router."""
    reused: Mode = Mode.KV
    """How edits take from templates here."""


class TemplateCounters(Wire):
    """What a denoiser's templates have done since its start, and what they weigh now."""

    hits_memory: int = 0
    """Edits whose template was in memory."""
    hits_disk: int = 0
    """Edits whose template was read from disk."""
    misses: int = 0
    prefetched: int = 0
    """Templates that were read from disk ahead of their edits."""
    evicted_memory: int = 0
    evicted_disk: int = 0
    recorded: int = 0
    """Template runs that ended."""
    failed: int = 0
    """Template runs that did not."""
    memory_bytes: int = 0
    disk_bytes: int = 0


class WorkerState(Wire):
    """Telemetry of a denoiser."""

    capacity_rows: int
    capacity_tokens: int
    running: tuple[RowProgress, ...] = ()
    waiting: tuple[RowProgress, ...] = ()
    steps_total: int = 0
    """Row steps since the start."""
    stepping_ms: float = 0.0
    """Since the step that is being computed began; 0 where none is."""
    templates: TemplateCounters | None = None
    resident: dict[Tier, tuple[str, ...]] = Field(default_factory=dict)
    """Pictures whose templates are here, by :func:`giornata.wire.templates.picture_id`, lately used first, at most 256
    a tier.
    """
    samples: tuple[StepSample, ...] = ()
    """Of the steps since the last telemetry, at most 16."""
    loads: tuple[LoadSample, ...] = ()
    """Likewise."""
    costs: WorkerCosts | None = None
    """None for a worker that has no cost model."""


class KindCosts(Wire):
    """What the router has learnt of all workers of one model and device."""

    model_digest: str
    device: str
    compute: CostFit
    load: CostFit


class QueueState(Wire):
    """Telemetry of the active router: who waits for a worker."""

    jobs: int = 0
    """Jobs that are prepared and that no worker has taken yet."""
    rows: int = 0
    """Their pictures."""
    steps: int = 0
    """Row steps that they ask for."""
    full: bool = False
    """As many jobs as may be are carried at a time: more may wait behind these, uncounted."""
    wait_ms: float | None = None
    """Until the denoising of one more picture would begin; None: unknown, since no worker's speed is, jobs wait
    uncounted, or several models are served.
    """
    costs: tuple[KindCosts, ...] = ()


class ServiceState(Wire):
    """Telemetry of any instance."""

    service: ServiceName
    instance: str
    """Unique per process start, so that a restarted worker is another worker."""
    host: str
    version: str
    ready: bool
    """It can serve: model loaded, connections up, endpoints registered."""
    draining: bool = False
    active: bool = True
    """False for a router that stands by."""
    models: tuple[ModelCard, ...] = ()
    worker: WorkerState | None = None
    """Of a denoiser."""
    queue: QueueState | None = None
    """Of the active router."""
    answering: tuple[str, ...] | None = None
    """Of a prepost: the questions that it has, by :func:`giornata.wire.messages.question`. None: it does not tell."""
