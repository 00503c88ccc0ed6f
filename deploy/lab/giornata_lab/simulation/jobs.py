"""What simulated clients ask for, rows at a simulated worker, and how long their steps take. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from giornata.planning.operations import (
    SLABS,
    BatchRow,
    BlockLoads,
    LoadLink,
    NetworkOperations,
    SequenceShape,
    low_rank_weights,
    row_blocks,
    sample_fields,
    step_work,
)
from giornata.planning.plans import plan_batch
from giornata.scheduling.adapters import NeededControl, NeededLora
from giornata.scheduling.batch import RowKey
from giornata.scheduling.demand import JobDemand, RowShape, StepTimeModel
from giornata.scheduling.worker_state import Attempt
from giornata.wire.values import BlockMode
from giornata.wire.workers import RowProgress, StepSample
from giornata_lab.loadgen import workload
from giornata_lab.loadgen.workload import AdapterSizes, Mix, WorkloadRequest, chosen

MODEL = "simulated"
DIGEST = "0" * 64
DEFAULT_STEPS = 30


@dataclass(frozen=True)
class PictureSetting:
    """The size in tokens that all jobs edit, a square picture, and how their rows reuse."""

    text: int = 512
    image: int = 4096
    halo: int = 0
    """Tokens around a mask that are computed too."""
    corrects: bool = False
    """Rows compute their first step in full and correct what they take by it; FlashPS does not."""

    def computed(self, mask_ratio: float) -> int:
        """Tokens that a square mask touches with its halo, at least one."""
        side = math.sqrt(self.image * mask_ratio) + 2 * self.halo
        return max(1, min(self.image, round(side * side)))


@dataclass(frozen=True)
class SimulatedJob:
    """One request."""

    job_id: str
    at_s: float
    demand: JobDemand
    slo_s: float | None = None
    """Time from its arrival in which it should end."""


@dataclass(frozen=True)
class SimAssignment:
    """Rows of a job that one worker gets together."""

    job: SimulatedJob
    attempt: int
    rows: tuple[int, ...]

    @property
    def key(self) -> Attempt:
        """Job and attempt."""
        return self.job.job_id, self.attempt

    @property
    def demand(self) -> JobDemand:
        """Return what its rows ask for."""
        return replace(self.job.demand, shapes=tuple(self.job.demand.shapes[row] for row in self.rows))


def jobs_of(
    requests: Sequence[WorkloadRequest], picture: PictureSetting, *, slo_s: float | None = None
) -> list[SimulatedJob]:
    """Make a job of every request, in the order of their times; they may take from templates."""
    made = []
    for number, request in enumerate(sorted(requests, key=lambda r: r.at_s)):
        computed, steps = picture.computed(request.mask_ratio), request.steps or DEFAULT_STEPS
        shape = RowShape(picture.text, picture.image, computed, steps, begun=not picture.corrects)
        demand = JobDemand(MODEL, DIGEST, (shape,) * request.n, template_name(request.template))
        made.append(SimulatedJob(f"j{number}", request.at_s, demand, slo_s))
    return made


def template_name(number: int) -> str:
    """The name of a template in telemetry."""
    return f"t{number}"


GRAIN = 32
"""Plans are made of rows whose computed tokens are rounded to so many parts of their picture's, and kept."""
EPSILON_S = 1e-9
"""A step that ends within this after an arrival counts as ended before it."""


@dataclass(slots=True, eq=False)
class SimRow:
    """A row as the worker has it; `left`, its steps to compute, and `begun` change from step to step."""

    key: RowKey
    shape: RowShape
    reuses: bool
    step_ms: float
    first_ms: float
    """Time that it adds to its first step beyond that."""
    left: int
    told: RowProgress
    """Its telemetry before its first step."""
    template: str | None = None
    background: bool = False
    """A template run."""
    begun: bool = False

    @property
    def tokens(self) -> int:
        """Text and image tokens, as :class:`giornata.scheduling.batch.RowBatch` counts them."""
        if not self.reuses:
            return self.shape.sequences * (self.shape.text + self.shape.image)
        return self.shape.sequences * (self.shape.live_text + self.shape.computed)

    @property
    def first(self) -> bool:
        """Return whether its next step costs more than the others."""
        return not self.begun and self.first_ms > 0

    @property
    def mode(self) -> BlockMode:
        """Return how its next step is computed: `FULL` where it takes nothing from the template."""
        return BlockMode.FULL if self.first or not self.reuses else BlockMode.KV

    @property
    def computed(self) -> RowShape:
        """Its shape in its next step."""
        return self.shape.whole if self.mode is BlockMode.FULL else self.shape


def row_of(
    key: RowKey, shape: RowShape, pace: StepTimeModel, *, template: str | None, background: bool = False
) -> SimRow:
    """Make a row; `template` None: it takes from no template."""
    load = shape.load(pace, reuses=template is not None)
    reuses = template is not None and load.step_ms < pace.row_ms(shape.whole, BlockMode.FULL)
    told = RowProgress(
        job_id=key.job_id,
        attempt=key.attempt,
        index=key.index,
        step=0,
        steps=shape.steps,
        tokens=shape.image,
        computed_tokens=shape.computed if reuses else None,
        text_tokens=shape.text,
        padding_tokens=shape.padding if reuses else 0,
        sequences=shape.sequences,
        low_rank=shape.low_rank,
        control=shape.control,
        encoded=True,
    )
    return SimRow(key, shape, reuses, load.step_ms, load.first_ms, shape.steps, told, template, background)


class StepTimes:
    """How long steps take on one machine; plans are kept.

    `kv_bytes` are the keys and values that a row takes a step, over all blocks; 0 where loads are neglected.
    """

    def __init__(self, pace: StepTimeModel, kv_bytes: float) -> None:
        self._pace, self._kv_bytes = pace, kv_bytes
        self._stretch: dict[Hashable, float] = {}

    def step_ms(self, rows: Sequence[SimRow]) -> tuple[float, float]:
        """Times of a step of `rows`: computing, and waiting for loads."""
        computing = self._pace.base_ms
        for row in rows:
            computing += row.step_ms + (0.0 if row.begun else row.first_ms)
        if not self._kv_bytes:
            return computing, 0.0
        templates = {row.template for row in rows if row.mode is not BlockMode.FULL}
        blocks = self._pace.operations.blocks
        block_bytes = self._kv_bytes / blocks
        loading = len(templates) * blocks * self._pace.costs.load_ms(block_bytes)
        if loading <= computing:  # blocks are alike: then every load hides behind the block before
            return computing, 0.0
        return computing, computing * (self._stretched(rows) - 1)

    def _stretched(self, rows: Sequence[SimRow]) -> float:
        """Return how many times longer loads make a step of rows like these, by the planner of batches."""
        numbers: dict[str | None, int] = {}
        kinds = tuple(
            sorted(
                (
                    -(-row.shape.computed * GRAIN // row.shape.image),
                    numbers.setdefault(row.template, len(numbers)),
                )
                if row.mode is not BlockMode.FULL
                else (GRAIN, -1)
                for row in rows
            )
        )
        if kinds not in self._stretch:
            self._stretch[kinds] = self._plan(kinds, rows[0].shape)
        return self._stretch[kinds]

    def _plan(self, kinds: Sequence[tuple[int, int]], shape: RowShape) -> float:
        pace, blocks = self._pace, self._pace.operations.blocks
        kv_bytes = round(self._kv_bytes / blocks)
        loads = BlockLoads.equal(blocks, kv_bytes // 2, kv_bytes)
        rates = pace.costs.rates(pace.operations).sum(0)
        full_ms = float(rates @ shape.whole.amounts(BlockMode.FULL))
        reusing, base_ms, least_ms = [], pace.costs.compute[0] / blocks, pace.costs.compute[0]
        for parts, template in kinds:
            computed = max(1, shape.image * parts // GRAIN)
            tokens = SequenceShape(shape.text, shape.image, computed, padding=shape.padding)
            if template < 0:
                base_ms += full_ms / blocks
                least_ms += full_ms
                continue
            made = row_blocks(pace.costs, pace.operations, [tokens], loads, kv_bytes / SLABS)
            reusing.append(BatchRow(made, template))
            least_ms += float(made.kv_ms.sum())
        link = LoadLink(pace.costs.load_ms(kv_bytes / SLABS))
        return plan_batch(reusing, link, base_ms).finish_ms / least_ms


@dataclass(slots=True)
class EqualStepRun:
    """Equal steps that are being computed."""

    rows: tuple[SimRow, ...]
    began_s: float
    step_s: float
    steps: int
    number: int
    excess_ms: float = 0.0
    """Time by which loads lengthen each of them."""

    def made(self, now: float) -> int:
        """Steps that have ended."""
        return min(self.steps, math.floor((now - self.began_s + EPSILON_S) / self.step_s))


def progress(row: SimRow, made: int) -> RowProgress:
    """The row as telemetry tells it, `made` steps into its segment."""
    step = row.shape.steps - row.left + made
    return row.told.model_copy(update={"step": step, "begun": row.begun or made > 0 or not row.first_ms})


def sample(segment: EqualStepRun, operations: NetworkOperations) -> StepSample:
    """A step of the segment, of a network of these operations, as telemetry tells it."""
    rows = [(row, row.mode) for row in segment.rows for _ in range(row.shape.sequences)]
    shapes = [row.computed for row, _ in rows]
    modes = [(mode,) * operations.blocks for _, mode in rows]
    return StepSample.model_construct(
        rows=len(segment.rows),
        **sample_fields(step_work(operations, shapes, modes), shapes, modes),
        assemble_ms=0.0,
        step_ms=segment.step_s * 1e3,
        reusing_ms=sum(row.step_ms for row in segment.rows if row.mode is not BlockMode.FULL),
        excess_ms=segment.excess_ms,
        waited_ms=segment.excess_ms,
    )


@dataclass(frozen=True)
class AdapterDemand:
    """What is known of jobs' adapters beside the names of their LoRAs, which requests tell."""

    sizes: AdapterSizes = field(default_factory=AdapterSizes)
    """Sizes of LoRAs."""
    controls: Mix = field(default_factory=lambda: {0: 1.0})
    """Number of ControlNets of a job."""
    joins_within: float = 0.0
    """Share of the steps that may be made before the LoRAs are there; 0 is `lora_wait=exact`."""


def with_adapters(
    jobs: Sequence[SimulatedJob], requests: Sequence[WorkloadRequest], asked: AdapterDemand, seed: int
) -> list[SimulatedJob]:
    """The same jobs with adapters; `requests` are theirs, in the same order. Equal seeds draw equal ones."""
    chance = random.Random(f"{seed} controls")  # noqa: S311 - a workload, no secret
    weights = workload.controlnets()
    known: dict[str, NeededLora] = {}
    made = []
    for job, request in zip(jobs, requests, strict=True):
        for name in request.adapters:
            if name not in known:
                known[name] = NeededLora(name, asked.sizes.of(name, seed))
        loras = tuple(known[name] for name in request.adapters)
        controls = _distinct(chosen(asked.controls, chance.random()), weights, chance)
        made.append(adapted(job, loras, controls, asked.joins_within))
    return made


def adapted(
    job: SimulatedJob,
    loras: Sequence[NeededLora],
    controls: Iterable[int] = (),
    joins_within: float = 0.0,
) -> SimulatedJob:
    """A job with these LoRAs, and ControlNets by their rank of popularity."""
    low_rank = sum(low_rank_weights(0, lora.size_bytes) for lora in loras)
    shapes = tuple(
        replace(shape, low_rank=low_rank, segments=1 / shape.sequences if loras else 0.0)
        for shape in job.demand.shapes
    )
    needed = tuple(NeededControl(control_name(number), 1.0) for number in controls)
    demand = replace(
        job.demand, shapes=shapes, adapters=tuple(loras), controls=needed, joins_within=joins_within
    )
    return replace(job, demand=demand)


def control_name(number: int) -> str:
    """The digest of the ControlNet of this rank of popularity."""
    return f"control{number}"


def held_controls(weight_bytes: int) -> tuple[tuple[str, int], ...]:
    """All ControlNets, of this size, for :attr:`giornata_lab.simulation.machines.Machine.controls`."""
    return tuple((control_name(number), weight_bytes) for number in workload.controlnets())


def _distinct(count: int, weights: Mix, chance: random.Random) -> list[int]:
    found: dict[int, None] = {}
    while len(found) < min(count, len(weights)):
        found[chosen(weights, chance.random())] = None
    return list(found)
