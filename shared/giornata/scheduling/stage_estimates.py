"""How long stages beside denoising take, learnt from the jobs that went through them. Pure.

Times include waiting for a server of the stage, since the next job waits for one too.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from giornata.scheduling.unit_time import UnitTime


@dataclass
class _Rates:
    prepare: UnitTime = field(default_factory=UnitTime)
    finish: UnitTime = field(default_factory=UnitTime)


@dataclass(frozen=True)
class _Finishing:
    since_s: float
    model_digest: str
    tokens: int


class StageEstimates:
    """Learns from the jobs of one router. Every model has times of its own, by tokens of its pictures."""

    def __init__(self) -> None:
        self._models: dict[str, _Rates] = defaultdict(_Rates)
        self._finishing: dict[str, _Finishing] = {}

    def prepared(self, model_digest: str, tokens: int, ms: float) -> None:
        """Take in that a job's pictures, of so many tokens each, were inspected and encoded in `ms`."""
        self._models[model_digest].prepare.observe(tokens, ms)

    def prepare_ms(self, model_digest: str, tokens: int) -> float:
        """Time of inspecting and encoding."""
        return self._models[model_digest].prepare.ms(tokens)

    def begin_finish(self, job_id: str, model_digest: str, tokens: int, now: float) -> None:
        """Decoding and pasting of a job's rows, of so many tokens together, begins."""
        self._finishing[job_id] = _Finishing(now, model_digest, tokens)

    def end_finish(self, job_id: str, now: float, *, completed: bool) -> None:
        """Decoding and pasting ends; only a `completed` job tells how long it takes."""
        begun = self._finishing.pop(job_id, None)
        if begun is not None and completed:
            took_ms = (now - begun.since_s) * 1e3
            self._models[begun.model_digest].finish.observe(begun.tokens, took_ms)

    def finish_ms(self, model_digest: str, tokens: int) -> float:
        """Time of decoding and pasting."""
        return self._models[model_digest].finish.ms(tokens)

    def finishing_ms(self, job_id: str, now: float) -> float | None:
        """Time left of decoding and pasting a job, at least 0; None where it has not begun."""
        begun = self._finishing.get(job_id)
        if begun is None:
            return None
        return max(0.0, self.finish_ms(begun.model_digest, begun.tokens) - (now - begun.since_s) * 1e3)
