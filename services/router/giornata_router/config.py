"""What the router can be told."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from giornata.config import ServiceConfig


class RouterConfig(ServiceConfig):
    """Configuration of the router."""

    policy: Literal["least_remaining_steps", "fewest_rows"] = Field(
        "least_remaining_steps",
        description="How a worker is chosen; fewest_rows is the request-level baseline.",
    )
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
