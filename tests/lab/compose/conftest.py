"""One engine and one stack for all tests of the folder, which change it in the order of their file."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

from tests.lab.compose.bases import make_bases, torch_index
from tests.lab.compose.engine import NoEngine, running
from tests.lab.compose.stack import Stack, composed

KEPT: Final = "GIORNATA_COMPOSE_FOLDER"
"""Names a folder in which the engine and its images outlive the run, for a quicker next one."""
REQUIRED: Final = "GIORNATA_REQUIRE_DOCKER"
"""With 1, a machine without an engine fails the tests."""


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """The stack, not yet built; skipped with the reason where there is no engine."""
    kept = os.environ.get(KEPT)
    root = Path(kept) if kept else Path(tempfile.mkdtemp(prefix="giornata-compose-"))
    root.mkdir(exist_ok=True)
    try:
        with ExitStack() as opened:
            try:
                engine = opened.enter_context(running(root))
            except NoEngine as error:
                if os.environ.get(REQUIRED) == "1":
                    raise
                pytest.skip(f"no Docker engine: {error}")
            make_bases(engine)
            index = opened.enter_context(torch_index(engine))
            folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="giornata-compose-")))
            yield opened.enter_context(composed(engine, folder, index))
    finally:
        if not kept:
            shutil.rmtree(root)
