"""The examples of the README and the pages, executed as they stand: only the addresses are this stack's."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from pathlib import Path

import pytest

from giornata_lab.bench.systems.edit_forms import box, file, pixels, scene
from tests.e2e.live import LiveStack

ROOT = Path(__file__).parents[2]
ENVIRONMENT = Path(sys.executable).parent
EXAMPLE = re.compile(r"<!-- tested: (sh|python) -->\n```\w+\n(.*?)```", re.DOTALL)
EXAMPLES = [
    pytest.param(language, code, id=f"{page.stem}-{number}")
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    for number, (language, code) in enumerate(EXAMPLE.findall(page.read_text(encoding="utf-8")))
]


def test_every_door_has_an_example() -> None:
    pages = {str(example.id).rpartition("-")[0] for example in EXAMPLES}
    assert pages >= {"README", "api-http", "api-nats", "command-line"}


def test_the_nats_example_is_the_file_and_under_twenty_lines() -> None:
    text = (ROOT / "docs" / "examples" / "edit_over_nats.py").read_text(encoding="utf-8")
    assert any(text.strip() in str(example.values[1]) for example in EXAMPLES)
    assert len(text.splitlines()) < 20


@pytest.mark.parametrize(("language", "code"), EXAMPLES)
async def test_an_example_edits_a_picture(stack: LiveStack, tmp_path: Path, language: str, code: str) -> None:
    (tmp_path / "photo.png").write_bytes(file(scene()))
    (tmp_path / "mask.png").write_bytes(file(box()))
    code = code.replace("http://127.0.0.1:8000", stack.url)
    arguments = ("photo.png", "mask.png", "a red star")
    program = ["bash", "-euo", "pipefail", "-c"] if language == "sh" else [sys.executable, "-c"]
    process = await asyncio.create_subprocess_exec(
        *program,
        code,
        *arguments,
        cwd=tmp_path,
        env={
            **os.environ,
            "GIORNATA_NATS_URL": stack.nats_url,
            "PATH": f"{ENVIRONMENT}:{os.environ['PATH']}",
        },
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    assert pixels((tmp_path / "edited.png").read_bytes()).shape == (96, 128, 3)
