"""``giornata keys``: one key shown once, files whole and private, mistakes as sentences."""

from __future__ import annotations

import os
import re
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import bcrypt
import pytest
from click.testing import CliRunner, Result

from giornata import api_keys
from giornata.api_keys import KeysFile, TenantLimits
from giornata.nats_users import read_keys, write_users
from giornata.wire.subjects import NatsRole, has_anonymous
from giornata_tools.cli.app import cli
from giornata_tools.cli.keys import change_keys
from tests.fakes.key_files import CREATED, keys_of, write_keys


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def run(path: Path, *arguments: str) -> Result:
    name, *others = arguments
    return CliRunner().invoke(cli, ["keys", name, "--file", str(path), *others])


def test_a_key_is_printed_once_and_stored_as_its_hash(path: Path) -> None:
    made = run(
        path, "create", "--tenant", "alice", "--per-minute", "60", "--in-progress", "4", "--weight", "2.5"
    )
    assert made.exit_code == 0, made.output
    key = made.stdout.strip()
    assert key.startswith("gio_")
    assert len(key) >= len("gio_") + 32 * 4 // 3
    file = read_keys(path)
    assert [(known.sha256, known.tenant) for known in file.keys] == [(api_keys.hash_of(key), "alice")]
    assert file.tenants == {"alice": TenantLimits(per_minute=60, in_progress=4, weight=2.5)}
    assert key not in path.read_text() + made.stderr
    assert file.keys[0].key_id in made.stderr


def test_every_key_is_another_and_the_environment_may_name_the_file(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIORNATA_API_KEYS_FILE", str(path))
    keys = {CliRunner().invoke(cli, ["keys", "create", "--tenant", "alice"]).stdout for _ in range(3)}
    assert len(keys) == len(read_keys(path).keys) == 3


def test_a_new_file_is_its_owners_alone_and_an_old_one_keeps_its_readers(path: Path) -> None:
    run(path, "create", "--tenant", "alice")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o640)
    before = path.stat().st_ino
    run(path, "create", "--tenant", "bob")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert path.stat().st_ino != before, "a reader of the old file would see half of the new one"
    assert os.listdir(path.parent) == [path.name]  # noqa: PTH208 - nothing else was left


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_file_keeps_the_owner_that_the_gateway_runs_as(path: Path) -> None:
    run(path, "create", "--tenant", "alice")
    os.chown(path, 10001, 10001)
    run(path, "create", "--tenant", "bob")
    assert (path.stat().st_uid, path.stat().st_gid, stat.S_IMODE(path.stat().st_mode)) == (
        10001,
        10001,
        0o600,
    )


@pytest.mark.parametrize("words", [("list",), ("revoke", "abc")])
def test_a_missing_file_has_no_keys_to_list_or_revoke(path: Path, words: tuple[str, ...]) -> None:
    done = run(path, *words)
    assert done.exit_code == 1
    assert f"There is no file {path}; `giornata keys create` makes one." in done.stderr
    assert not path.exists()


def test_keys_are_listed_and_revoked(path: Path) -> None:
    write_keys(path.parent, {"one": "alice", "two": "bob"}, {"bob": TenantLimits(per_minute=0, weight=2.5)})
    one, two = read_keys(path).keys
    listed = run(path, "list").stdout
    lines = {line.split()[1]: line for line in listed.splitlines()[1:]}
    assert one.key_id in lines["alice"]
    assert [two.key_id in lines["bob"], "none" in lines["bob"], "2.5" in lines["bob"]] == [True] * 3
    revoked = run(path, "revoke", one.key_id)
    assert (revoked.exit_code, "of tenant alice is revoked" in revoked.stderr) == (0, True)
    assert read_keys(path).keys == (two,)


def test_an_application_is_added_listed_and_revoked_with_the_servers_users(
    path: Path, tmp_path: Path
) -> None:
    users = tmp_path / "users"
    write_users(users, anonymous=NatsRole.APPLICATION)
    config = users / "server" / "users.conf"
    before = config.read_text()
    options = ("--nats-users", str(users))
    added = run(path, "add", "shop", "--tenant", "alice", "--weight", "2", *options)
    assert added.exit_code == 0, added.output
    key, url = (line.partition("=")[2] for line in added.stdout.splitlines())
    place = urlsplit(url)
    assert place.username == "app.shop"
    assert place.password is not None
    [known] = read_keys(path).keys
    assert known.nats is not None
    assert bcrypt.checkpw(place.password.encode(), known.nats.bcrypt.encode())
    assert (known.sha256, known.tenant) == (api_keys.hash_of(key), "alice")
    assert (known.nats.bcrypt in config.read_text(), has_anonymous(config.read_text())) == (True, True)
    assert not any(secret in path.read_text() + config.read_text() for secret in (key, place.password))
    assert not any(secret in added.stderr for secret in (key, place.password))
    assert "app.shop" in run(path, "list").stdout
    revoked = run(path, "revoke", "app.shop", *options)
    assert (revoked.exit_code, "app.shop" in revoked.stderr) == (0, True)
    assert (read_keys(path).keys, config.read_text()) == ((), before)


def test_an_application_is_added_where_the_servers_users_are_not_at_hand(path: Path) -> None:
    servers = "nats://n1:4222,nats://old:secret@n2:4222"
    added = run(path, "add", "shop", "--nats", servers)
    assert (added.exit_code, "giornata.nats_users FOLDER" in added.stderr) == (0, True)
    assert read_keys(path).keys[0].tenant == "shop"
    url = added.stdout.partition("NATS_URL=")[2]
    assert re.fullmatch(r"nats://app\.shop:(\w{64})@n1:4222,nats://app\.shop:\1@n2:4222\n", url)
    for name in ("shop", "No Name"):
        again = run(path, "add", name)
        assert (again.exit_code, again.stdout) == (1, ""), "nothing is shown that is not in force"
    assert len(read_keys(path).keys) == 1


def test_limits_change_without_a_new_key(path: Path) -> None:
    write_keys(path.parent, {"one": "alice"})
    assert run(path, "limit", "--tenant", "alice", "--per-minute", "6").exit_code == 0
    assert read_keys(path) == keys_of({"one": "alice"}, {"alice": TenantLimits(per_minute=6)})
    assert run(path, "limit", "--tenant", "alice").exit_code == 2


def test_mistakes_are_sentences_and_change_nothing(path: Path) -> None:
    def told(*arguments: str) -> tuple[int, str]:
        result = run(path, *arguments)
        return result.exit_code, result.stderr

    assert told("create", "--tenant", "a b")[0] == 1
    assert not path.exists()
    write_keys(path.parent, {"one": "alice"})
    assert told("revoke", "~abc") == (1, "Error: No keys begin with '~abc'; exactly one must.\n")
    path.write_text("{")
    for arguments in (["list"], ["create", "--tenant", "alice"], ["revoke", "a"]):
        code, sentence = told(*arguments)
        assert (code, f"{path} is not a file of API keys" in sentence) == (1, True)
    assert path.read_text() == "{"
    nowhere = run(path.parent / "missing" / "keys.json", "create", "--tenant", "alice")
    assert (nowhere.exit_code, "cannot be opened" in nowhere.stderr) == (1, True)


def test_changes_at_the_same_time_lose_nothing(path: Path) -> None:
    def add(number: int) -> None:
        def changed(file: KeysFile) -> KeysFile:
            return api_keys.with_key(file, f"key {number}", "alice", CREATED)

        change_keys(path, changed)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(add, range(24)))
    assert len(read_keys(path).keys) == 24
