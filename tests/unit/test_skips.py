"""A run's last lines, which tell how to run what was skipped."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.patience import CI_S, PERSON_S, VARIABLE, chosen_s
from tests.skips import HOW, OTHER, told

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


def test_reasons_are_those_of_tests_and_the_files_that_are_named_exist() -> None:
    texts = [path.read_text() for path in (ROOT / "tests").rglob("*.py") if "skips" not in path.name]
    unsaid = [said for said in HOW if not any(re.search(said, text) for text in texts)]
    assert unsaid == []
    named = [name for how in HOW.values() for name in re.findall(r"\btests/[\w/.]+\b", how)]
    assert [name for name in named if not (ROOT / name).exists()] == []
    assert len(named) > 5


@pytest.mark.parametrize(
    ("environ", "terminal", "idle", "patience_s"),
    [
        ({}, True, True, PERSON_S),
        ({}, False, True, CI_S),
        ({}, True, False, CI_S),
        ({"CI": "1"}, True, True, CI_S),
        ({"PYTEST_XDIST_WORKER": "gw0"}, True, True, CI_S),
        ({VARIABLE: "7", "CI": "1"}, False, False, 7),
    ],
)
def test_a_person_who_runs_some_tests_waits_less_for_one_that_hangs(
    environ: dict[str, str], terminal: bool, idle: bool, patience_s: int
) -> None:
    assert chosen_s(environ, terminal=terminal, idle=idle) == patience_s
