"""How long a test waits for what comes anyway where all is well: so that a hung test tells where it hung."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final
from unittest.mock import patch

VARIABLE: Final = "GIORNATA_TEST_PATIENCE_S"
CI_S: Final = 240
"""Machines that run all tests may be slow, shared, and stand still for seconds."""
PERSON_S: Final = 60
"""For a person who runs some tests in one process on an idle machine: three times the longest wait there."""


def chosen_s(environ: Mapping[str, str], *, terminal: bool, idle: bool) -> int:
    """The patience that the environment names; else a person's at a terminal, but not for workers beside each other."""
    if VARIABLE in environ:
        return int(environ[VARIABLE])
    alone = "CI" not in environ and "PYTEST_XDIST_WORKER" not in environ
    return PERSON_S if terminal and idle and alone else CI_S


def _has_terminal() -> bool:
    """Whether somebody may press Ctrl-C; standard input and output are pytest's."""
    try:
        os.close(os.open(os.ctermid(), os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


HUNG_S: Final = chosen_s(
    os.environ, terminal=_has_terminal(), idle=os.getloadavg()[0] < (os.cpu_count() or 1)
)
"""What has not come by then does not come."""
HUNG_MS: Final = 1000 * HUNG_S


@contextmanager
def patient_launcher() -> Iterator[None]:
    """While inside, what a launcher starts or ends late has stood still with this machine, and is not killed."""
    launcher = "giornata_tools.launcher.stack"
    with patch(f"{launcher}.GRACE_S", HUNG_S), patch(f"{launcher}.SERVER_LIMIT_S", HUNG_S):
        yield
