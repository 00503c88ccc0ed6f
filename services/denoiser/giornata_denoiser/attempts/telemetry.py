"""A worker's telemetry: its rows, its latest steps and loads, and what they cost. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final, TypeVar

from giornata.planning.cost_model import CostModel, Profile
from giornata.scheduling.batch import RowKey
from giornata.wire.controlnets import ControlBase
from giornata.wire.values import BlockMode
from giornata.wire.workers import (
    AdapterCounters,
    AdapterLoad,
    LoadSample,
    RankState,
    RowProgress,
    StepCacheCounters,
    StepSample,
    TemplateCounters,
    Tier,
    WorkerState,
)
from giornata_denoiser.checkpoint import Checkpoint
from giornata_denoiser.config import DenoiserConfig, TextReusePolicy
from giornata_denoiser.engine.model_runner import StepReport
from giornata_denoiser.engine.recorders import renew_steps
from giornata_denoiser.templates.identity import form_of

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
