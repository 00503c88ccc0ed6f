"""Who may do what over NATS, and the file of API keys."""

from __future__ import annotations

import inspect
import itertools
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from giornata import api_keys, nats_users
from giornata.api_keys import KeysFile, KeysFileError, NatsUser, TenantLimits
from giornata.nats_users import CLUSTER_CONF, password_file, write_users
from giornata.wire import subjects
from giornata.wire.messages import EventKind
from giornata.wire.subjects import (
    RELOADER,
    NatsPermissions,
    NatsRole,
    application_user,
    cluster_config,
    has_anonymous,
    inbox,
    rights,
    user_in,
    users_config,
)
from giornata.wire.workers import ServiceName
from tests.fakes.key_files import CREATED, keys_of

ADDRESSES = ("prepost_at", "bring", "tier", "cancel", "telemetry", "jobs")
"""Functions that name a subject by ids alone."""
SERVICES = [NatsRole(service) for service in ServiceName]


def covers(pattern: str, subject: str) -> bool:
    """Whether a subject, or pattern, lies within a pattern of NATS."""
    for wanted, asked in itertools.zip_longest(pattern.split("."), subject.split(".")):
        if wanted == ">":
            return asked is not None
        if asked in {None, ">"} or wanted not in {"*", asked}:
            return False
    return True


def may(listed: tuple[str, ...], subject: str) -> bool:
    return any(covers(pattern, subject) for pattern in listed)


def one_of_each() -> dict[str, str]:
    """Every subject that `subjects` knows, by the name of its function or constant."""
    functions: dict[str, Callable[..., str]] = {name: getattr(subjects, name) for name in ADDRESSES}
    found = {
        name: function(*("x" for _ in inspect.signature(function).parameters))
        for name, function in functions.items()
    }
    found |= {f"event_{kind}": subjects.event("g", "j", kind) for kind in EventKind}
    found |= {f"worker_{verb}": subjects.worker("x", verb) for verb in get_args(subjects.WorkerVerb)}
    found |= {f"controlnet_{verb}": subjects.controlnet("x", verb) for verb in get_args(subjects.ControlVerb)}
    found |= {f"lora_{verb}": subjects.lora(verb) for verb in get_args(subjects.LoraVerb)}
    found |= {f"prepost_{verb}": subjects.prepost(verb, "x") for verb in ("adapter", "mask")}
    constants = (
        "EDIT",
        "EDIT_PROBE",
        "MASK",
        "EDIT_CANCEL",
        "SUBMIT",
        "TEMPLATE",
        "TEMPLATE_REMOVED",
        "FLEET",
        "SUMMARY",
    )
    return found | {name: getattr(subjects, name) for name in constants}


@pytest.mark.parametrize(("name", "subject"), one_of_each().items())
def test_every_subject_has_somebody_who_listens(name: str, subject: str) -> None:
    listeners = {user for user in NatsRole if may(rights(user).subscribe, subject.replace(".x", ".*"))}
    stored = name in {
        "jobs",
        "event_state",
        "event_preview",
    }  # a stream takes them, not a client
    assert bool(listeners) is not stored, listeners


@pytest.mark.parametrize(("name", "subject"), one_of_each().items())
def test_every_subject_has_somebody_who_tells(name: str, subject: str) -> None:
    if name == "telemetry":
        subject = subjects.telemetry(ServiceName.ROUTER, "r")
    publishers = {user for user in NatsRole if may(rights(user).publish, subject)}
    two = {"lora_begin", "lora_piece", "lora_drop", "lora_read"}  # with prepost, gateway or denoiser
    assert len(publishers) == (2 if name in two else 1), publishers


def test_nobody_reads_the_answers_of_another() -> None:
    assert len({inbox(user) for user in NatsRole}) == len(NatsRole)
    for reader, owner in itertools.product(NatsRole, NatsRole):
        assert may(rights(reader).subscribe, f"{inbox(owner)}.abc.1") is (reader is owner), (reader, owner)


def test_answers_go_only_to_those_who_may_ask() -> None:
    answers = {
        (user, asker)
        for user in NatsRole
        for asker in NatsRole
        if may(rights(user).publish, f"{inbox(asker)}.a.b")
    }
    asked = {(NatsRole.GATEWAY, NatsRole.APPLICATION), (NatsRole.ROUTER, NatsRole.GATEWAY)}
    asked |= {
        (NatsRole.LORA_STORE, NatsRole.GATEWAY),
        (NatsRole.LORA_STORE, NatsRole.PREPOST),
        (NatsRole.LORA_STORE, NatsRole.DENOISER),
        (NatsRole.LORA_STORE, NatsRole.PROFILER),
        (NatsRole.LORA_STORE, NatsRole.ROUTER),
        (NatsRole.GATEWAY, NatsRole.PROFILER),
        (NatsRole.CONTROLNET, NatsRole.DENOISER),
        (NatsRole.PREPOST, NatsRole.LORA_STORE),
        (NatsRole.PREPOST, NatsRole.GATEWAY),
    }
    asked |= {(worker, NatsRole.ROUTER) for worker in (NatsRole.PREPOST, NatsRole.DENOISER)}
    micro = (NatsRole.GATEWAY, NatsRole.PREPOST, NatsRole.CONTROLNET, NatsRole.LORA_STORE)
    assert answers == asked | {(service, NatsRole.OBSERVER) for service in micro}


def test_an_application_has_four_subjects_and_its_inbox() -> None:
    asks = (subjects.EDIT, subjects.GENERATE, subjects.MASK, subjects.EDIT_CANCEL)
    assert rights(NatsRole.APPLICATION) == NatsPermissions(asks, ("_INBOX.>",))
    shop = application_user("shop")
    assert rights(shop) == NatsPermissions(asks, ("_INBOX_app.shop.>",))
    writers = {user for user in NatsRole if may(rights(user).publish, f"{inbox(shop)}.a.b")}
    assert writers == {NatsRole.GATEWAY}
    assert not any(may(rights(user).subscribe, f"{inbox(shop)}.a.b") for user in [*NatsRole, "app.shop-2"])
    for bad in ("", "a.b", "a*", ">"):
        with pytest.raises(ValueError, match="id must match"):
            application_user(bad)


@pytest.mark.parametrize(
    ("url", "user"),
    [
        ("nats://127.0.0.1:4222", "application"),
        ("nats://app.shop:secret@n1:4222, nats://app.shop:secret@n2:4222", "app.shop"),
        ("nats://somebody:secret@n1", "application"),
        ("nats://token@n1", "application"),
    ],
)
def test_an_application_is_named_in_its_address(url: str, user: str) -> None:
    assert user_in(url) == user


def test_nobody_has_everything() -> None:
    broad = {">", "$JS.>", "$JS.API.>", "$KV.>", "giornata.>", "_INBOX*"}
    for user in NatsRole:
        assert broad.isdisjoint({*rights(user).publish, *rights(user).subscribe})
        assert not may(rights(user).publish, "$JS.API.STREAM.DELETE.GIORNATA_JOBS")
        assert not may(rights(user).publish, "$JS.API.STREAM.PURGE.GIORNATA_JOBS")
        assert not any(subject.startswith("$SYS") for subject in rights(user).publish)


@pytest.mark.parametrize(
    ("subject", "is_one"),
    [
        ("_INBOX.abc.1", True),
        ("_INBOX_router.abc", True),
        ("_INBOX", False),
        ("$KV.giornata-jobs.j", False),
        ("giornata.router.submit", False),
        ("_INBOXES.a", False),
    ],
)
def test_answers_go_to_inboxes_alone(subject: str, is_one: bool) -> None:
    assert subjects.is_inbox(subject) is is_one


def test_the_configuration_names_every_user_once_with_its_rights() -> None:
    names = [*NatsRole, "app.shop"]
    text = users_config({user: f"pw-{user}" for user in names}, "pw-reloader")
    listed = [json.loads(line.rstrip(",")) for line in text.splitlines() if line.lstrip().startswith("{")]
    assert [user["user"] for user in listed] == names
    for user in listed:
        granted = rights(user["user"])
        assert user["password"] == f"pw-{user['user']}"
        assert tuple(user["permissions"]["publish"]["allow"]) == granted.publish
        assert tuple(user["permissions"]["subscribe"]["allow"]) == granted.subscribe
    assert "no_auth_user" not in text
    assert not has_anonymous(text)
    assert "giornata" not in text.partition("accounts {")[2], "who reloads servers does nothing else"
    with_anonymous = users_config(dict.fromkeys(NatsRole, "x"), "x", anonymous=NatsRole.APPLICATION)
    assert 'no_auth_user: "application"' in with_anonymous
    assert has_anonymous(with_anonymous)


def test_servers_of_a_cluster_need_a_password_of_their_own() -> None:
    text = cluster_config("127.0.0.1:1", ["a:1", "b:2"], "secret")
    assert '"nats://routes:secret@a:1", "nats://routes:secret@b:2"' in text
    assert 'authorization { user: "routes", password: "secret" }' in text


def test_passwords_are_long_different_kept_and_private(tmp_path: Path) -> None:
    arguments = [str(tmp_path / "users"), "--cluster", "n1", "n2"]
    subprocess.run([sys.executable, "-m", "giornata.nats_users", *arguments], check=True)
    users = {RELOADER, *NatsRole} - {NatsRole.APPLICATION}
    passwords = {user: password_file(tmp_path / "users", user).read_text().strip() for user in users}
    assert len(set(passwords.values())) == len(users)
    assert not password_file(tmp_path / "users", NatsRole.APPLICATION).exists(), (
        "each application has its own"
    )
    assert all(re.fullmatch("[0-9a-f]{64}", password) for password in passwords.values())
    first = {path: path.read_text() for path in (tmp_path / "users").rglob("*") if path.is_file()}
    assert "@n2:6222" in first[tmp_path / "users" / "server" / CLUSTER_CONF]
    nats_users.main(arguments, standalone_mode=False)
    assert {path: path.read_text() for path in first} == first, "running services keep theirs"
    for path in (tmp_path / "users").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path


def test_a_service_finds_only_its_own_password_below_its_folder(tmp_path: Path) -> None:
    write_users(tmp_path)
    for user in SERVICES:
        assert list((tmp_path / user).iterdir()) == [password_file(tmp_path, user)]


@pytest.mark.parametrize(
    ("subject", "kind"),
    [
        (subjects.EDIT, "edit"),
        (subjects.EDIT_CANCEL, "edit cancel"),
        (subjects.SUBMIT, "router submit"),
        ("giornata.worker.w1.run", "worker run"),
        (subjects.prepost("encode", "m"), "prepost encode"),
        (subjects.lora("begin"), "lora begin"),
    ],
)
def test_a_subject_of_any_length_has_a_kind(subject: str, kind: str) -> None:
    assert subjects.kind_of(subject) == kind


# The file of API keys: what it holds, what it refuses, and that it never shows a key.


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
