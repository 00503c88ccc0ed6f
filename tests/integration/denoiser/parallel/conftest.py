"""Four processes for all tests of groups."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.denoiser.parallel.members import Members


@pytest.fixture(scope="module")
def members() -> Iterator[Members]:
    made = Members(4)
    yield made
    made.close()
