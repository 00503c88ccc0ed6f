"""What concerns the whole run."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing import forkserver
from typing import Any

import pytest
import structlog
from hypothesis import settings

settings.register_profile(
    "giornata", deadline=None
)  # the first example may pay for an import, or for a busy machine
settings.load_profile("giornata")


@pytest.fixture(autouse=True)
def _logs_of_one_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a program that ran within a test wanted logged concerns no other test, nor the loggers that it used."""
    configure = structlog.configure

    def uncached(**settings: Any) -> None:
        configure(**settings | {"cache_logger_on_first_use": False})

    monkeypatch.setattr(structlog, "configure", uncached)
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """End the server that image processes are forked from; it would outlive this process by a moment."""
    forkserver._forkserver._stop()  # type: ignore[attr-defined]  # made for tests, and the only way to wait for its end
