"""A run's last lines, which tell how to run what was skipped."""

from __future__ import annotations

from pathlib import Path

from tests.skips import OTHER, told

ROOT = Path(__file__).parents[2]


def test_what_is_missing_is_told_once_the_most_tests_first() -> None:
    reasons = [
        "Skipped: no browser: no chromium",
        "needs a CUDA device",
        "needs two CUDA devices",
        "of glibc",
    ]
    first, second, third = told(reasons)
    assert first == "2 skipped for want of a CUDA device: make gpu on a machine with one"
    assert second.startswith("1 skipped for want of a browser: apt-get install -y chromium, then .venv/bin/")
    assert third == f"1 skipped for want of {OTHER}"
    assert told([]) == []
