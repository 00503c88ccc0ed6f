"""The file of API keys: what it holds, what it refuses, and that it never shows a key."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from giornata import api_keys
from giornata.api_keys import KeysFile, KeysFileError, NatsUser, TenantLimits
from tests.fakes.key_files import CREATED, keys_of

NAMED = {"shop": "a", "press": "b"}
NAMES = st.from_regex(r"[A-Za-z0-9_-]{1,64}", fullmatch=True)
LIMITS = st.builds(
    TenantLimits,
    in_progress=st.none() | st.integers(0, 1_000_000),
    per_minute=st.none() | st.integers(0, 1_000_000),
    weight=st.none() | st.floats(0.001, 1000),
)


@given(st.dictionaries(st.text(min_size=1), NAMES, max_size=5), st.dictionaries(NAMES, LIMITS, max_size=3))
def test_what_is_written_is_read(keys: dict[str, str], limits: dict[str, TenantLimits]) -> None:
    file = keys_of(keys, limits)
    text = api_keys.render(file)
    assert api_keys.parse(text) == file
    assert {key.sha256 for key in file.keys} == {api_keys.hash_of(key) for key in keys}


def test_a_key_is_in_no_file() -> None:
    assert "gio_secret" not in api_keys.render(keys_of({"gio_secret": "alice"}))


def test_a_key_goes_by_the_beginning_of_its_id_and_its_tenants_limits_stay() -> None:
    file = keys_of({"one": "alice", "two": "bob"}, {"bob": TenantLimits(weight=2)})
    two = file.keys[1]
    left, revoked = api_keys.without_key(file, two.key_id)
    assert (revoked, left.keys) == (two, file.keys[:1])
    assert left.tenants["bob"].weight == 2
    for unknown in ("", "zz", two.sha256 + "0"):
        with pytest.raises(KeysFileError, match="exactly one must"):
            api_keys.without_key(file, unknown)


def test_an_application_has_one_key_one_user_and_one_inbox() -> None:
    file = keys_of({"one": "alice"})
    shop, press = (NatsUser(name=name, bcrypt=f"$2b$04${letter * 53}") for name, letter in NAMED.items())
    file = api_keys.with_key(file, "two", "alice", CREATED, shop)
    file = api_keys.with_key(file, "three", "bob", CREATED, press)
    assert api_keys.parse(api_keys.render(file)) == file
    assert [key.inbox for key in file.keys] == ["_INBOX", "_INBOX_app.shop", "_INBOX_app.press"]
    assert file.passwords == {"app.shop": shop.bcrypt, "app.press": press.bcrypt}
    with pytest.raises(KeysFileError, match="shop is there already"):
        api_keys.with_key(file, "four", "carol", CREATED, shop)
    twice = json.loads(api_keys.render(file))
    twice["keys"][2]["nats"] = twice["keys"][1]["nats"]
    with pytest.raises(KeysFileError, match="an application is there twice"):
        api_keys.parse(json.dumps(twice))
    left, revoked = api_keys.without_key(file, "app.shop")
    assert (revoked.tenant, list(left.passwords)) == ("alice", ["app.press"])
    with pytest.raises(KeysFileError, match="exactly one must"):
        api_keys.without_key(file, "application")


@pytest.mark.parametrize("name", ["", "Shop", "a.b", "a_b", "-a", "a" * 33, "a>", "shop\n"])
def test_an_application_has_a_name_that_goes_into_a_subject(name: str) -> None:
    with pytest.raises(ValidationError):
        NatsUser(name=name, bcrypt="$2b$04$" + "a" * 53)


def test_a_tenant_is_not_named_as_jobs_are() -> None:
    """Its uploads would count for tenants that there are not."""
    named = f"job_{'x-_' * 8}"
    with pytest.raises(KeysFileError, match=r"tenant: .*job_ and 24 characters"):
        api_keys.with_key(KeysFile(), "one", named, CREATED)
    with pytest.raises(KeysFileError, match="job_ and 24 characters"):
        api_keys.with_limits(KeysFile(), named, TenantLimits(weight=2))
    text = api_keys.render(keys_of({"one": "alice"}))
    with pytest.raises(KeysFileError, match=r"keys.0.tenant: .*job_ and 24 characters"):
        api_keys.parse(text.replace("alice", named))
    for other in ("job_s", named[:-1], f"{named}x", "my_" + named):
        assert api_keys.with_key(KeysFile(), "one", other, CREATED).keys[0].tenant == other


@pytest.mark.parametrize("password", ["secret", "$2b$04$short", "$2b$04$" + "a" * 52 + '"'])
def test_a_password_is_in_no_file(password: str) -> None:
    with pytest.raises(ValidationError):
        NatsUser(name="shop", bcrypt=password)


def test_limits_change_one_by_one() -> None:
    file = api_keys.with_limits(KeysFile(), "alice", TenantLimits(per_minute=60, weight=2))
    file = api_keys.with_limits(file, "alice", TenantLimits(per_minute=0))
    assert file.tenants == {"alice": TenantLimits(per_minute=0, weight=2)}
    assert api_keys.with_limits(file, "bob", TenantLimits()) == file


@pytest.mark.parametrize("tenant", ["", "a b", "a/b", "ä", "x" * 65, "alice\n"])
def test_a_tenant_needs_a_name_that_goes_into_keys_of_blobs(tenant: str) -> None:
    with pytest.raises(KeysFileError, match="tenant"):
        api_keys.with_key(KeysFile(), "key", tenant, CREATED)
    with pytest.raises(KeysFileError):
        api_keys.with_limits(KeysFile(), tenant, TenantLimits(weight=2))


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        ("", "EOF"),
        ("[]", "object"),
        ('{"version": 2}', "version"),
        ('{"sk-alice-123": "alice"}', "a field of another name"),
        ('{"tenants": {"sk-alice-123 ": {}}}', "tenants: "),
        (
            '{"keys": [{"sha256": "sk-alice-123", "tenant": "alice", "created": "2026-11-22"}]}',
            "keys.0.sha256",
        ),
        ('{"tenants": {"alice": {"weight": 0}}}', "weight"),
        ('{"tenants": {"alice": {"per_minute": -1}}}', "per_minute"),
        ('{"tenants": {"alice": {"pictures": 1}}}', "tenants: there is a field"),
    ],
)
def test_a_bad_file_is_told_by_its_place_and_quotes_nothing(text: str, mistake: str) -> None:
    with pytest.raises(KeysFileError, match="not a file of API keys") as caught:
        api_keys.parse(text)
    assert mistake in str(caught.value)
    assert "sk-alice" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_key_is_there_once() -> None:
    fields = json.loads(api_keys.render(keys_of({"one": "alice"})))
    fields["keys"] *= 2
    with pytest.raises(KeysFileError, match="is there twice"):
        api_keys.parse(json.dumps(fields))
