"""The commands of the lab at their smallest; `make test-lab` tests what they compute, `tests/e2e` one evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from giornata_tools.cli.app import cli


def runs(out: Path, *command: str) -> list[dict[str, Any]]:
    """What a command has reported of its runs; it has printed and drawn them, too."""
    done = CliRunner().invoke(cli, [*command, "--out", str(out)])
    assert (done.exit_code, "bound" in done.output) == (0, True), done.output
    assert list(out.glob("*.svg"))
    found: list[dict[str, Any]] = json.loads((out / "report.json").read_text())["runs"]
    return found


def test_policies_are_simulated_and_none_beats_the_bound(tmp_path: Path) -> None:
    options = ("--duration", "10", "--warmup", "0", "--rate", "1", "--workers", "2")
    told = runs(tmp_path, "simulate", *options, "--policy", "finish_time,round_robin")
    assert [run["policy"] for run in told] == ["finish_time", "round_robin"]
    assert all(0 < run["bound_p95_s"] <= run["p95_s"] for run in told)


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (["simulate", "--policy", "fastest"], "no policy is called fastest"),
        (["bench", "serve", "--rate", "fast"], "Invalid value for '--rate"),
        (["bench", "baseline", "--batch", "0"], "Invalid value for '--batch"),
        (["quality", "--limit", "0"], "Invalid value for '--limit"),
        (["demo", "--steps", "0"], "Invalid value for '--steps"),
    ],
)
def test_a_mistake_is_told_before_anything_begins(command: list[str], told: str) -> None:
    done = CliRunner().invoke(cli, command)
    assert (done.exit_code, told in done.output) == (2, True), done.output
