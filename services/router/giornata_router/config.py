"""The settings of the router."""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import Field, model_validator

from giornata.bus.streams import LINGER_S
from giornata.config import ServiceConfig
from giornata.scheduling.policies import PolicyName
from giornata.scheduling.queue import AGEING_S
from giornata.scheduling.rock import AdapterPlan


class RouterConfig(ServiceConfig):
    """Configuration of the router."""

    policy: PolicyName = Field(
        PolicyName.FINISH_TIME,
        description="How a worker is chosen: by predicted finish; or by deadline, where clients state one.",
    )
    adapter_plan: AdapterPlan = Field(
        AdapterPlan.USE,
        description="What the host tiers of LoRAs should hold: `use`, what is used most for what another load costs; "
        "`off`, what jobs needed; `rock`, ROCK's replicas, with its matching of jobs and workers, to compare.",
    )
    placement_s: ClassVar[float | None] = None
    """Pause between two plans of placement; default 15, `rock` 45."""
    placement_seed: ClassVar[int] = 0
    """Of the draws of the plan `rock`."""
    ageing_s: ClassVar[float] = AGEING_S
    """A batch job that has waited for so long comes as if it were interactive."""
    stall_factor: ClassVar[float] = 10.0
    """A step that takes longer than this many times what was predicted, and than stall_s, is given up."""
    stall_s: ClassVar[float] = 10.0
    """Least time after which a step is given up."""
    queue_limit: int = Field(
        10_000,
        ge=1,
        description="Jobs accepted and unfinished at a time, of interactive ones and of batch ones each, more "
        "are refused; fewer where clients should turn elsewhere rather than wait.",
    )
    tenant_share: ClassVar[float] = 0.5
    """Part of each of these limits that one tenant may take up."""
    prepared_rows: ClassVar[int] = 64
    """Pictures that are prepared ahead of the workers, however few there are; with many workers, as many as they
    hold."""
    record_linger_s: int = Field(
        LINGER_S,
        ge=60,
        le=30 * 86400,
        description="How long the record of an ended job outlives its results: an expired result is then told "
        "from an unknown job, and a repeated request from a new one. Longer where clients ask late.",
    )
    max_failures: int = Field(
        3,
        ge=1,
        le=20,
        description="Attempts at a picture lost with workers after which its job fails; more where machines "
        "are often taken away. The last one has an empty worker, and is lost only where that one dies: silence "
        "alone ends no job.",
    )
    stage_s: ClassVar[float] = 120.0
    """Time that an instance of prepost has for one stage; then another one is asked."""

    @model_validator(mode="after")
    def _plan_and_policy_agree(self) -> Self:
        if self.adapter_plan is AdapterPlan.ROCK and self.policy is PolicyName.DEADLINE_AWARE:
            raise ValueError(
                "received adapter_plan=rock with policy=deadline_aware; ROCK's matching knows no deadlines"
            )
        return self

    @property
    def max_messages(self) -> int:
        """Messages that JetStream takes: twice as many as are let in, so that it is no more than a backstop."""
        return 4 * self.queue_limit
