"""What concerns the whole run."""

from __future__ import annotations

from multiprocessing import forkserver

import pytest
from hypothesis import settings

settings.register_profile(
    "giornata", deadline=None
)  # the first example may pay for an import, or for a busy machine
settings.load_profile("giornata")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """End the server that image processes are forked from; it would outlive this process by a moment."""
    forkserver._forkserver._stop()  # type: ignore[attr-defined]  # made for tests, and the only way to wait for its end
