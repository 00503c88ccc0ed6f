"""`giornata simulate-pool`: its options, tables and files."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from giornata_lab.simulation.degrees.workloads import SizeMix
from giornata_tools.cli.app import cli

QUICK = ["simulate-pool", "--requests", "12", "--steps", "6", "--processes", "1"]


def run(*flags: object, status: int = 0) -> str:
    result = CliRunner().invoke(cli, [*map(str, flags)])
    assert result.exit_code == status, result.output
    return result.output


def runs(folder: Path) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads((folder / "report.json").read_text())["runs"]
    return found


@pytest.mark.slow
def test_a_run_prints_a_table_and_writes_what_it_prints(tmp_path: Path) -> None:
    out = tmp_path / "out"
    shown = run(*QUICK, "--mix", "all", "--scale", "1.0,1.5", "--seeds", 2, "--rule", "all", "--out", out)
    rules = {"replanning", "events", "rounds of 5, eager", "deadline", "resolution"}
    rules |= {f"degree {degree}" for degree in (1, 2, 4, 8)}
    assert all(word in shown for word in (*rules, "uniform", "skewed", "bound", "±", "P99"))
    told = runs(out)
    assert len(told) == 2 * 2 * 2 * len(rules)
    assert {run["rule"] for run in told} == rules
    assert all(run["attainment"] <= run["bound"] for run in told)  # type: ignore[operator]  # numbers
    rows = list(csv.DictReader((out / "rows.csv").read_text().splitlines()))
    assert len(rows) == 12 * len(told)
    met = sum(row["met"] == "True" for row in rows)
    assert met == sum(run["met"] for run in told)  # type: ignore[misc]  # numbers
    assert len((out / "runs.csv").read_text().splitlines()) == 1 + len(told)
    kinds = ("attainment_by_scale", "latency_cdf", "attainment_by_side")
    assert {path.name for path in out.glob("*.svg")} == {f"{k}_{mix}.svg" for k in kinds for mix in SizeMix}


@pytest.mark.slow
def test_each_option_of_a_rule_makes_a_run_of_its_own(tmp_path: Path) -> None:
    ours = ["--without", "waits,ageing,short_steps"]
    rounds = ["--round-steps", "1,5", "--ties", "fewest", "--rounds-without", "fill,scale_up"]
    run(*QUICK, "--rule", "replanning,rounds", *ours, *rounds, "--no-bound", "--out", tmp_path)
    names = [told["rule"] for told in runs(tmp_path) if told["scale"] == 1.0]
    assert names == [
        "replanning",
        "replanning without waits",
        "replanning without ageing",
        "replanning without short_steps",
        "rounds of 1, fewest",
        "rounds of 5, fewest",
    ]
