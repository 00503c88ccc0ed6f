"""Which door is meant; and that no secret is shown."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from giornata.wire.subjects import NatsRole
from giornata_tools.cli import options
from giornata_tools.clients.edits import (
    LOCAL_GATEWAY,
    LOCAL_NATS,
    choose_door,
    gateway_url,
    nats_urls,
    without_password,
)
from giornata_tools.connection import FILE, StackAddresses, published, running
from tests.present import present

SECRETS = st.text(
    st.characters(codec="ascii", exclude_characters=",", categories=["L", "N", "P", "S"]), min_size=4
).map("secret".__add__)


@pytest.mark.parametrize(
    ("url", "nats", "typed", "expected"),
    [
        (None, None, "", LOCAL_GATEWAY),
        ("http://a:1/", None, "", "http://a:1"),
        ("https://a/under/", None, "url", "https://a/under"),
        (None, "nats://n:1", "", "nats://n:1"),
        ("http://a:1", "nats://n:1", "", "http://a:1"),
        ("http://a:1", "nats://n:1", "nats_url", "nats://n:1"),
        ("http://a:1", "nats://n:1", "url", "http://a:1"),
    ],
)
def test_what_is_typed_goes_before_the_environment(
    url: str | None, nats: str | None, typed: str, expected: str
) -> None:
    assert choose_door(url, nats, {typed}) == expected


def test_two_doors_are_one_too_many() -> None:
    with pytest.raises(ValueError, match="--url and --nats"):
        choose_door("http://a", "nats://n", {"url", "nats_url"})


@pytest.mark.parametrize(
    "url", ["localhost:8000", "127.0.0.1", "nats://a:4222", "http://", "file:///a", "http://a:99999"]
)
def test_what_is_no_gateways_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="not the address of a gateway"):
        gateway_url(url)


@pytest.mark.parametrize("url", ["127.0.0.1:4222", "http://a", "nats://", "nats://a:99999", "nats://a,b:1"])
def test_what_is_no_nats_servers_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="not the address of a NATS server"):
        choose_door(None, url)
    assert nats_urls("nats://u:p@a:1, tls://b:2") == "nats://u:p@a:1, tls://b:2"


@given(SECRETS, st.sampled_from(["nats", "redis", "https", "unix"]))
def test_no_secret_is_shown(secret: str, scheme: str) -> None:
    for url, place in (
        (f"{scheme}://user:{secret}@host:1/2", "@host:1/2"),
        (f"{scheme}://{secret}@host:1", "@host:1"),
        (f"user:{secret}@host", "@host"),
        (f"nats://a:1,{scheme}://u:{secret}@b:2", "@b:2"),
        (f"{scheme}://host:1?password={secret}", ""),
    ):
        shown = without_password(url)
        assert secret not in shown
        assert shown.endswith(place)


HERE = StackAddresses(
    "http://127.0.0.1:4711",
    "nats://127.0.0.1:4712",
    "unix:///run/valkey.sock",
    {"observer": "/users/observer"},
)
HOLDER = """
import sys, time
from pathlib import Path
from giornata_tools.connection import StackAddresses, published
with published(Path(sys.argv[1]), StackAddresses("http://127.0.0.1:1", "nats://127.0.0.1:2", "unix:///v", {})):
    print("published", flush=True)
    sys.stdin.read()
"""


@click.command()
@options.user_options(NatsRole.OBSERVER, "that tell")
def logged_in(url: str | None, password_file: Path | None) -> None:
    """Print the login of a command."""
    servers, password, blobs = options.login_of(url, password_file, NatsRole.OBSERVER)
    click.echo(json.dumps([servers, password and str(password), blobs]))


@click.command()
@options.door_options
@click.pass_context
def through(ctx: click.Context, url: str | None, nats_url: str | None, blobs_url: str | None) -> None:
    """Print the door of a command."""
    assert blobs_url is None
    click.echo(json.dumps(options.door_of(ctx, url, nats_url)))


def told(command: click.Command, *words: str, **env: str) -> object:
    done = CliRunner().invoke(command, words, env=env, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_the_file_is_its_owners_and_goes_with_the_stack(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        with published(tmp_path, HERE):
            assert running(tmp_path) == HERE
            assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600
    finally:
        os.umask(old)
    assert running(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_stack_has_left_is_ignored_and_replaced(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert present(holder.stdout).readline() == b"published\n"
        found = present(running(tmp_path))
        assert found.url == "http://127.0.0.1:1"
        holder.send_signal(signal.SIGKILL)
    assert (tmp_path / FILE).exists()
    assert running(tmp_path) is None
    with published(tmp_path, HERE):
        assert running(tmp_path) == HERE


@pytest.mark.parametrize("text", ["", "{", "[]", '{"url": "http://a"}'])
def test_a_file_of_another_form_is_no_stack(tmp_path: Path, text: str) -> None:
    with published(tmp_path, HERE):
        (tmp_path / FILE).write_text(text)
        assert running(tmp_path) is None


def test_commands_find_the_running_stack_and_what_is_named_goes_before_it(tmp_path: Path) -> None:
    state = ("--state", str(tmp_path))
    assert told(logged_in, *state) == [LOCAL_NATS, None, None]
    assert told(through, *state) == LOCAL_GATEWAY
    with published(tmp_path, HERE):
        assert told(logged_in, *state) == [HERE.nats_url, "/users/observer", HERE.blobs_url]
        assert told(logged_in, GIORNATA_STATE=str(tmp_path)) == told(logged_in, *state)
        assert told(logged_in, *state, "--nats", "nats://n:1") == ["nats://n:1", None, None]
        assert told(logged_in, *state, GIORNATA_NATS_URL="nats://n:1") == ["nats://n:1", None, None]
        assert told(through, *state) == HERE.url
        assert told(through, *state, GIORNATA_URL="http://g:1") == "http://g:1"
        assert told(through, *state, GIORNATA_NATS_URL="nats://n:1") == "nats://n:1"
        assert told(through, *state, "--url", "http://g:1", GIORNATA_NATS_URL="nats://n:1") == "http://g:1"
