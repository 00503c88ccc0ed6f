"""A profiled checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from giornata.families import Family
from giornata_denoiser.pool import ranks
from tests.fakes.forked_rank import ForkedRankProcess
from tests.integration.denoiser.pool.bench import Model, open_model


@pytest.fixture(autouse=True)
def _forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """One test starts ranks as production does."""
    monkeypatch.setattr(ranks, "LocalRankProcess", ForkedRankProcess)


@pytest.fixture(scope="session")
def model(tiny_checkpoint: Callable[[Family], Path], tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = tmp_path_factory.mktemp("pool") / "profile.json"
    return open_model(tiny_checkpoint(Family.FLUX_INPAINT)).profiled(path, (2, 3, 4))
