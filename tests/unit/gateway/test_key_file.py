"""The keys' file as the gateway reads it: anew after a change, never less than before for a broken one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from giornata import api_keys
from giornata.wire.errors import ServiceUnavailable
from giornata_gateway.intake.key_file import LOOK_S, KeyFile
from tests.fakes.key_files import keys_of, write_keys


class Clock:
    """Seconds, as the test says."""

    def __init__(self) -> None:
        self.now_s = 5.0

    def __call__(self) -> float:
        return self.now_s


def replaced(path: Path, text: str) -> None:
    """As `giornata keys` and container platforms do it: another file under the same name."""
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
