"""``giornata profile``: the profiler gets what was said, and who cannot run it is told why."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from giornata_tools.cli import checkout
from giornata_tools.cli import profile as module
from giornata_tools.cli.profile import profile, profiler


def test_options_and_threads_reach_the_profiler() -> None:
    command, env = profiler(
        "model", Path("p.json"), {"HOME": "h"}, device="cpu", dtype="auto", torch_threads=3, quick=True
    )
    assert command == [
        sys.executable, "-P", "-m", "giornata_denoiser.profiling",
        "--model", "model", "--device", "cpu", "--dtype", "auto", "--out", "p.json", "--quick",
    ]  # fmt: skip
    assert (env["HOME"], env["OMP_NUM_THREADS"]) == ("h", "3")
    again, _ = profiler("m", Path("p"), {}, device="cpu", dtype="auto", torch_threads=1, quick=False)
    assert "--quick" not in again


def test_in_a_checkout_model_and_file_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(os, "execve", lambda _, command, __: ran.append(command))
    monkeypatch.delenv("GIORNATA_MODEL", raising=False)
    assert CliRunner().invoke(profile, []).exit_code == 0
    root = Path(__file__).parents[3]
    assert str(root / "deploy" / "model" / "fresco") in ran[0]
    assert str(root / ".giornata" / "profile.json") in ran[0]


def test_elsewhere_model_and_file_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkout, "find", lambda: None)
    done = CliRunner().invoke(profile, ["--model", "m"])
    assert done.exit_code == 2
    assert "--out" in done.output


def test_without_a_denoiser_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda _: None)
    done = CliRunner().invoke(profile, [])
    assert done.exit_code == 1
    assert "make setup" in done.output


def test_the_command_loads_nothing_that_computes() -> None:
    code = "import sys, giornata_tools.cli.profile; print(*sorted({'torch', 'numpy', 'scipy'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.slow
def test_a_model_that_is_none_is_told_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text("{}")
    command, _ = profiler(
        str(tmp_path), tmp_path / "p.json", {}, device="cpu", dtype="auto", torch_threads=1, quick=True
    )
    done = subprocess.run(
        [part for part in command if part != "-P"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "giornata-profile: The model" in done.stderr
    assert "Traceback" not in done.stderr
