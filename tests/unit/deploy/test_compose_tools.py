"""Which Compose builds and tests the images, by programs of fake versions, and what is said where none will do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab.compose import engine
from tests.lab.compose.engine import NoEngine, compose_command
from tests.unit.deploy.test_makefile import checkout, would_run

__all__ = ["checkout"]

ROOT = Path(__file__).parents[3]
PLUGIN, PROGRAM = ("docker", "compose"), ("docker-compose",)


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


@pytest.mark.parametrize(
    ("plugin", "program", "chosen"),
    [
        ("2.20.0", None, PLUGIN),
        ("2.26.1-ds1", "2.30.0", PLUGIN),
        (None, "v2.26.1", PROGRAM),
        ("2.19.1", "2.26.1", PROGRAM),
        ("v5.0.1", None, PLUGIN),
    ],
)
def test_the_plugin_or_the_program_is_taken_whichever_is_new_enough(
    programs: Path, plugin: str | None, program: str | None, chosen: tuple[str, ...]
) -> None:
    fake(programs, "docker", plugin, "compose ")
    if program:
        fake(programs, "docker-compose", program)
    assert compose_command() == chosen


def test_an_old_one_is_refused_by_its_version_and_with_what_to_install(programs: Path) -> None:
    fake(programs, "docker", None, "compose ")
    fake(programs, "docker-compose", "1.29.2")
    with pytest.raises(
        NoEngine, match=r"found docker compose missing, docker-compose 1\.29; apt-get install"
    ):
        compose_command()


def test_missing_programs_are_named_with_what_to_install(
    programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(programs, "docker", "2.26.1", "compose ")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(
        NoEngine, match="missing programs: dockerd, debootstrap, iptables, tar; apt-get install"
    ):
        engine.check_programs()


def test_the_target_fails_where_there_is_no_engine(checkout: Path, programs: Path) -> None:
    assert "GIORNATA_REQUIRE_DOCKER=1" in would_run(checkout, "compose-test")
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "long",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "tests/lab/compose",
    ]
    done = subprocess.run(
        words,
        cwd=ROOT,
        env=os.environ | {"GIORNATA_REQUIRE_DOCKER": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout
    assert "NoEngine: " in done.stdout


@pytest.mark.parametrize(("name", "words"), [("docker", "compose "), ("docker-compose", "")])
def test_one_command_builds_all_images_and_names_them(programs: Path, name: str, words: str) -> None:
    fake(programs, name, "2.26.1", words)
    done = make_images("PROFILE=gpu")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "giornata/router:1\n"
    files = f"{name} {words}-f deploy/compose.yaml --profile gpu --profile profiling"
    assert (programs / "calls").read_text().splitlines() == [f"{files} build", f"{files} config --images"]


def test_without_compose_it_says_what_it_needs(programs: Path) -> None:
    done = make_images()
    assert done.returncode != 0
    assert "make images needs a Docker engine and docker compose 2.20 or newer" in done.stderr
    assert list(programs.glob("calls")) == []


def make_images(*variables: str) -> subprocess.CompletedProcess[str]:
    env = {
        name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "ARGS", "PROFILE"))
    }
    return subprocess.run(
        ["make", "--silent", "images", *variables],  # noqa: S607 - by the path of this test
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
