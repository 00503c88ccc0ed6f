"""What the router can be told."""

from __future__ import annotations

from pydantic import Field

from giornata.config import ServiceConfig
from giornata.scheduling.line import AGEING_S
from giornata.scheduling.policies import PolicyName


class RouterConfig(ServiceConfig):
    """Configuration of the router."""

    policy: PolicyName = Field(
        PolicyName.FINISH_TIME,
        description="How a worker is chosen: by predicted finish; by deadline; or as one of the baselines does.",
    )
    max_wait_s: float | None = Field(
        None,
        gt=0,
        description="Predicted wait for a worker beyond which an edit is refused with 429; every edit's own budget is "
        "such a limit too.",
    )
    ageing_s: float = Field(
        AGEING_S,
        ge=0,
        description="A batch job that has waited for so long comes as if it were interactive, any job after half of it "
        "before its tenant's others.",
    )
    stall_factor: float = Field(
        10.0,
        gt=1,
        description="A step that takes longer than this many times what was predicted, and than stall_s, is given up.",
    )
    stall_s: float = Field(10.0, gt=0, description="Least time after which a step is given up.")
    queue_limit: int = Field(
        10_000, ge=1, description="Jobs accepted and unfinished at a time; more are refused."
    )
    max_interactive: int = Field(512, ge=1, le=10_000, description="Interactive jobs carried out at a time.")
    max_batch: int = Field(256, ge=1, le=10_000, description="Batch jobs carried out at a time.")
    max_failures: int = Field(3, ge=1, le=20, description="Lost attempts after which a job fails.")
    inspect_s: float = Field(15.0, gt=0, description="Limit of one inspection.")
    encode_s: float = Field(120.0, gt=0, description="Limit of one encoding.")
    finish_s: float = Field(120.0, gt=0, description="Limit of decoding and pasting one picture.")
    stage_tries: int = Field(
        3,
        ge=1,
        le=20,
        description="Tries of a stage that fails unexpectedly or is silent; for an absent service a job waits.",
    )
