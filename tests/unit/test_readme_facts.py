"""What the README and the pages name exists: files, folders, commands, variables, fields of both doors.

Sphinx checks the links (``make check``); the examples run in ``tests/e2e``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from giornata.families import KINDS, Family
from giornata.wire.adapters import CONTROL_IMAGES
from giornata.wire.errors import ErrorBody
from giornata.wire.messages import (
    EVENT_HEADER,
    CancelMessage,
    DoneEvent,
    EditMessage,
    EditReply,
    EventKind,
    MaskedRegion,
    MaskMessage,
    MaskMessageReply,
    Picture,
    PreviewEvent,
    StateEvent,
    StepEvent,
)
from giornata.wire.models import DISCRETE_TIME, FLOW_MATCHING, WITH_LIGHTNING, Task
from giornata.wire.requests import PROMPT_BYTES
from giornata_gateway.rules.forms import EditForm, UnreadFields
from giornata_tools.cli.app import COMMANDS

ROOT = Path(__file__).parents[2]
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
}
FOLDERS = ("deploy", "docs", "services", "shared", "tests")
SOURCES = {".py", ".sh", ".toml", ".yaml", ".yml"}
README_BYTES = 8 << 10
PAGE_WORDS = 600
"""Words of prose of a page, which answers one question. Tables, code and comments don't count."""
RECORDS, RECORD_WORDS = 30, 500
"""Most decision records, and most words of one, whatever they stand in."""
DOOR = "docs/api-nats.md"
SAMPLERS = {DISCRETE_TIME: "all", FLOW_MATCHING: "Euler", WITH_LIGHTNING: "Euler, Lightning's levels"}
SCALES: dict[str, int] = {Family.QWEN_IMAGE_21: 16}
"""Pixels a side of a latent pixel; most autoencoders that are served halve a picture three times."""


@pytest.fixture(scope="module")
def files() -> list[str]:
    """Every file of the repository that a page may name, with a slash in front."""
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.*")]
    return [f"/{path.relative_to(ROOT).as_posix()}" for path in [*paths, *ROOT.glob("*.*")]]


@pytest.fixture(scope="module")
def code(files: list[str]) -> str:
    """All programs and settings, one after the other."""
    suffixes = (*SOURCES, "Dockerfile")
    chosen = [path for path in files if path.endswith(suffixes) and not path.startswith("/docs/")]
    return "\n".join((ROOT / path[1:]).read_text(encoding="utf-8") for path in chosen)


def fields_of(code: str) -> set[str]:
    """Names of annotated fields of classes."""
    return set(re.findall(r"^    (\w+): ", code, re.MULTILINE))


def named(pattern: str) -> Iterator[tuple[str, str]]:
    """Page and match of everything that `pattern` finds in a page."""
    for page, text in PAGES.items():
        yield from ((page, match) for match in re.findall(pattern, text, re.MULTILINE))


def commands(pattern: str) -> set[str]:
    """What `pattern` finds in the code of any page: at the start of a line of a block, or of a span in backticks."""
    found: set[str] = set()
    for text in PAGES.values():
        blocks = re.findall(r"^```\w+\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        spans = re.findall(r"`([^`]+)`", re.sub(r"(?ms)^```.*?^```", "", text))
        for code in (*blocks, *(" ".join(span.split()) for span in spans)):
            found |= set(re.findall(pattern, code, re.MULTILINE))
    return found


def section(page: str, title: str) -> str:
    return PAGES[page].split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def first_column(text: str) -> set[str]:
    """Names in backticks in the first cells of the tables of `text`."""
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("|")]
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


def prose(text: str) -> list[str]:
    """Return the words of a page without its code blocks, comments and tables."""
    text = re.sub(r"(?ms)^ *(```+).*?^ *\1 *$|<!--.*?-->", "", text)
    return [word for line in text.splitlines() if not line.lstrip().startswith("|") for word in line.split()]


def test_the_readme_is_short() -> None:
    assert len(PAGES["README.md"].encode()) <= README_BYTES


def test_a_page_answers_its_question_in_few_words() -> None:
    words = {
        page: len(prose(text))
        for page, text in PAGES.items()
        if page.startswith("docs/") and not page.startswith("docs/adr/")
    }
    assert {page: count for page, count in words.items() if count > PAGE_WORDS} == {}


def test_files_that_are_named_exist(files: list[str]) -> None:
    names = list(named(r"`((?:[\w.-]+/)*[\w-]+\.(?:py|yaml|toml))`"))
    assert len(names) > 60
    assert [name for name in names if not any(path.endswith(f"/{name[1]}") for path in files)] == []


def test_folders_that_are_named_exist(files: list[str]) -> None:
    made = ("out/", "keys/", "default/")  # by commands that the pages explain, or in the blob store
    names = [name for name in named(r"`((?:[\w.-]+/)+)`") if not name[1].startswith(made)]
    assert len(names) > 15
    assert [name for name in names if not any(f"/{name[1]}" in path for path in files)] == []


def test_paths_from_the_root_exist() -> None:
    names = named(rf"`((?:{'|'.join(FOLDERS)})(?:/[\w.-]+)+)`")
    assert [name for name in names if not (ROOT / name[1]).exists()] == []


def test_make_commands_are_targets() -> None:
    names = commands(r"^(?:GIORNATA_\S+ )?make ([\w-]+)")
    assert {"demo", "test", "up", "setup", "bench", "check"} <= names
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert names - targets == set()


def test_commands_of_giornata_exist() -> None:
    names = commands(r"(?:^|&& )giornata ([a-z]\w*)")
    assert names >= {"edit", "up", "bench", "keys", "simulate"}
    assert names - COMMANDS.keys() == set()


def test_variables_are_read_somewhere(code: str) -> None:
    """A variable is a field of a service's configuration, or stands as it is in a program or a file of `deploy`."""
    names = {name for _, name in named(r"\b(GIORNATA_[A-Z_]+[A-Z])\b")}
    assert len(names) > 20
    fields = fields_of(code)
    assert {
        name for name in names if name not in code and name.removeprefix("GIORNATA_").lower() not in fields
    } == set()


def test_options_are_taken_somewhere(code: str) -> None:
    """Options of our programs: in the code of the pages, behind a program's or a make target's name, or alone."""
    lines = commands(r"^((?:giornata|make|--|\S*python -m (?:giornata|tests)).*)")
    names = {name for line in lines for name in re.findall(r"(?<!\S)[\"(]?(--[a-z][a-z-]+)", line)}
    names |= {name for _, name in named(r"ARGS=\"(--[a-z][a-z-]+)")}
    assert len(names) > 40
    fields = fields_of(code)
    assert {
        name for name in names if f'"{name}' not in code and name[2:].replace("-", "_") not in fields
    } == set()


def test_the_fields_table_of_the_http_door_is_complete() -> None:
    assert first_column(section("docs/api-http.md", "Fields")) == (
        EditForm.model_fields.keys() - UnreadFields.model_fields
        | {"image", "mask", "reference", *CONTROL_IMAGES}
    )
    assert first_column(section("docs/openai.md", "Fields")) >= UnreadFields.model_fields.keys()


def test_the_table_of_families_is_that_of_the_code() -> None:
    """Each row tells the multiple of sides, whether samplers are a choice, whether it generates, whether it reuses."""
    rows = [
        line.split("|")[1:-1] for line in PAGES["docs/families.md"].splitlines() if line.startswith("| `")
    ]
    told = {row[0].strip(" `"): [cell.strip() for cell in row[1:]] for row in rows if len(row) == 8}
    expected = {}
    for kind in KINDS.values():
        for family in (kind.by_input_channels or {0: kind.family}).values():
            expected[family] = [
                SAMPLERS[kind.samplers],
                str(SCALES.get(family, 8) * kind.token_latents),
                "yes" if Task.GENERATE in kind.of(family).tasks else "no",
                "reuses" if kind.reuses else "off",
            ]
            guidance = told[family][2]
            above = None if kind.guided_above is None else f"classifier-free, above {kind.guided_above:g}"
            assert above in {None, guidance}, family
            assert ("true_cfg_scale" in guidance) == kind.takes_true_cfg, family
            assert told[family][1].strip("`") in KINDS, family
    assert {family: cells[3:] for family, cells in told.items()} == expected


@pytest.mark.parametrize("door", ["api-http", "api-nats", "api-a1111", "openai"])
def test_the_page_of_a_door_tells_how_many_bytes_prompts_may_have(door: str) -> None:
    assert f"{PROMPT_BYTES:,} bytes together" in PAGES[f"docs/{door}.md"]


def test_the_request_table_of_the_nats_door_is_complete() -> None:
    assert first_column(section(DOOR, "The request")) == EditMessage.model_fields.keys() | {"schema"}


@pytest.mark.parametrize(
    "kind",
    [
        EditReply, Picture, ErrorBody, StateEvent, StepEvent, PreviewEvent, DoneEvent, CancelMessage,
        MaskMessage, MaskMessageReply, MaskedRegion,
    ],
)  # fmt: skip
def test_every_field_of_the_other_nats_messages_is_named(kind: type[BaseModel]) -> None:
    assert kind.model_fields.keys() - set(re.findall(r"`(\w+)`", PAGES[DOOR])) == set()


def test_the_kinds_of_progress_are_named() -> None:
    assert f"`{EVENT_HEADER}`" in section(DOOR, "Progress")
    relayed = set(EventKind) - {EventKind.DENOISED}  # between denoiser and router
    assert first_column(section(DOOR, "Progress")) == relayed


def test_the_decisions_are_all_in_the_index() -> None:
    records = {path.name for path in (ROOT / "docs" / "adr").glob("0*.md")}
    assert (
        set(re.findall(r"^\| \[\d{4} .*?\]\((.*?)\)", PAGES["docs/adr/README.md"], re.MULTILINE)) == records
    )


def test_a_decision_is_told_in_few_words() -> None:
    words = {page: len(text.split()) for page, text in PAGES.items() if page.startswith("docs/adr/0")}
    assert len(words) <= RECORDS
    assert {page: count for page, count in words.items() if count > RECORD_WORDS} == {}
