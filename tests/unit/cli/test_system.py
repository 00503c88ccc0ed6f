"""``giornata up``, ``demo``, ``quality`` and ``profile``: flags and variables reach what runs, in this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from giornata.families import Family
from giornata.wire.requests import Reuse
from giornata_denoiser.profiling import __main__ as profiler
from giornata_lab.demo.demo import DemoOptions
from giornata_lab.quality.evaluation import QualityOptions
from giornata_tools import checkout
from giornata_tools.cli import system as module
from giornata_tools.cli.app import cli
from giornata_tools.cli.system import THREADS, profile
from giornata_tools.launcher import up
from giornata_tools.launcher.up import UpOptions, idle
from giornata_tools.lora_profiler.profiler import profiling


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Name of each program that ran, its options, and what `up` does beside the stack; each ends with 7."""
    found: list[tuple[Any, ...]] = []

    def run(name: str, main: Callable[..., Coroutine[Any, Any, int]]) -> int:
        found.append((name, main.args[0], *main.args[2:]))  # type: ignore[attr-defined]  # a partial
        return 7

    monkeypatch.setattr(up, "run", run)
    for name in ("HOST", "PORT", "NATS_URL"):
        monkeypatch.delenv(f"GIORNATA_{name}", raising=False)
    return found


def test_up_takes_its_flags_and_ends_with_the_stacks_status(ran: list[tuple[Any, ...]]) -> None:
    words = "up --denoisers 2 --nats-servers 3 --family flux-fill --port 0 --devices cpu,cpu --state /a/state"
    assert CliRunner().invoke(cli, words.split()).exit_code == 7
    options = UpOptions(
        host="127.0.0.1",
        port=0,
        denoisers=2,
        routers=1,
        prepost=1,
        nats_servers=3,
        torch_threads=1,
        family=Family.FLUX_FILL,
        devices="cpu,cpu",
        state=Path("/a/state"),
    )
    assert ran == [("up", options, idle)]


def test_up_takes_several_models_or_a_family(ran: list[tuple[Any, ...]]) -> None:
    CliRunner().invoke(cli, ["up", "--model", "a/folder", "--model", "b=c d", "--profile-loras"])
    [(_, options, beside)] = ran
    assert (options.models, beside) == (("a/folder", "b=c d"), profiling)
    refused = CliRunner().invoke(cli, ["up", "--model", "a", "--family", "sd"])
    assert (refused.exit_code, len(ran)) == (2, 1)
    assert "leave it or --model out" in refused.output


def test_demo_takes_its_flags(ran: list[tuple[Any, ...]]) -> None:
    assert CliRunner().invoke(cli, ["demo", "--steps", "2", "--out", "x", "--no-oracle"]).exit_code == 7
    options = DemoOptions(family=None, torch_threads=1, out=Path("x"), steps=2, seed=7, no_oracle=True)
    assert ran == [("demo", options)]


def test_quality_takes_its_flags(ran: list[tuple[Any, ...]]) -> None:
    assert CliRunner().invoke(cli, ["quality", "--reuse", "off", "--nats", "nats://a:1"]).exit_code == 7
    [(name, options)] = ran
    assert isinstance(options, QualityOptions)
    assert (name, options.reuse, options.nats, options.in_flight) == ("quality", Reuse.OFF, "nats://a:1", 8)


@pytest.mark.parametrize(
    "arguments",
    [
        ["up", "--nats-servers", "2"],
        ["up", "--denoisers", "0"],
        ["demo", "--steps", "-1"],
        ["up", "--family", "pixart"],
        ["quality", "--reuse", "sometimes"],
    ],
)
def test_a_mistake_in_the_command_line_ends_with_2(arguments: list[str], ran: list[tuple[Any, ...]]) -> None:
    assert CliRunner().invoke(cli, arguments).exit_code == 2
    assert ran == []


@pytest.mark.parametrize("command", ["up", "demo", "quality"])
def test_without_a_checkout_it_says_what_to_do(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkout, "find", lambda: None)
    done = CliRunner().invoke(cli, [command])
    assert done.exit_code == 1
    assert "Clone the repository" in done.output
    assert "docker compose" in done.output


# ``giornata profile``: the profiler gets what was said, and a user who cannot run it is told why.


@pytest.fixture
def profiled(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The profiler's flags, each time it profiled; it ends with 7."""
    flags: list[list[str]] = []

    def main(given: list[str]) -> int:
        flags.append(given)
        return 7

    monkeypatch.setattr(profiler, "main", main)
    monkeypatch.delenv("GIORNATA_MODEL", raising=False)
    for name in THREADS:  # the command sets them for good
        monkeypatch.setenv(name, os.environ.get(name, "1"))
    return flags


def test_options_and_threads_reach_the_profiler(profiled: list[list[str]]) -> None:
    words = ["--model", "m", "--device", "cpu", "--torch-threads", "3", "-o", "p.json", "--quick"]
    assert CliRunner().invoke(profile, [*words, "--least-r2", "0.8"]).exit_code == 7
    flags = ["--model", "m", "--device", "cpu", "--dtype", "auto", "--out", "p.json", "--least-r2", "0.8"]
    assert profiled == [[*flags, "--quick"]]
    assert [os.environ[name] for name in THREADS] == ["3"] * 3


def test_devices_of_a_pool_reach_the_profiler(profiled: list[list[str]]) -> None:
    CliRunner().invoke(profile, ["--model", "m", "--devices", "cpu,cpu", "-o", "p.json"])
    assert profiled[0][profiled[0].index("--devices") + 1] == "cpu,cpu"


def test_in_a_checkout_model_and_file_are_its_own(profiled: list[list[str]]) -> None:
    CliRunner().invoke(profile, [])
    root = Path(__file__).parents[3]
    assert str(root / "deploy" / "model" / "fresco") in profiled[0]
    assert str(root / ".giornata" / "profile.json") in profiled[0]
    assert "--quick" not in profiled[0]


def test_ctrl_c_ends_with_130(profiled: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(_: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(profiler, "main", stopped)
    assert (CliRunner().invoke(profile, []).exit_code, profiled) == (130, [])


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
