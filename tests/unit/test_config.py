"""Configuration: flags over environment over defaults, every mistake at once, no secret in a report."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.settings.__main__ import SERVICES, page
from giornata.config import _GONE, ServiceConfig, constants, load
from giornata_router.config import RouterConfig
from tests.configs import configured


def test_a_flag_wins_over_the_environment_and_that_over_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIORNATA_DRAIN_S", "7")
    monkeypatch.setenv("GIORNATA_QUEUE_LIMIT", "11")
    config = load(RouterConfig, "router", ["--queue-limit", "12"])
    assert (config.drain_s, config.queue_limit, config.telemetry_hz) == (7, 12, 4)


def test_a_password_has_one_place(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GIORNATA_NATS_PASSWORD_FILE", "/run/password")
    config = load(ServiceConfig, "router", ["--nats-url", "nats://a:1,nats://b:2"])
    assert config.nats_password_file == Path("/run/password")
    with pytest.raises(SystemExit):
        load(ServiceConfig, "router", ["--nats-url", "nats://a:1,nats://me:s3cret@b:2"])
    report = capsys.readouterr().err
    assert "GIORNATA_NATS_PASSWORD_FILE" in report
    assert "s3cret" not in report


def test_every_start_is_another_instance_unless_named() -> None:
    first, second = load(ServiceConfig, "router", []), load(ServiceConfig, "router", [])
    assert first.instance != second.instance
    assert first.instance.startswith("router-")
    assert load(ServiceConfig, "router", ["--instance", "r1"]).instance == "r1"


def test_every_mistake_is_in_one_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GIORNATA_QUEUE_LIMIT", "many")
    with pytest.raises(SystemExit) as ended:
        load(RouterConfig, "router", ["--policy", "astrology", "--telemetry-hz", "0"])
    report = capsys.readouterr().err
    assert ended.value.code == 2
    assert "3 configuration mistake(s)" in report
    for name in (
        "GIORNATA_QUEUE_LIMIT / --queue-limit",
        "'many'",
        "--policy",
        "finish_time",
        "--telemetry-hz",
    ):
        assert name in report


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--nats-url", "localhost:4222"),
        ("--nats-url", "nats://u:s3cret@a:4222,http://b"),
        ("--nats-url", "nats://a:port"),
        ("--blobs-url", "http://s3cret@a"),
        ("--blobs-url", "redis://a:99999"),
        ("--blobs-url", "unix://"),
        ("--blobs-url", "s3://"),
        ("--blobs-url", "s3://key:s3cret@bucket"),
        ("--blobs-url", "s3://bucket?secret=s3cret"),
        ("--blobs-url", "s3://bucket?endpoint=http://k:s3cret@host"),
        ("--blobs-url", "s3://bucket?endpoint=host:9000"),
        ("--blobs-url", "s3://bucket/a/../b"),
    ],
)
def test_an_address_that_is_none_is_a_mistake_and_its_password_is_not_shown(
    flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        load(ServiceConfig, "router", [flag, value])
    report = capsys.readouterr().err
    assert flag in report
    assert "s3cret" not in report


def test_an_unknown_flag_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        load(RouterConfig, "router", ["--quue-limit", "12"])
    assert ended.value.code == 2
    assert "--quue-limit" in capsys.readouterr().err


def test_what_is_fixed_is_no_setting(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert {"prepared_rows", "stall_factor"} <= constants(RouterConfig)
    monkeypatch.setenv("GIORNATA_PREPARED_ROWS", "3")
    with pytest.raises(SystemExit, match="2"):
        load(RouterConfig, "router", [])
    assert "GIORNATA_PREPARED_ROWS" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        load(RouterConfig, "router", ["--stall-factor", "2"])
    monkeypatch.setenv("GIORNATA_PREPARED_ROWS", "")  # as Compose passes on what the host has not
    assert configured(RouterConfig, prepared_rows=3).prepared_rows == 3
    assert load(RouterConfig, "router", []).prepared_rows == 64


def test_the_page_of_settings_is_made_of_them() -> None:
    assert Path("docs/settings.md").read_text() == page()


def test_settings_are_few() -> None:
    """What a user could not choose well is a constant, or follows from the machine."""
    assert 50 < page().count("| `GIORNATA_") <= 70


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("GIORNATA_TEMPLATE_FOLDER", "GIORNATA_CACHE_FOLDER took its place"),
        ("GIORNATA_QUEUE_LIMIT_BATCH", "GIORNATA_QUEUE_LIMIT took its place"),
        ("GIORNATA_CELL", "no setting, but fixed"),
        ("GIORNATA_ADAPTER_PLAN", "no setting, but fixed"),
    ],
)
def test_a_setting_that_went_is_refused_and_names_the_one_that_took_its_place(
    name: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An instance of another cell must not join the fleet of the cell that is left."""
    monkeypatch.setenv(name, "7")
    with pytest.raises(SystemExit):
        load(ServiceConfig, "router", [])
    assert f"{name}: " in (report := capsys.readouterr().err)
    assert told in report
    monkeypatch.setenv(name, "")
    load(ServiceConfig, "router", [])
    known = {field for config in SERVICES.values() for field in config.model_fields}
    assert {successor for successor in _GONE.values() if successor} <= known


def test_help_says_what_each_flag_does(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        load(RouterConfig, "router", ["--help"])
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "--queue-limit" in text
    assert "more are refused" in text


def test_configuration_is_frozen() -> None:
    config = load(ServiceConfig, "router", [])
    with pytest.raises(ValueError, match="frozen"):
        config.nats_url = "nats://elsewhere"  # type: ignore[misc]  # that it is refused is the point
