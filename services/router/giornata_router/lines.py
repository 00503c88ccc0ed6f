"""The line that the configuration names."""

from __future__ import annotations

from giornata.scheduling.fair_line import FairLine
from giornata.scheduling.kinds_line import KindsLine
from giornata.scheduling.line import Line, LineName
from giornata.scheduling.policies import PolicyName
from giornata_router.config import RouterConfig


def line_of(config: RouterConfig) -> Line:
    """A line without jobs."""
    if config.line_name is LineName.KINDS:
        return KindsLine(ageing_s=config.ageing_s)
    return FairLine(by_deadline=config.policy is PolicyName.DEADLINE_AWARE, ageing_s=config.ageing_s)
