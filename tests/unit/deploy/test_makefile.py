"""The Makefile, by what it would run: `make --dry-run` in a folder that only looks like a checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CUDA = "https://download.pytorch.org/whl/cu130"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A path with a space in it, without git and without an environment."""
    folder = tmp_path / "a checkout"
    names = [
        "Makefile",
        "constraints.txt",
        "requirements-dev.txt",
        "shared/pyproject.toml",
        "deploy/lab/pyproject.toml",
        "deploy/tools/pyproject.toml",
    ]
    names += [str(path.relative_to(ROOT)) for path in ROOT.glob("services/*/pyproject.toml")]
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    (folder / ".venv").mkdir()
    return folder


def would_run(checkout: Path, *arguments: str) -> str:
    env = {
        name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "TORCH_", "ARGS"))
    }
    made = subprocess.run(
        [shutil.which("make") or "make", "--dry-run", *arguments],
        cwd=checkout,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    return made.stdout


def test_a_fresh_clone_gets_torch_for_cpus_and_all_nine_distributions(checkout: Path) -> None:
    commands = would_run(checkout, "demo")
    assert "+cpu" in commands
    assert commands.count("--editable ") == 9
    assert commands.rstrip().endswith(".venv/bin/giornata demo")


def test_one_variable_chooses_the_build_of_torch(checkout: Path) -> None:
    commands = would_run(checkout, "setup", f"TORCH_INDEX={CUDA}")
    assert f"--index-url {CUDA} torch==" in commands
    assert "+cu130" in commands
    assert "+cpu" not in commands


def test_later_commands_keep_the_build_that_setup_was_asked_for(checkout: Path) -> None:
    ready = checkout / ".venv" / ".ready-cu130"
    ready.write_text(f"{CUDA}\n")
    assert would_run(checkout, "up", "ARGS=--denoisers 2").splitlines() == [
        ".venv/bin/giornata up --denoisers 2"
    ]
    os.utime(ready, (0, 0))  # older than the pins: set up again, the same build
    assert "+cu130" in would_run(checkout, "up")
