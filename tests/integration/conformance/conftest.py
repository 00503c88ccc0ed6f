"""Families, each opened once for all tests of a worker."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from giornata.families import Family
from tests.integration.conformance.families import OpenFamily, open_family


@pytest.fixture(scope="session")
def opened_family(
    tiny_checkpoint: Callable[[Family], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], OpenFamily]:
    """The case of a name; it is opened when a test first asks for it."""
    scratch = tmp_path_factory.mktemp("families")
    return cache(lambda name: open_family(name, tiny_checkpoint, scratch))


@pytest.fixture(scope="session")
def exact_family(
    tiny_checkpoint: Callable[[Family], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], OpenFamily]:
    """Likewise, in float64."""
    scratch = tmp_path_factory.mktemp("exact")
    return cache(lambda name: open_family(name, tiny_checkpoint, scratch, torch.float64))
