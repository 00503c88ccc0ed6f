"""What a check has found. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """How much it matters."""

    OK = "ok"
    WARN = "warn"
    """Something works less well, or only some things do."""
    FAIL = "fail"
    """No edit works before it is mended."""


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report."""

    name: str
    """What was looked at."""
    verdict: Verdict
    sentence: str
    remedy: str | None = None
    """What to do; for a verdict that is not ok."""


def ok(name: str, sentence: str) -> Finding:
    """It is as it should be."""
    return Finding(name, Verdict.OK, sentence)


def warn(name: str, sentence: str, remedy: str) -> Finding:
    """It can be better."""
    return Finding(name, Verdict.WARN, sentence, remedy)


def fail(name: str, sentence: str, remedy: str) -> Finding:
    """It has to be mended."""
    return Finding(name, Verdict.FAIL, sentence, remedy)


def worst(findings: list[Finding]) -> Verdict:
    """The verdict on all of them."""
    verdicts = {finding.verdict for finding in findings}
    return next((v for v in (Verdict.FAIL, Verdict.WARN) if v in verdicts), Verdict.OK)
