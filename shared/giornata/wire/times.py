"""Where the time of a job went."""

from __future__ import annotations

from giornata.wire.values import Wire


class StageTimes(Wire):
    """Milliseconds a job spent per stage, as the router saw them; summed over attempts."""

    prepare: float = 0.0
    """inspect and encode."""
    queue: float = 0.0
    """Waiting: in the work queue, for a worker, and in the worker for its first step."""
    denoise: float = 0.0
    """From a row's first step to the last row's last."""
    finish: float = 0.0
    """Decode, paste, encode."""


class ComputeTimes(Wire):
    """Milliseconds spent computing for a job; the rest of its latency is waiting and overhead."""

    inspect: float = 0.0
    encode: float = 0.0
    denoise: float = 0.0
    """Engine steps that its rows took part in, each counted once."""
    decode: float = 0.0
    paste: float = 0.0
