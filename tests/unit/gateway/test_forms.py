"""Forms of requests, and pictures by URL."""

from __future__ import annotations

import aiohttp
import pytest

from giornata.shares import SharedPool
from giornata.wire.errors import GiornataError, InvalidField, UnknownField
from giornata.wire.requests import MaskMode
from giornata_gateway.admission import ByteReservation, Tenant
from giornata_gateway.config import GatewayConfig
from giornata_gateway.http import requests
from giornata_gateway.http.requests import check_sources
from giornata_gateway.nats_door import REPLY_MARGIN_BYTES, inline_pictures
from giornata_gateway.rules.forms import (
    EditForm,
    JobForm,
    PictureSource,
    ResponseFormat,
    prefers_image,
    read_form,
)
from giornata_gateway.webhooks import AddressRefusedError, told


def test_texts_become_values() -> None:
    fields = {
        "prompt": "x",
        "n": "3",
        "seed": "9",
        "mask_blur": "0.5",
        "stream": "true",
        "mask_mode": "black",
    }
    form = read_form(EditForm, fields.items())
    parameters = form.parameters()
    assert (form.stream, parameters.n, parameters.seed, parameters.mask_blur) == (True, 3, 9, 0.5)
    assert parameters.mask_mode is MaskMode.BLACK
    assert set(parameters.model_dump()) == set(type(parameters).model_fields)
    assert not hasattr(parameters, "stream")


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ([("prompt", "x"), ("prompt", "y")], "invalid_field", "prompt"),
        ([("prompt", "x"), ("input_fidelity", "medium")], "invalid_field", "input_fidelity"),
        ([("prompt", "x"), ("partial_images", "17"), ("stream", "true")], "invalid_field", "partial_images"),
        ([("prompt", "x"), ("partial_images", "2")], "invalid_field", "partial_images"),
        ([("prompt", "x"), ("partial_images", "1"), ("stream", "false")], "invalid_field", "partial_images"),
        ([("prompt", "x"), ("padding_mask_crop", "-1")], "invalid_field", "padding_mask_crop"),
        ([("prompt", "x"), ("padding_mask_crop", "4097")], "invalid_field", "padding_mask_crop"),
        ([("prompt", "x"), ("n", "1.5")], "invalid_field", "n"),
        ([("prompt", "x"), ("seed", "nan")], "invalid_field", "seed"),
        ([("prompt", "x"), ("stream", "perhaps")], "invalid_field", "stream"),
        ([("prompt", "x"), ("quality", "4k")], "invalid_field", "quality"),
        ([], "invalid_field", "prompt"),
    ],
)
def test_refusals_name_the_field(fields: list[tuple[str, str]], code: str, field: str) -> None:
    with pytest.raises(GiornataError) as raised:
        read_form(EditForm, fields)
    assert (raised.value.code, raised.value.field) == (code, field)


def test_fields_without_effect_are_told() -> None:
    fields = {
        "prompt": "x",
        "output_compression": "90",
        "style": "vivid",
        "moderation": "",
        "user": "u",
        "size": "",
    }
    form = read_form(EditForm, fields.items())
    assert form.ignored == ("output_compression", "style")
    assert (form.user, form.size, form.output_compression) == ("u", "auto", None)
    kept = read_form(EditForm, [*fields.items(), ("output_format", "webp")])
    assert (kept.ignored, kept.output_compression) == (("style",), 90)
    assert read_form(EditForm, [("prompt", "x"), ("negative_prompt", "")]).negative_prompt == ""
    with pytest.raises(UnknownField, match="mood"):
        read_form(EditForm, [("prompt", "x"), ("mood", "")])


def test_accept_chooses_the_picture_itself_unless_the_form_says_otherwise() -> None:
    assert read_form(EditForm, [("prompt", "x")], "image/*").response_format is ResponseFormat.IMAGE
    fields = [("prompt", "x"), ("response_format", "url")]
    assert read_form(EditForm, fields, "image/png, */*").response_format is ResponseFormat.URL
    assert not prefers_image("text/html,image/avif,*/*")
    assert not prefers_image("*/*")


def test_jobs_take_no_field_of_an_open_connection() -> None:
    with pytest.raises(InvalidField, match="leave stream out"):
        read_form(JobForm, [("prompt", "x"), ("stream", "false")])


def test_pictures_are_inline_while_there_is_room() -> None:
    room = REPLY_MARGIN_BYTES + 100
    assert inline_pictures({0: 60, 1: 60, 2: 40}, room) == {0, 2}
    assert inline_pictures({0: 101}, room) == set()


def test_partial_images_of_a_job_need_no_stream() -> None:
    form = read_form(JobForm, [("prompt", "x"), ("partial_images", "3")])
    assert form.parameters().partial_images == 3  # its events can be followed


# Pictures by URL: which connection fetches them, and what is told of a failure. The rest is tested at the
# door.


@pytest.mark.parametrize(("scheme", "plain"), [("http", True), ("HTTP", True), ("https", False)])
async def test_each_fetch_has_the_connection_of_its_scheme_however_that_is_written(
    monkeypatch: pytest.MonkeyPatch, scheme: str, plain: bool
) -> None:
    grow = ByteReservation(SharedPool(1), Tenant("alice"))
    asked: list[tuple[bool, bool]] = []

    def refuse(_networks: object, *, plain: bool) -> None:
        asked.append((plain, grow.holding.takeable()))
        raise AddressRefusedError

    monkeypatch.setattr(requests, "guarded_session", refuse)
    config = GatewayConfig(image_hosts="a.example", webhook_networks="10.1.0.0/16")
    source = PictureSource(image_url=f"{scheme}://a.example/a.png")
    with pytest.raises(InvalidField):
        await requests.read_sources(config, grow, [("images", source)])
    assert asked == [(plain, True)], "what is held meanwhile is another tenant's if need be"


HOSTS = "A.example, b.example:8443, [2001:db8::1], [2001:db8::1]:9443"
NAMED = "a.example, b.example:8443"


@pytest.mark.parametrize(
    "url",
    [
        "https://a.example/x.png",
        "https://A.EXAMPLE:443/x.png",
        "http://a.example/x.png",
        "http://a.example:80/x.png",
        "https://b.example:8443/x.png",
        "http://b.example:8443/x.png",
    ],
)
def test_hosts_are_allowed_at_their_usual_port_or_at_the_one_that_is_named(url: str) -> None:
    config = GatewayConfig(image_hosts=HOSTS, webhook_networks="10.1.0.0/16")
    assert check_sources(config, [("images", PictureSource(image_url=url))])


@pytest.mark.parametrize(
    "url",
    [
        "https://a.example:8443/x.png",
        "https://a.example:80/x.png",
        "http://a.example:443/x.png",
        "https://b.example/x.png",
        "https://c.example/x.png",
        "https://[2001:db8::1]:8443/x.png",
        "https://a.example:99999/x.png",
        "https://[a.example/x.png",
        "",
    ],
)
@pytest.mark.parametrize("networks", ["", "10.1.0.0/16"])
def test_other_hosts_and_other_ports_are_refused_with_what_is_allowed(url: str, networks: str) -> None:
    config = GatewayConfig(image_hosts=HOSTS, webhook_networks=networks)
    with pytest.raises(InvalidField, match="No picture is fetched from there") as caught:
        check_sources(config, [("images", PictureSource(image_url=url))])
    assert f"image_url with a data URL, or a URL at [2001:db8::1], [2001:db8::1]:9443, {NAMED}" == (
        caught.value.accepted
    )


@pytest.mark.parametrize(
    ("hosts", "url", "accepted"),
    [
        ("", "http://a.example/x.png", "image_url with a data URL"),
        ("", "https://10.1.2.3/x.png", "image_url with a data URL"),
        ("", "ftp://a.example/x.png", "image_url with a data URL"),
        ("b.example", "http://a.example/x.png", "image_url with a data URL, or a URL at b.example"),
        ("a.example", "http://a.example/x.png", "https://HOST/PATH at a public address"),
        ("10.1.2.3", "https://10.1.2.3/x.png", "https://HOST/PATH at a public address"),
    ],
)
def test_the_host_is_looked_at_first(hosts: str, url: str, accepted: str) -> None:
    with pytest.raises(InvalidField) as caught:
        check_sources(GatewayConfig(image_hosts=hosts), [("mask", PictureSource(image_url=url))])
    assert (caught.value.field, caught.value.received, caught.value.accepted) == ("mask", url, accepted)


def test_what_is_told_names_no_address() -> None:
    key = aiohttp.client_reqrep.ConnectionKey("a.example", 443, True, True, None, None, None, None)
    refused = AddressRefusedError("10.1.2.3 may not be connected to")
    failed = OSError(111, "Connect call failed ('10.1.2.3', 443)")
    assert told(aiohttp.ClientConnectorError(key, refused)) == "the address is not allowed"
    assert told(aiohttp.ClientConnectorError(key, failed)) == "no connection"
    assert told(aiohttp.ServerTimeoutError()) == told(TimeoutError()) == "no answer in 15 s"
    assert told(ConnectionResetError(104, "10.1.2.3")) == "ConnectionResetError"
