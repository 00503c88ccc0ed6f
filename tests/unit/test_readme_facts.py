"""What the README names exists: files, make targets, fields of both doors. Its examples run in ``tests/e2e``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from giornata.wire.errors import ErrorBody
from giornata.wire.events import DoneEvent, EventKind, PreviewEvent, StateEvent, StepEvent
from giornata.wire.messages import EVENT_HEADER, CancelMessage, EditMessage, EditReply, Picture
from giornata_gateway.intake.rules.forms import EditForm

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FOLDERS = ("deploy", "services", "shared", "tests")


def section(title: str) -> str:
    return README.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def first_column(text: str) -> set[str]:
    """Names in backticks in the first cells of the tables of `text`."""
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("|")]
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


def test_files_that_are_named_exist() -> None:
    named = re.findall(r"`((?:[\w.-]+/)*[\w-]+\.(?:py|yaml|toml))`", README)
    assert len(named) > 20
    files = [path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in (ROOT / folder).rglob("*.*")]
    assert [name for name in named if not any(f"/{path}".endswith(f"/{name}") for path in files)] == []


def test_links_lead_somewhere() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert links
    headings = {
        "#" + re.sub(r"[^\w\s-]", "", heading).strip().lower().replace(" ", "-")
        for heading in re.findall(r"^#+ (.+)$", README, re.MULTILINE)
    }
    assert [link for link in links if link not in headings and not (ROOT / link).exists()] == []


def test_commands_are_targets() -> None:
    named = set(re.findall(r"(?:^|`|GIORNATA_\S+ )make (\w+)", README, re.MULTILINE))
    assert {"demo", "test", "up", "setup", "bench"} <= named
    assert named <= set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_the_rest_table_has_every_field() -> None:
    spoken_of_elsewhere = {"quality", "background"}  # what OpenAI's clients send; one value each
    assert first_column(section("Edit over REST")) == (
        EditForm.model_fields.keys() - spoken_of_elsewhere | {"image", "mask"}
    )


def test_the_nats_table_has_every_field() -> None:
    assert first_column(section("Edit over NATS")) == EditMessage.model_fields.keys() | {"schema"}


@pytest.mark.parametrize(
    "kind", [EditReply, Picture, ErrorBody, StateEvent, StepEvent, PreviewEvent, DoneEvent, CancelMessage]
)
def test_every_field_of_the_other_nats_messages_is_named(kind: type[BaseModel]) -> None:
    assert kind.model_fields.keys() - set(re.findall(r"`(\w+)`", section("Edit over NATS"))) == set()


def test_the_kinds_of_progress_are_named() -> None:
    text = section("Edit over NATS")
    assert f"`{EVENT_HEADER}`" in text
    relayed = set(EventKind) - {EventKind.DENOISED}  # between denoiser and router
    assert {kind for kind in relayed if f"`{kind}`" in text} == relayed
