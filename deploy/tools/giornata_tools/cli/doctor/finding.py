"""What a check has found. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Final


class Verdict(StrEnum):
    """How much it matters, the worst last."""

    OK = "ok"
    WARN = "warn"
    """Something works less well, or only some things do."""
    FAIL = "fail"
    """No edit works before it is mended."""


@dataclass(frozen=True)
class Finding:
    """What the doctor's report says of one thing."""

    verdict: Verdict
    sentence: str
    remedy: str | None = None
    """What to do; for a verdict that is not ok."""


ok: Final = partial(Finding, Verdict.OK)
warn: Final = partial(Finding, Verdict.WARN)
fail: Final = partial(Finding, Verdict.FAIL)

SETUP: Final = "Run `make setup` in the checkout."


def worst(findings: Iterable[Finding]) -> Verdict:
    """The verdict on all of them."""
    return max((finding.verdict for finding in findings), key=list(Verdict).index)
