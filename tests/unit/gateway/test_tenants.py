"""Tenants: keys by their hashes and their file, limits, pages of other sites, addresses that others reach."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from structlog.testing import capture_logs

from giornata import api_keys
from giornata.api_keys import KeysFile, NatsUser, TenantLimits, with_key
from giornata.config import load
from giornata.wire.errors import CrossSite, InvalidField, ServiceUnavailable, Unauthorized
from giornata_gateway.admission import LOOK_S, KeyFile, Tenant, tenant_of
from giornata_gateway.config import GatewayConfig, is_loopback
from giornata_gateway.http.server import bearer, check_site
from giornata_gateway.nats_door import check_reply
from tests.fakes.key_files import CREATED, keys_of, write_keys

DEFAULTS = Tenant("default", in_progress=8, per_minute=0)


def test_tenants_by_key() -> None:
    file = keys_of({"sk-alice-123": "alice", "sk-robert-12": "bob", "sk-alice-456": "alice"})
    assert tenant_of("sk-robert-12", file, DEFAULTS).name == "bob"
    assert {tenant_of(key, file, DEFAULTS).name for key in ("sk-alice-123", "sk-alice-456")} == {"alice"}
    hashes = [key.sha256 for key in file.keys]
    for key in (None, "sk-robert-1", "", "ключ", "sk-\udcff", *hashes):
        with pytest.raises(Unauthorized):
            tenant_of(key, file, DEFAULTS)


def test_the_key_says_whose_inbox_answers_go_to() -> None:
    user = NatsUser(name="shop", bcrypt="$2b$04$" + "a" * 53)
    file = with_key(keys_of({"old": "alice"}), "new", "alice", CREATED, user)
    assert tenant_of("new", file, DEFAULTS) == Tenant("alice", 8, inbox="_INBOX_app.shop")
    assert tenant_of("old", file, DEFAULTS).inbox == tenant_of(None, None, DEFAULTS).inbox == "_INBOX"


@pytest.mark.parametrize(
    ("inbox", "reply", "ours"),
    [
        ("_INBOX_app.shop", "_INBOX_app.shop.a.reply", True),
        ("_INBOX_app.shop", "", True),
        ("_INBOX_app.shop", "_INBOX_app.shop", False),
        ("_INBOX_app.shop", "_INBOX_app.shop.", False),
        ("_INBOX_app.shop", "_INBOX_app.shop-2.a", False),
        ("_INBOX_app.shop", "_INBOX_app.shop.*", False),
        ("_INBOX_app.shop", "_INBOX_app.press.a", False),
        ("_INBOX_app.shop", "_INBOX.a", False),
        ("_INBOX", "_INBOX.a.b", True),
        ("_INBOX", "_INBOX_app.shop.a", False),
        ("_INBOX", "_INBOX_router.a", False),
    ],
)
def test_an_answer_goes_to_the_askers_inbox_alone(inbox: str, reply: str, ours: bool) -> None:
    with nullcontext() if ours else pytest.raises(InvalidField) as refused:
        check_reply(reply, Tenant("alice", inbox=inbox))
    if refused is not None:
        assert (refused.value.field, refused.value.received) == ("reply", None)


def test_a_file_without_keys_is_closed_and_no_file_is_open() -> None:
    for key in (None, "anything"):
        with pytest.raises(Unauthorized):
            tenant_of(key, KeysFile(), DEFAULTS)
        assert tenant_of(key, None, DEFAULTS) == replace(DEFAULTS, operator=True)


@given(
    st.builds(
        TenantLimits,
        in_progress=st.none() | st.integers(0, 9),
        per_minute=st.none() | st.integers(0, 9),
        weight=st.none() | st.floats(0.1, 9),
    )
)
def test_a_tenants_own_limits_go_before_the_gateways(limits: TenantLimits) -> None:
    file = keys_of({"key": "alice"}, {"alice": limits, "bob": TenantLimits(in_progress=1, weight=9)})
    tenant = tenant_of("key", file, DEFAULTS)
    assert tenant.in_progress == (8 if limits.in_progress is None else limits.in_progress)
    assert tenant.per_minute == (0 if limits.per_minute is None else limits.per_minute)
    assert tenant.weight == (1.0 if limits.weight is None else limits.weight)


def test_bearer_tokens() -> None:
    assert bearer("bearer  abc ") == "abc"
    assert bearer("Basic abc") is None
    assert bearer(None) is None


def test_pages_of_other_sites_are_refused_unless_a_key_is_asked_for() -> None:
    foreign, own = "http://other.example", ("gateway.example:8000", "")
    for site, origin in (("cross-site", foreign), ("cross-site", None), (None, foreign), (None, "null")):
        with pytest.raises(CrossSite) as refused:
            check_site(site, origin, own, keyed=False)
        assert str(site or origin) in str(refused.value.received)
        check_site(site, origin, own, keyed=True)
    for site in (None, "", "none", "same-origin", "same-site"):
        for origin in (None, "http://gateway.example:8000", *([foreign] if site else [])):
            check_site(site, origin, own, keyed=False)
    with pytest.raises(CrossSite):
        check_site(None, "http://gateway.example", own, keyed=False)


@pytest.mark.parametrize(
    ("host", "alone"),
    [
        ("127.0.0.1", True), ("127.1.2.3", True), ("::1", True), ("localhost", True),
        ("", False), ("::", False), ("10.0.0.1", False), ("localhost.example", False), ("0", False),
    ],
)  # fmt: skip
def test_addresses_that_only_this_machine_reaches(host: str, alone: bool) -> None:
    assert is_loopback(host) == alone


class Clock:
    """Seconds, as the test says."""

    def __init__(self) -> None:
        self.now_s = 5.0

    def __call__(self) -> float:
        return self.now_s


def replaced(path: Path, text: str) -> None:
    """Put another file under the same name, as `giornata keys` and container platforms do."""
    new = path.with_suffix(".new")
    new.write_text(text)
    os.replace(new, path)  # noqa: PTH105 - as above


def test_a_changed_file_is_read_anew_but_not_at_every_request(tmp_path: Path) -> None:
    clock = Clock()
    path = write_keys(tmp_path, {"one": "alice"})
    file = KeyFile(path, clock)
    replaced(path, api_keys.render(keys_of({"one": "alice", "two": "bob"})))
    clock.now_s += LOOK_S / 2
    assert file.current == keys_of({"one": "alice"})
    clock.now_s += LOOK_S / 2
    with capture_logs() as logs:
        assert file.current == keys_of({"one": "alice", "two": "bob"})
    assert [(line["event"], line["keys"]) for line in logs] == [("api_keys_read", 2)]


def test_a_broken_or_missing_file_keeps_the_keys_and_is_told_once(tmp_path: Path) -> None:
    clock = Clock()
    path = write_keys(tmp_path, {"sk-secret-1": "alice"})
    known = keys_of({"sk-secret-1": "alice"})
    file = KeyFile(path, clock)
    with capture_logs() as logs:
        replaced(path, '{"sk-secret-1": "alice"}')
        for _ in range(3):
            clock.now_s += LOOK_S
            assert file.current == known
        assert len(logs) == 1
        path.unlink()
        for _ in range(3):
            clock.now_s += LOOK_S
            assert file.current == known
    assert [line["event"] for line in logs] == ["api_keys_not_read"] * 2
    assert "sk-secret-1" not in str(logs)
    write_keys(tmp_path, {"two": "bob"})
    clock.now_s += LOOK_S
    assert file.current == keys_of({"two": "bob"})


@pytest.mark.parametrize(
    ("text", "why"), [(None, "No such file"), ("{", "not a file of API keys"), ("", "not a file of API keys")]
)
def test_a_start_without_a_readable_file_is_refused(tmp_path: Path, text: str | None, why: str) -> None:
    path = tmp_path / "keys.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ServiceUnavailable, match=why) as caught:
        KeyFile(path)
    assert str(path) in str(caught.value)
    assert "giornata keys create" in str(caught.value)


def test_a_file_without_keys_is_told(tmp_path: Path) -> None:
    with capture_logs() as logs:
        assert KeyFile(write_keys(tmp_path, {})).current == keys_of({})
    assert [line["event"] for line in logs] == ["no_api_keys"]


# The configuration, which wants keys where others reach the gateway.


ANYWHERE = "0.0.0.0"  # noqa: S104 - what is refused


@pytest.mark.parametrize(
    ("options", "mistake"),
    [
        ({"max_held_bytes": 2 << 20, "max_request_bytes": 3 << 20}, "max_held_bytes must be at least"),
        ({"host": ANYWHERE}, "other machines reach the host '0.0.0.0', so that API keys are needed"),
        ({"host": "::"}, "API keys are needed"),
        ({"host": ""}, "API keys are needed"),
        ({"host": "gateway.example"}, "API keys are needed"),
        ({"public_url": "edit.example"}, "public_url"),
        ({"cors_origins": "*"}, "needs api_keys_file"),
        ({"cors_origins": "https://a.example/page"}, "not 'https://a.example/page'"),
        ({"cors_origins": "a.example"}, "an origin is SCHEME://HOST"),
        ({"image_hosts": "a.example/b"}, "image_hosts"),
        ({"image_hosts": "https://a.example"}, "image_hosts"),
        ({"image_hosts": "::1"}, "image_hosts"),
        ({"model_aliases": "gpt-image-1"}, "ALIAS=NAME, each alias once, and not 'gpt-image-1'"),
        ({"model_aliases": "a=b,a=c"}, "not 'a=c'"),
        ({"model_aliases": "a=b c"}, "not 'a=b c'"),
    ],
)
def test_mistakes_are_named(options: dict[str, object], mistake: str) -> None:
    with pytest.raises(ValidationError, match=mistake):
        GatewayConfig.model_validate(options)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost"])
def test_this_machine_alone_needs_no_keys(host: str) -> None:
    assert GatewayConfig.model_validate({"host": host}).api_keys_file is None


def test_a_host_that_others_reach_takes_keys() -> None:
    config = GatewayConfig.model_validate({"host": ANYWHERE, "api_keys_file": "/keys/keys.json"})
    assert config.api_keys_file == Path("/keys/keys.json")


def test_a_start_without_keys_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        load(GatewayConfig, "gateway", ["--host", ANYWHERE])
    told = capsys.readouterr().err
    assert "GIORNATA_API_KEYS_FILE / --api-keys-file" in told
    assert "giornata keys create" in told


def test_an_address_ends_without_a_slash() -> None:
    assert GatewayConfig.model_validate({"public_url": "https://x/api/"}).public_url == "https://x/api"
