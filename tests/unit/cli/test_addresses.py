"""Which door is meant, that no secret is shown, and the options of ``giornata edit``."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from giornata.wire.adapters import Annotator, AskedControl, AskedLora
from giornata.wire.requests import EditParameters
from giornata.wire.subjects import NatsRole
from giornata_tools.cli import options, parameters
from giornata_tools.cli.options import option_name
from giornata_tools.cli.parameters import in_order, validated
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


# Options of ``giornata edit``: every field of the request, its limits, its mistakes.


LORA = f"lora_{'0' * 32}"
LORAS = st.builds(AskedLora, id=st.from_regex(r"lora_[0-9a-f]{32}", fullmatch=True), scale=st.floats(-4, 4))


def command(kind: type[BaseModel] = EditParameters) -> click.Command:
    """Prints the value of every option."""

    @click.command(params=parameters.options(kind))
    def show(**values: Any) -> None:
        click.echo(repr(values))

    return show


def test_every_field_is_an_option_with_its_default() -> None:
    made = {option.name: option for option in parameters.options(EditParameters)}
    assert made.keys() == EditParameters.model_fields.keys()
    for name, field in EditParameters.model_fields.items():
        option = made[name]
        assert isinstance(option, click.Option)
        assert option.required == field.is_required()
        if option.multiple:
            assert field.get_default() == ()
        elif not field.is_required():
            assert option.default == field.get_default()
        assert option.help, f"{name} has no description"
        assert option_name(name) in option.opts


CONTROLS = st.builds(
    AskedControl,
    model=st.sampled_from(["outline", "union-1.0"]),
    image=st.integers(0, 2),
    annotator=st.none() | st.sampled_from(Annotator),
    scale=st.floats(0, 4),
    start=st.floats(0, 0.5, exclude_max=True),
    end=st.floats(0.5, 1),
    mode=st.none() | st.integers(0, 63),
)


@settings(max_examples=30)
@given(
    st.builds(
        EditParameters,
        prompt=st.text("a b-c", min_size=1).filter(str.strip),
        n=st.integers(1, 10),
        strength=st.none() | st.floats(0.01, 1),
        mask_blur=st.floats(0, 256),
        grow_mask=st.integers(0, 512),
        seed=st.none() | st.integers(0, 2**32 - 1),
        negative_prompt=st.none(),
        mask_prompt=st.none() | st.just("the hat"),
        loras=st.lists(LORAS, max_size=4, unique_by=lambda lora: lora.id).map(tuple),
        controlnets=st.lists(CONTROLS, max_size=3).map(tuple),
    )
)
def test_what_is_typed_is_what_is_asked(parameters: EditParameters) -> None:
    typed = [
        f"{option_name(name)}={value}"
        for name, value in parameters.model_dump(mode="json", exclude={"loras", "controlnets"}).items()
        if value is not None and not isinstance(value, bool)
    ]
    typed += [option_name("auto_edit")] if parameters.auto_edit else []
    typed += [f"--lora={lora.id}:{lora.scale}" for lora in parameters.loras]
    typed += [f"--controlnet={_typed(control)}" for control in parameters.controlnets]
    with command().make_context("edit", typed) as context:
        assert (
            validated(EditParameters, {k: v for k, v in context.params.items() if v is not None})
            == parameters
        )


def _typed(control: AskedControl) -> str:
    told = control.model_dump(mode="json", exclude={"model"}, exclude_none=True)
    return ",".join([control.model, *(f"{key}={value}" for key, value in told.items())])


def test_controlnets_that_say_not_what_they_see_see_the_images_in_their_order() -> None:
    given: list[dict[str, object]] = [
        {"model": "a"},
        {"model": "b", "annotator": "tile"},
        {"model": "c", "image": 0},
        {"model": "d"},
    ]
    assert [one.get("image") for one in in_order(given, 2)] == [0, None, 0, 1]
    assert [one.get("image") for one in in_order(given, 1)] == [0, None, 0, None]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--strength", "0"], "'--strength'"),
        (["--n", "11"], "'--n'"),
        (["--num-inference-steps", "many"], "'--num-inference-steps'"),
        (["--mask-mode", "red"], "'--mask-mode'"),
        (["--steps", "4"], "No such option"),
        (["--lora", f"{LORA}:strong"], "ID:SCALE"),
        (["--controlnet", "outline,strength=1"], "scale=…"),
        (["--controlnet", "outline,scale=1,scale=2"], "each once"),
        (["--controlnet", "outline,image=first"], "'first' is no number"),
    ],
)
def test_a_mistake_is_a_usage_error_that_names_the_option(arguments: list[str], told: str) -> None:
    done = CliRunner().invoke(command(), ["--prompt", "a hat", *arguments])
    assert done.exit_code == 2
    assert told in done.output


@pytest.mark.parametrize(
    ("given_", "told"),
    [
        ({"prompt": " "}, "--prompt: must not be blank."),
        ({"prompt": "a", "true_cfg_scale": 2.0}, "--negative-prompt: --true-cfg-scale above 1 needs it."),
        ({"prompt": "a", "output_compression": 90}, "--output-compression: applies to jpeg and webp only."),
        ({"prompt": "a", "size": "big", "seed": -1}, "; --seed: "),
        ({"prompt": "a", "controlnets": ({"model": "outline"},)}, "needs image or annotator"),
        ({"prompt": "a", "loras": ({"id": LORA},) * 2}, f"--lora: names {LORA} twice."),
    ],
)
def test_what_only_the_whole_shows_names_options_too(given_: dict[str, object], told: str) -> None:
    with pytest.raises(click.UsageError) as raised:
        validated(EditParameters, given_)
    assert told in raised.value.message


class Switch(BaseModel):
    fast: bool = Field(default=False, description="Be fast.")
    ratio: float = Field(0.5, ge=0, lt=1, description="How much.")


class Odd(BaseModel):
    parts: list[int] = Field([], description="Parts.")


def test_a_boolean_has_two_names_and_limits_may_be_open() -> None:
    assert "True" in CliRunner().invoke(command(Switch), ["--fast"]).output
    assert "False" in CliRunner().invoke(command(Switch), ["--no-fast"]).output
    assert CliRunner().invoke(command(Switch), ["--ratio", "1"]).exit_code == 2
    assert CliRunner().invoke(command(Switch), ["--ratio", "0"]).exit_code == 0


def test_a_field_that_no_option_stands_for_is_noticed() -> None:
    with pytest.raises(TypeError, match="parts"):
        parameters.options(Odd)
