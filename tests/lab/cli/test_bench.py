"""``giornata bench``: its options, and mistakes in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from giornata_lab.baseline.server import BaselineOptions
from giornata_lab.loadgen.driver import generated
from giornata_tools.checkout import TRAINED
from giornata_tools.cli.app import cli
from giornata_tools.launcher import up

NOBODY = ("--url", "http://127.0.0.1:1")
"""No server listens there: a run that begins says so."""


def serve(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["bench", "serve", *NOBODY, *arguments])


@pytest.mark.parametrize(
    ("option", "text"),
    [
        *(("--rate", text) for text in ("", "0", "-1", "1,,2", "fast", "nan", "inf")),
        *(("--masks", text) for text in ("0", "1.1", "nan", "private")),
        *(("--steps", text) for text in ("0", "201", "some", "1.5")),
        *(("-n", text) for text in ("0", "11", "server")),
        *(("--picture-size", text) for text in ("512", "8x8", "512x9999", "axb")),
    ],
)
def test_a_value_that_is_none_is_told_with_its_option_and_what_was_typed(option: str, text: str) -> None:
    done = serve(option, text)
    assert done.exit_code == 2
    assert f"Invalid value for '{option}" in done.output
    assert text in done.output


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--speed", "2"], "--speed belongs to --trace"),
        (["--trace", "TRACE", "--rate", "2"], "leave out --rate"),
        (["--trace", "TRACE", "--duration", "2"], "leave out --duration"),
        (["--trace", "BAD"], "line 2: timestamp"),
        (["--trace", "OTHER"], "does not end with .csv or .jsonl"),
        (["--trace", "TRACE", "--warmup", "100"], "no request of the trace is due"),
        (["--rate", "0.001", "--duration", "1"], "no request of 0.001 requests a second is due"),
        (["--field", "seed"], "seed is not of the form NAME=VALUE"),
        (["--field", "seed=1"], "seed is set twice, or has an option of its own"),
        (["--field", "halo=1", "--field", "halo=2"], "halo is set twice"),
        (["--api", "openai", "--steps", "8"], "--api openai has no field for steps"),
        (["--images", "EMPTY"], "no file in"),
        (["--images", "PICTURES", "--trace", "TRACE"], "edits template 3; the folder's last is 0"),
        (["--images", "UNREADABLE"], "picture 0: it is no picture"),
        (["--url", "localhost:8000"], "not the address of a gateway"),
        (["--against", "localhost:8000"], "not the address of a gateway"),
    ],
)
def test_a_mistake_in_the_command_line_ends_with_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "TRACE.csv").write_text("timestamp,template\n0.5,3\n")
    (tmp_path / "BAD.csv").write_text("timestamp\nsoon\n")
    (tmp_path / "OTHER.txt").write_text("timestamp\n1\n")
    for name in ("EMPTY", "PICTURES", "UNREADABLE"):
        (tmp_path / name).mkdir()
    (tmp_path / "PICTURES" / "a.png").write_bytes(generated(32, 32, 0))
    (tmp_path / "UNREADABLE" / "a.png").write_text("text")
    files = {"TRACE": "TRACE.csv", "BAD": "BAD.csv", "OTHER": "OTHER.txt"}
    done = serve("--warmup", "0", *(files.get(argument, argument) for argument in arguments))
    assert (done.exit_code, told in " ".join(done.output.split())) == (2, True), done.output
    assert not (tmp_path / "out").exists()


def test_a_server_that_is_not_there_ends_with_1_and_no_figures(tmp_path: Path) -> None:
    done = serve("--rate", "20", "--duration", "1", "--warmup", "0", "--out", str(tmp_path / "out"))
    assert (done.exit_code, "[not_connected]" in done.output) == (1, True), done.output
    assert "giornata at http://127.0.0.1:1 does not answer an edit with a picture" in done.output


def test_a_folder_that_takes_no_files_is_told_before_anything_is_sent() -> None:
    done = serve("--rate", "20", "--duration", "1", "--out", "/sys/nowhere")
    assert (done.exit_code, "[output_not_written]" in done.output) == (1, True), done.output


def test_the_baseline_takes_its_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, Any]] = []

    def run(name: str, main: Any) -> int:
        ran.append((name, main.args[0]))
        return 7

    monkeypatch.setattr(up, "run", run)
    monkeypatch.delenv("GIORNATA_MODEL", raising=False)
    done = CliRunner().invoke(cli, ["bench", "baseline", "--batch", "2", "--torch-threads", "1"])
    assert done.exit_code == 7
    usual = {
        "host": "127.0.0.1",
        "port": 8100,
        "window_ms": 100.0,
        "queue": 1000,
        "device": "auto",
        "dtype": "auto",
    }
    assert ran == [("baseline", BaselineOptions(model=str(TRAINED), batch=2, torch_threads=1, **usual))]  # type: ignore[arg-type]  # of several types
