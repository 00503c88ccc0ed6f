"""The Makefile, by what it would run, in a folder that only looks like a checkout; and `make images`, which runs."""

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
    kinds = "Makefile", "constraints.txt", "requirements-dev.txt", "*/pyproject.toml", "*/*/pyproject.toml"
    for name in (str(path.relative_to(ROOT)) for kind in kinds for path in ROOT.glob(kind)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    (folder / ".venv").mkdir()
    return folder


def make(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What make says there, whatever variables this run has been given."""
    ours = ("MAKE", "TORCH_", "ARGS", "PROFILE")
    env = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return subprocess.run(
        ["make", *arguments],  # noqa: S607 - by the path of this test
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )


def would_run(checkout: Path, *arguments: str) -> str:
    made = make(checkout, "--dry-run", *arguments)
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


def fake(folder: Path, name: str, version: str | None, words: str = "") -> None:
    """A program `name` whose Compose, called with `words` first, tells `version`; it writes down how it is called."""
    told = "exit 1" if version is None else f"echo {version}"
    program = folder / name
    program.write_text(
        f'#!/bin/sh\nif [ "$*" = "{words}version --short" ] || [ "$*" = "{words}version" ]; then {told}; exit; fi\n'
        f'echo "{name} $*" >>"{folder}/calls"\n'
        f'case "$*" in *--images) echo giornata/router:1; echo nats:2; echo giornata/router:1;; esac\n'
    )
    program.chmod(0o755)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs, the only one but those of the system that make and sh need."""
    folder = tmp_path / "programs"
    folder.mkdir()
    for name in ("sh", "make", "sed", "cat", "grep", "sort", "uname", "env"):
        if found := shutil.which(name):
            (folder / name).symlink_to(found)
    monkeypatch.setenv("PATH", str(folder))
    return folder


@pytest.mark.parametrize(("name", "words"), [("docker", "compose "), ("docker-compose", "")])
def test_one_command_builds_all_images_and_names_them(programs: Path, name: str, words: str) -> None:
    fake(programs, name, "2.26.1", words)
    done = make(ROOT, "--silent", "images", "PROFILE=gpu")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "giornata/router:1\n"
    files = f"{name} {words}-f deploy/compose.yaml --profile gpu --profile profiling"
    assert (programs / "calls").read_text().splitlines() == [f"{files} build", f"{files} config --images"]


def test_without_compose_it_says_what_it_needs(programs: Path) -> None:
    done = make(ROOT, "--silent", "images")
    assert done.returncode != 0
    assert "make images needs a Docker engine and docker compose 2.20 or newer" in done.stderr
    assert list(programs.glob("calls")) == []
