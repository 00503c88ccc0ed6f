"""What a check has found. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Final


class CheckStatus(StrEnum):
    """How much it matters, the worst last."""

    OK = "ok"
    WARN = "warn"
    """Something works less well, or only some things do."""
    FAIL = "fail"
    """No edit works before it is mended."""


@dataclass(frozen=True)
class DoctorFinding:
    """What the doctor's report says of one thing."""

    verdict: CheckStatus
    sentence: str
    remedy: str | None = None
    """What to do; for a verdict that is not ok."""


ok: Final = partial(DoctorFinding, CheckStatus.OK)
warn: Final = partial(DoctorFinding, CheckStatus.WARN)
fail: Final = partial(DoctorFinding, CheckStatus.FAIL)

SETUP: Final = "Run `make setup` in the checkout."


def worst(findings: Iterable[DoctorFinding]) -> CheckStatus:
    """The verdict on all of them."""
    return max((finding.verdict for finding in findings), key=list(CheckStatus).index)
