"""A profiled checkpoint."""

from __future__ import annotations

import pytest

from tests.integration.denoiser.pool.bench import Model, make_model, open_model
from tests.shared_files import SharedFolders


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def model(shared_folders: SharedFolders) -> Model:
    return open_model(shared_folders.folder("pool", make_model))
