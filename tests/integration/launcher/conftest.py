"""A launcher that is as patient as the tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.patience import patient_launcher


@pytest.fixture(autouse=True, scope="session")
def _patient_launcher() -> Iterator[None]:
    with patient_launcher():
        yield
