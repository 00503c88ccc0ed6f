"""``giornata profile``: the profiler gets what was said, and a user who cannot run it is told why."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from giornata_denoiser.profiling import __main__ as profiler
from giornata_tools import checkout
from giornata_tools.cli import profile as module
from giornata_tools.cli.profile import THREADS, profile


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The profiler's flags, each time it ran; it ends with 7."""
    flags: list[list[str]] = []

    def main(given: list[str]) -> int:
        flags.append(given)
        return 7

    monkeypatch.setattr(profiler, "main", main)
    monkeypatch.delenv("GIORNATA_MODEL", raising=False)
    for name in THREADS:  # the command sets them for good
        monkeypatch.setenv(name, os.environ.get(name, "1"))
    return flags


def test_options_and_threads_reach_the_profiler(ran: list[list[str]]) -> None:
    words = ["--model", "m", "--device", "cpu", "--torch-threads", "3", "-o", "p.json", "--quick"]
    assert CliRunner().invoke(profile, [*words, "--least-r2", "0.8"]).exit_code == 7
    flags = ["--model", "m", "--device", "cpu", "--dtype", "auto", "--out", "p.json", "--least-r2", "0.8"]
    assert ran == [[*flags, "--quick"]]
    assert [os.environ[name] for name in THREADS] == ["3"] * 3


def test_devices_of_a_pool_reach_the_profiler(ran: list[list[str]]) -> None:
    CliRunner().invoke(profile, ["--model", "m", "--devices", "cpu,cpu", "-o", "p.json"])
    assert ran[0][ran[0].index("--devices") + 1] == "cpu,cpu"


def test_in_a_checkout_model_and_file_are_its_own(ran: list[list[str]]) -> None:
    CliRunner().invoke(profile, [])
    root = Path(__file__).parents[3]
    assert str(root / "deploy" / "model" / "fresco") in ran[0]
    assert str(root / ".giornata" / "profile.json") in ran[0]
    assert "--quick" not in ran[0]


def test_ctrl_c_ends_with_130(ran: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(_: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(profiler, "main", stopped)
    assert (CliRunner().invoke(profile, []).exit_code, ran) == (130, [])


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


def test_a_model_that_is_none_is_told_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model_index.json").write_text("{}")
    words = ["--model", str(tmp_path), "--out", str(tmp_path / "p.json"), "--device", "cpu", "--quick"]
    assert profiler.main(words) == 1
    assert capsys.readouterr().err.startswith("giornata-profile: The model")
