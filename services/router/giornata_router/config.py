"""The settings of the router."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from giornata.bus.streams import LINGER_S
from giornata.config import ServiceConfig
from giornata.residency.use_based import USE_PERIOD_S
from giornata.scheduling.policies import PolicyName
from giornata.scheduling.queue import AGEING_S


class RouterConfig(ServiceConfig):
    """Configuration of the router."""

    policy: PolicyName = Field(
        PolicyName.FINISH_TIME,
        description="How a worker is chosen: by predicted finish; or by deadline, where clients state one.",
    )
    placement_s: ClassVar[float] = USE_PERIOD_S
    """Pause between two plans of what the host tiers of LoRAs should hold."""
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

    @property
    def max_messages(self) -> int:
        """Messages that JetStream takes: twice as many as are let in, so that it is no more than a backstop."""
        return 4 * self.queue_limit
