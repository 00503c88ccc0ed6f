"""`giornata simulate`: its options, tables and files."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import pytest
from click.testing import CliRunner

from giornata_tools.cli.app import cli

QUICK = ["simulate", "--duration", "20", "--warmup", "0", "--rate", "1,2", "--workers", "2"]


def run(*flags: object, status: int = 0) -> str:
    result = CliRunner().invoke(cli, [*map(str, flags)])
    assert result.exit_code == status, result.output
    return result.output


def test_jobs_have_the_adapters_that_options_say() -> None:
    alone = [*QUICK, "--rate", 1, "--policy", "finish_time", "--no-bound"]
    several = [*alone, "--seeds", 8]  # of twenty jobs, one run's few loads are chance
    hurried = [*several, "--adapters", "katz-b", "--loras", 5, "--encode-ms", 300, "--store-gb-per-s", 0.2]
    small = [*hurried, "--lora-device-gb", 0, "--lora-memory-gb", 0, "--lora-disk-gb", 0]

    def figures(*flags: object) -> tuple[float, str, float]:
        """Median latency, share of LoRAs that were near, seconds that rows waited for LoRAs."""
        head, line = (line for line in run(*flags).splitlines() if "jobs/s" in line or "finish_time" in line)

        def cell(name: str) -> str:
            """What stands below a heading, both at the column's right edge."""
            end = head.index(name) + len(name)
            return line[:end].rpartition("  ")[2].strip() if line[end - 1].strip() else ""

        return float(cell("P50")), cell("LoRAs near").removesuffix("%"), float(cell("LoRA wait") or "nan")

    assert figures(*alone)[1] == "", "no job has any"
    near, blind = figures(*hurried), figures(*hurried, "--blind")
    assert float(near[1]) > float(blind[1])
    assert near[2] < blind[2]
    assert figures(*small)[2] > 1.2 * near[2], "each comes from the store"
    assert figures(*hurried, "--controlnet-gb", 3)[0] > 1.1 * near[0]


def test_a_trace_is_replayed(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("timestamp,mask_ratio,steps,n\n0,0.1,10,1\n5,0.1,10,2\n")
    run("simulate", "--trace", trace, "--warmup", 0, "--policy", "finish_time", "--out", tmp_path)
    (told,) = json.loads((tmp_path / "report.json").read_text())["runs"]
    assert (told["jobs"], told["pictures"]) == (2, 3)


def test_windows_of_a_trace_are_compared_one_by_one(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    times = [*range(4), *range(10, 16), *range(30, 38)]
    trace.write_text("\n".join(["timestamp,n", *(f"{at_s},8" for at_s in times)]))
    windows = ["--trace", trace, "--window", 10, "--seeds", 2, "--warmup", 0, "--rate", 2, "--workers", 2]
    told = run("simulate", *windows, "--policy", "request_level,finish_time", "--out", tmp_path)
    runs = json.loads((tmp_path / "report.json").read_text())["runs"]
    assert [(one["jobs"], one["pictures"]) for one in runs] == [(6, 6), (6, 6), (8, 8), (8, 8)]
    policies = [
        [one["p95_s"] for one in runs if one["policy"] == name] for name in ("request_level", "finish_time")
    ]
    more = fmean(new / old - 1 for old, new in zip(*policies, strict=True))
    assert f"{more:+.1%} ±" in told.partition("Beside request_level")[2]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--find-workers"], "--find-workers needs --slo"),
        (["--window", "60"], "--window needs --trace"),
        (["--policy", "best"], "no policy is called best; there are round_robin"),
        (["--rate", "0"], "no rate above 0"),
        (
            ["--machine", "none.json"],
            "h800-flux, flashps-flux, h100 or a file of `giornata profile`",
        ),
        (["--warmup", "0", "--duration", "0.001"], "no job arrives"),
    ],
)
def test_mistakes_are_told(flags: list[str], told: str) -> None:
    result = CliRunner().invoke(cli, ["simulate", *flags])
    assert result.exit_code in {1, 2}
    assert told in " ".join(result.output.split())
