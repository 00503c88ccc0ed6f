"""A profiled checkpoint."""

from __future__ import annotations

import pytest

from giornata_denoiser.pool import ranks
from tests.fakes.forked_rank import ForkedRankProcess
from tests.integration.denoiser.pool.bench import Model, make_model, open_model
from tests.shared_files import SharedFolders


@pytest.fixture(autouse=True)
def _forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """One test starts ranks as production does."""
    monkeypatch.setattr(ranks, "LocalRankProcess", ForkedRankProcess)


@pytest.fixture(scope="session")
def model(shared_folders: SharedFolders) -> Model:
    return open_model(shared_folders.folder("pool", make_model))
