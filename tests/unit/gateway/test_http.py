"""HTTP around requests: what a proxy says of them, frames of streams, fields without effect, ids, errors, a form."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import annotated_types
import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict
from openai._streaming import SSEDecoder
from pydantic import ValidationError
from structlog.testing import capture_logs

import giornata_gateway
from giornata.wire.adapters import MAX_CONTROLNETS, MAX_LORAS, MAX_SCALE, Annotator, LoraWait
from giornata.wire.errors import (
    GiornataError,
    InternalError,
    InvalidField,
    QueueFull,
    ServiceUnavailable,
    StorageFull,
)
from giornata.wire.models import WARMUP, StepCache
from giornata.wire.requests import EditParameters
from giornata_gateway.config import GatewayConfig
from giornata_gateway.http.jobs import HEARTBEAT
from giornata_gateway.http.requests import last_event_id
from giornata_gateway.http.responses import (
    IGNORED,
    NAME_CHARACTERS,
    TOLD,
    PublicOrigin,
    error_answer,
    frame,
    header_value,
    ignore,
    public_origin,
)
from giornata_gateway.http.server import REQUEST_ID, _counted
from giornata_gateway.views.jobs import ErrorDetail, ErrorEvent

LOCAL = GatewayConfig().trusted_proxies
PROTO, PREFIX = "X-Forwarded-Proto", "X-Forwarded-Prefix"


def told(*headers: tuple[str, str], peer: str | None = "127.0.0.1", trusted: str = LOCAL) -> PublicOrigin:
    request = make_mocked_request("GET", "/", CIMultiDict(headers))
    return public_origin(request.clone(remote=peer) if peer else request.clone(remote=""), trusted)


@pytest.mark.parametrize(
    ("headers", "scheme"),
    [
        ([], None),
        ([(PROTO, "https")], "https"),
        ([(PROTO, "HTTPS")], "https"),
        ([(PROTO, "http, https")], "https"),
        ([(PROTO, "javascript"), (PROTO, "https")], "https"),
        ([(PROTO, "https, javascript")], None),
        ([("Forwarded", 'for="[2001:db8::1]:5";proto=https;by=203.0.113.1')], "https"),
        ([("Forwarded", 'for=1.2.3.4;proto=http, for=10.0.0.1; Proto="https"')], "https"),
        ([("Forwarded", "for=1.2.3.4;notproto=https")], None),
        ([("Forwarded", "proto=ftp")], None),
        ([("Forwarded", "proto=http"), (PROTO, "https")], "https"),
    ],
)
def test_the_scheme_is_the_nearest_proxys(headers: list[tuple[str, str]], scheme: str | None) -> None:
    assert told(*headers) == PublicOrigin(scheme, "")


@pytest.mark.parametrize(
    ("text", "prefix"),
    [
        ("/giornata", "/giornata"),
        ("/giornata/", "/giornata"),
        ("/a/b-c_d.e~f", "/a/b-c_d.e~f"),
        ("/client's, /proxy", "/proxy"),
        ("/", ""),
        ("", ""),
        ("giornata", ""),
        ("//evil.example", ""),
        ("/a//b", ""),
        ("/../x", ""),
        ("/a/..", ""),
        ("/a/./b", ""),
        ("/a?b", ""),
        ('/a"><script>', ""),
        ("https://evil.example/", ""),
    ],
)
def test_a_prefix_is_a_path_of_plain_segments(text: str, prefix: str) -> None:
    assert told((PREFIX, text)).prefix == prefix


@pytest.mark.parametrize(
    ("peer", "trusted", "counts"),
    [
        ("127.0.0.1", LOCAL, True),
        ("::1", LOCAL, True),
        ("::ffff:127.0.0.1", LOCAL, True),
        ("10.1.2.3", LOCAL, False),
        ("2001:db8::1", LOCAL, False),
        ("", LOCAL, False),
        ("not an address", LOCAL, False),
        ("127.0.0.1", "", False),
        ("10.1.2.3", "10.0.0.0/8, 2001:db8::/32", True),
        ("2001:db8::1", "10.0.0.0/8, 2001:db8::/32", True),
        ("127.0.0.1", "10.0.0.0/8", False),
    ],
)
def test_only_trusted_networks_count(peer: str, trusted: str, counts: bool) -> None:
    found = told((PROTO, "https"), (PREFIX, "/x"), peer=peer, trusted=trusted)
    assert found == (PublicOrigin("https", "/x") if counts else PublicOrigin())


def test_what_is_no_network_is_a_mistake_of_the_configuration() -> None:
    with pytest.raises(ValidationError, match="trusted_proxies"):
        GatewayConfig.model_validate({"trusted_proxies": "10.0.0.0/8,nginx"})


@given(st.text(), st.none() | st.integers(1, 2**60))
def test_a_frame_is_one_event_whatever_the_text(message: str, sequence: int | None) -> None:
    detail = ErrorDetail(code="x", message=message.encode("utf-8", "replace").decode(), type="server_error")
    lines = frame("error", ErrorEvent(error=detail), sequence).decode().split("\n")
    assert lines[-2:] == ["", ""]
    fields = dict(line.split(": ", 1) for line in lines[:-2])
    assert fields.get("id") == (None if sequence is None else str(sequence))
    assert fields["event"] == "error"
    assert json.loads(fields["data"])["error"]["message"] == detail.message


def test_openais_client_passes_over_heartbeats() -> None:
    assert HEARTBEAT.startswith(b":")
    event = ErrorEvent(error=ErrorDetail(code="x", message="y", type="server_error"))
    sent = [frame("error", event, 7), HEARTBEAT, HEARTBEAT, frame("error", event), HEARTBEAT]
    read = list(SSEDecoder().iter_bytes(iter(sent)))
    assert [one.json()["error"]["code"] for one in read] == ["x", "x"]


def test_last_event_id() -> None:
    assert last_event_id({}) == last_event_id({"Last-Event-ID": ""}) == 0
    assert last_event_id({"Last-Event-ID": "17"}) == 17
    for header in ("-1", "1.0", "x", "9" * 30, "1\n"):
        with pytest.raises(InvalidField):
            last_event_id({"Last-Event-ID": header})


def test_fields_are_told_once_in_their_order_and_logged() -> None:
    request = make_mocked_request("POST", "/v1/images/edits")
    with capture_logs() as logs:
        ignore(request, ["style", "moderation"])
        ignore(request, ["moderation", "eta"])
        ignore(request, [])
    assert header_value(request[IGNORED]) == "style, moderation, eta"
    assert [entry["fields"] for entry in logs] == ["style, moderation", "style, moderation, eta"]


@given(st.lists(st.text(st.characters(), max_size=200), max_size=60))
def test_every_name_makes_a_header_that_is_one_line_of_ascii(names: list[str]) -> None:
    value = header_value(names)
    assert value.isascii()
    assert "\r" not in value
    assert "\n" not in value
    assert value.count(",") <= TOLD
    assert len(value) <= (TOLD + 1) * (3 * NAME_CHARACTERS + 2)
    assert ("more" in value.rpartition(", ")[2]) >= (len(names) > TOLD)


async def test_a_request_has_its_id_though_its_client_has_left() -> None:
    async def answer(_request: web.Request) -> web.Response:
        return web.Response()

    protocol = Mock()
    request = make_mocked_request("GET", "/v1/models", protocol=protocol)
    protocol.transport = None
    with pytest.raises(ConnectionAbortedError):
        await _counted(request, answer)
    assert request[REQUEST_ID].startswith("req_")


# Errors as HTTP answers: their status, and the headers that tell a client what to do.


@pytest.mark.parametrize(
    ("error", "status", "after"),
    [
        (ServiceUnavailable(retry_after_s=2), 503, "2"),
        (ServiceUnavailable(), 503, "1"),
        (StorageFull(retry_after_s=0.2), 503, "1"),
        (QueueFull(retry_after_s=6.1), 429, "7"),
        (QueueFull(), 429, "1"),
        (InternalError(), 500, None),
    ],
)
def test_refusals_that_pass_tell_when_to_come_again(
    error: GiornataError, status: int, after: str | None
) -> None:
    answer = error_answer(error, "job_1")
    assert (answer.status, answer.headers.get("Retry-After")) == (status, after)
    assert answer.text is not None
    assert json.loads(answer.text)["error"]["code"] == error.code


# The studio's form has the fields and limits of requests.


STATIC = Path(giornata_gateway.__file__).parent / "static"
PAGE = (STATIC / "index.html").read_text(encoding="utf-8")
FORM = PAGE[PAGE.index('<form id="edit"') : PAGE.index("</form>")]
CONTROLS = {
    attributes["name"]: attributes
    for tag in re.findall(r"<(?:input|select|textarea) [^>]*>", FORM)
    if "name" in (attributes := dict(re.findall(r'([\w-]+)="([^"]*)"', tag)))
}
NUMBERS = sorted(name for name, control in CONTROLS.items() if control.get("type") == "number")


def test_every_control_is_shown_by_the_field_that_it_sets() -> None:
    assert CONTROLS.keys() <= EditParameters.model_fields.keys()
    assert CONTROLS.keys() - {"model", "prompt"} <= set(re.findall(r'data-field="(\w+)"', FORM))
    assert {
        "negative_prompt",
        "guidance_scale",
        "true_cfg_scale",
        "sampler",
        "reuse",
        "size",
    } <= CONTROLS.keys()
    for control in CONTROLS.values():
        assert f'<label for="{control["id"]}"' in FORM
        assert f'id="{control["id"]}-error"' in FORM


def test_adapters_have_the_limits_and_the_choices_of_requests() -> None:
    loras, nets, cards = (
        (STATIC / "js" / f"{name}.js").read_text(encoding="utf-8")
        for name in ("loras", "controlnets", "cards")
    )
    assert f"const MOST = {MAX_LORAS};" in loras
    assert f"const MOST = {MAX_CONTROLNETS};" in nets
    assert f"scale(name, {-MAX_SCALE:g})" in loras
    assert f"max: {MAX_SCALE:g}" in cards
    (annotators,) = re.findall(r"const ANNOTATORS = (.*);", nets)
    assert re.findall(r'\["(\w+)"', annotators) == list(Annotator)
    section = FORM[FORM.index('id="lora-wait"') :].partition("</select>")[0]
    assert re.findall(r'value="(\w+)"', section) == list(LoraWait)


def test_what_saves_steps_has_the_choices_and_the_defaults_of_requests() -> None:
    (caches,) = re.findall(
        r"const CACHES = \{(.*?)\};", (STATIC / "js" / "speed.js").read_text("utf-8"), re.DOTALL
    )
    assert re.findall(r'^ *"?([\w-]+)"?: \[', caches, re.MULTILINE) == list(StepCache)
    assert CONTROLS["step_cache_warmup"]["placeholder"] == str(WARMUP)


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_have_the_limits_of_their_field(name: str) -> None:
    told: dict[type, Any] = {type(limit): limit for limit in EditParameters.model_fields[name].metadata}
    least, most = float(CONTROLS[name]["min"]), float(CONTROLS[name]["max"])
    if annotated_types.Gt in told:
        assert math.isclose(least, told[annotated_types.Gt].gt, abs_tol=0.01)
        assert least > told[annotated_types.Gt].gt
    else:
        assert least == told[annotated_types.Ge].ge
    assert most == min(told[annotated_types.Le].le, 2**53 - 1), "the largest that JavaScript holds"


def test_no_door_has_a_feather_that_nobody_asked_for() -> None:
    """Outside of the mask every pixel is the original's by default, at the studio and in ComfyUI too."""
    assert EditParameters(prompt="x").mask_blur is None
    assert "value" not in CONTROLS["mask_blur"]
    node = (Path(__file__).parents[3] / "deploy" / "comfyui" / "nodes.py").read_text("utf-8")
    assert '"mask_blur": _number("FLOAT", -1.0, -1.0,' in node, "the gateway's own"
