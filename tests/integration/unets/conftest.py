"""Tiny UNet checkpoints, each opened once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from giornata.families import Family
from tests.integration.unets.served import Served


@pytest.fixture(scope="session")
def served(tiny_checkpoint: Callable[[Family], Path]) -> Callable[[Family], Served]:
    """Opens the small checkpoint of a family, when it is asked for."""
    return cache(lambda family: Served.open(family, tiny_checkpoint(family)))


@pytest.fixture(scope="session")
def exact(tiny_checkpoint: Callable[[Family], Path]) -> Callable[[Family], Served]:
    """Likewise, in float64."""
    return cache(lambda family: Served.open(family, tiny_checkpoint(family), torch.float64))
