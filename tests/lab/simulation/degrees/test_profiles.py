"""The derived profile that ships: what its maker makes."""

from __future__ import annotations

import pytest

from giornata.planning.cost_model import LinearFit
from giornata.planning.operations import NETWORK
from giornata_lab.simulation.degrees.workloads import made
from giornata_lab.simulation.machines import derived


def test_the_file_is_what_its_maker_makes() -> None:
    file, again = derived(), made()
    assert again.model_copy(update={"compute": file.compute, "degrees": file.degrees}) == file
    assert [fit.way for fit in again.degrees] == [fit.way for fit in file.degrees]
    pairs = [(file.compute, again.compute)]
    pairs += [(old.compute, new.compute) for old, new in zip(file.degrees, again.degrees, strict=True)]
    for old, new in pairs:
        assert _close(new) == pytest.approx(_close(old), rel=1e-4)


def _close(fit: LinearFit) -> list[float]:
    """Weights of what the network computes, and how good they are."""
    kept = [weight for name, weight in zip(fit.names, fit.weights, strict=True) if name in NETWORK]
    return [*kept, fit.r2, fit.error_p95]
