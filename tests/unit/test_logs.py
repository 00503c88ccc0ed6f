"""Lines of the log: no secret, no escape of a stranger's, and nothing that leaves by another way."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from typing import Final

import pytest

from giornata.logs import escape_controls, without_secrets

KEY: Final = "gio_" + "k" * 43
PROGRAM: Final = """
import logging, sys, structlog
from giornata.logs import configure_logs
configure_logs("info", sys.argv[1], "gateway-1")
log = structlog.get_logger()
evil = "\\x1b]0;owned\\x07\\x1b[2J\\r\\nforged\\x9b1m\\u202e"
log.info("edit", user=evil, nested={"prompt": evil}, key=KEY)
try:
    raise ValueError(evil + KEY)
except ValueError as error:
    log.error("failed", exc_info=error)
logging.getLogger("aiohttp.server").error("Error handling %s", "Authorization : Bearer " + KEY + "x" * 100_000)
logging.getLogger("nats").info("not told")
log.debug("not told")
""".replace("KEY", repr(KEY))


@cache
def lines_of(form: str) -> list[str]:
    """What a process with hostile values writes to its log."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, form], capture_output=True, check=True)
    assert done.stdout == b""
    return done.stderr.decode().split("\n")[:-1]


@pytest.mark.parametrize("form", ["console", "json"])
def test_a_line_holds_no_secret_and_no_control_character(form: str) -> None:
    lines = lines_of(form)
    for line in lines:
        assert KEY not in line
        assert line.isprintable(), ascii(line)
        assert len(line) < 2000
    assert not [line for line in lines if line.startswith("forged")], "a value begins no line"
    assert sum("owned" in line for line in lines) >= 2, "it is shown, not left out"
    assert "not told" not in "".join(lines)
    [library] = [line for line in lines if "library_message" in line]
    assert "aiohttp.server" in library
    assert "Authorization : Bearer ***" in library


def test_json_keeps_a_value_as_it_is() -> None:
    told = json.loads(lines_of("json")[0])
    assert told["user"] == "\x1b]0;owned\x07\x1b[2J\r\nforged\x9b1m\u202e"
    assert told["key"] == "***"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"key {KEY}.", "key ***."),
        (f"Authorization: Basic {'QWxh' * 8}", "Authorization: Basic ***"),
        ("bearer abcdefghijklmnopqrstuvwxyz", "bearer ***"),
        (
            "redis://:pass@host:6379/0 and nats://user:pass@host",
            "redis://***@host:6379/0 and nats://***@host",
        ),
        ("whsec_QUJD/+=", "***"),
        ("the bearer of a letter, on a basic level", "the bearer of a letter, on a basic level"),
        ("a@b.c, https://host/path?x=a@b", "a@b.c, https://host/path?x=a@b"),
    ],
)
def test_secrets(text: str, shown: str) -> None:
    assert without_secrets(text) == shown


def test_visible() -> None:
    assert (
        escape_controls("é\n\x00\x7f\x85\u2028 日本\U0001f600") == "é\\n\\x00\\x7f\\x85\\u2028 日本\U0001f600"
    )
    assert escape_controls("a\n\tb\x1b", "\n\t") == "a\n\tb\\x1b"
