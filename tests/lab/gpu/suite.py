"""The campaign's tests: those of this folder, and all others that need a CUDA device."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from giornata_lab.bench.harness import write
from giornata_lab.rehearsals.gpu.needs import ROOT

KERNELS: Final = ("tests/unit/packed/test_elementwise.py", "tests/unit/packed/test_pages.py")
"""Of Triton's kernels."""
FILES: Final = (
    "tests/lab/gpu",
    "tests/unit/denoiser/engine/test_packing.py",
    "tests/unit/denoiser/attempts/test_previews.py",
    "tests/contract/control_link/test_samples.py",
    *KERNELS,
)
REASON_LINES: Final = 12


class Outcomes:
    """A plugin of pytest that keeps what became of every test."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._counts: dict[str, Counter[str]] = defaultdict(Counter)
        self._why: dict[str, list[str]] = defaultdict(list)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Nothing runs on the CPU alone where there is a GPU."""
        if torch.cuda.is_available():
            items[:] = [item for item in items if _device(item) != "cpu"]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Its call, or whatever kept it from one."""
        path, _, test = report.nodeid.partition("::")
        self._seconds[path] += report.duration
        if report.when == "call" or report.outcome != "passed":
            self._counts[path][report.outcome] += 1
        if report.failed:
            self._why[path].append(f"{test}: {_end(report.longreprtext)}")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be read counts as a test that failed."""
        if report.failed:
            self._counts[report.nodeid]["failed"] += 1
            self._why[report.nodeid].append(_end(report.longreprtext))

    def lines(self) -> list[dict[str, Any]]:
        """One of each file, with the ends of its failures."""
        return [
            {
                "file": path.removeprefix("tests/"),
                **{outcome: counts[outcome] for outcome in ("passed", "failed", "skipped")},
                "s": round(self._seconds[path], 1),
                "failures": "\n".join(self._why[path]),
            }
            for path, counts in self._counts.items()
        ]


def main(arguments: Sequence[str]) -> int:
    """Run the files that are named, by default all but `parts.PROCESSES`; print, write ``suite.json``."""
    outcomes = Outcomes()
    flags = ["--config-file", "tests/lab/gpu/campaign.ini", "--rootdir", ".", "-p", "no:cacheprovider"]
    has_gpu = torch.cuda.is_available()
    files = tuple(arguments) or FILES
    if not has_gpu:  # Triton's kernels need a device, or its interpreter
        files = tuple(file for file in files if file not in KERNELS)
    status = pytest.main([*flags, *files], plugins=[outcomes])
    device = torch.cuda.get_device_name() if has_gpu else "cpu"
    if lines := outcomes.lines():
        write("suite", lines, workload={"files": files, "device": device})
    return int(status)


def _device(item: pytest.Item) -> object:
    spec = getattr(item, "callspec", None)
    return None if spec is None else spec.params.get("device")


def _end(text: str) -> str:
    return "\n".join(text.splitlines()[-REASON_LINES:])


if __name__ == "__main__":
    if Path.cwd() != ROOT:
        sys.exit(f"run it in {ROOT}")
    sys.exit(main(sys.argv[1:]))
