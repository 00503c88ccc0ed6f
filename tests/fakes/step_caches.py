"""Rules of step caches, shortly."""

from __future__ import annotations

from giornata.wire.models import TaylorSeerSchedule
from giornata_denoiser.rows.parts import TaylorRule


def taylor(interval: int, order: int, warmup: int) -> TaylorRule:
    return TaylorRule(TaylorSeerSchedule(interval, warmup), order)
