"""The settings of the router."""

from __future__ import annotations

import importlib.util
from typing import ClassVar, Self

from pydantic import Field, model_validator

from giornata.bus.streams import LINGER_S
from giornata.config import ServiceConfig
from giornata.residency.plans.planner import ResidencyPlanName
from giornata.scheduling.policies import LOAD_WEIGHT, PolicyName
from giornata.scheduling.queue import AGEING_S, QueueOrder


def require_rock(asked: str) -> None:
    """Raise ValueError unless the extra `rock` is installed; `asked` is the setting that needs it."""
    if importlib.util.find_spec("sklearn") is None:
        raise ValueError(
            f"received {asked}, which needs scikit-learn; accepted once it is installed: "
            "pip install 'giornata-router[rock]'"
        )


class RouterConfig(ServiceConfig):
    """Configuration of the router."""

    policy: PolicyName = Field(
        PolicyName.FINISH_TIME,
        description="How a worker is chosen: by predicted finish; by deadline; or as one of the baselines does. `rock` "
        "matches queues of alike jobs with workers, and needs the extra `rock`.",
    )
    line: QueueOrder | None = Field(
        None,
        description="Whose turn comes next: `fair`, tenants take turns; `kinds`, ROCK's queues of alike jobs, which "
        "needs the extra `rock`. Default `fair`; `kinds` for the policy `rock`.",
    )
    placement: ResidencyPlanName = Field(
        ResidencyPlanName.USE,
        description="What the host tiers of LoRAs, and memories of workers, should hold: `use`, what is used most for "
        "what another load costs; `off`, what jobs needed; as one of the baselines, `rock`, with the extra `rock`, or "
        "`proactive`.",
    )
    placement_s: ClassVar[float | None] = None
    """Pause between two plans of placement; default 15, `rock` 45, `proactive` 60."""
    placement_seed: ClassVar[int] = 0
    """Of the draws of the placement `rock`."""
    load_weight: float = Field(
        LOAD_WEIGHT,
        ge=0,
        le=100,
        description="What a second of loading adapters counts, in seconds of a job's finish, where the policy predicts "
        "finishes: with more, fewer loads and later finishes.",
    )
    ageing_s: float = Field(
        AGEING_S,
        ge=0,
        description="A batch job that has waited for so long comes as if it were interactive.",
    )
    stall_factor: ClassVar[float] = 10.0
    """A step that takes longer than this many times what was predicted, and than stall_s, is given up."""
    stall_s: float = Field(10.0, gt=0, description="Least time after which a step is given up.")
    queue_limit_interactive: int = Field(
        10_000, ge=1, description="Interactive jobs accepted and unfinished at a time; more are refused."
    )
    queue_limit_batch: int = Field(
        10_000, ge=1, description="Batch jobs accepted and unfinished at a time; more are refused."
    )
    tenant_share: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Part of each of these limits that one tenant may take up; 1 where there is one.",
    )
    prepared_rows: ClassVar[int] = 64
    """Pictures that are prepared ahead of the workers, however few there are; with many workers, as many as they
    hold."""
    record_linger_s: int = Field(
        LINGER_S,
        ge=60,
        le=30 * 86400,
        description="How long the record of an ended job outlives its results: an expired result is then told from an "
        "unknown job, and a repeated request from a new one.",
    )
    max_failures: int = Field(
        3,
        ge=1,
        le=20,
        description="Attempts at a picture lost with workers after which its job fails. The last one has an empty "
        "worker, and is lost only where that one dies: silence alone ends no job.",
    )
    stage_s: float = Field(
        120.0,
        gt=0,
        description="Time that an instance of prepost has for one stage; then another one is asked.",
    )

    @model_validator(mode="after")
    def _kinds_can_be_fitted(self) -> Self:
        asked = "line=kinds" if self.line is QueueOrder.KINDS else f"policy={self.policy}"
        if self.policy is PolicyName.DEADLINE_AWARE and self.line_name is QueueOrder.KINDS:
            raise ValueError(
                "received policy=deadline_aware with line=kinds, which knows no deadlines; accepted is fair"
            )
        if self.policy is PolicyName.ROCK or self.line_name is QueueOrder.KINDS:
            require_rock(asked)
        if self.placement is ResidencyPlanName.ROCK:
            require_rock(f"placement={self.placement}")
        return self

    @property
    def line_name(self) -> QueueOrder:
        """The line that is used."""
        return self.line or (QueueOrder.KINDS if self.policy is PolicyName.ROCK else QueueOrder.FAIR)

    @property
    def max_messages(self) -> int:
        """Messages that JetStream takes: twice as many as are let in, so that it is no more than a backstop."""
        return 2 * (self.queue_limit_interactive + self.queue_limit_batch)
