"""Instances: in a process of its own, on every data path; and in this process, to be disturbed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from giornata.control.link.client import ControlLink
from giornata.wire.controlnets import DataPath
from tests.contract.control_link.links import device_of, opened
from tests.contract.control_link.strangers import Served, listening_at
from tests.fakes.control_instance import Instance, instance

NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(scope="module", params=["unix", "tcp", pytest.param("cuda", marks=NEEDS_CUDA)])
def path(request: pytest.FixtureRequest) -> DataPath:
    return DataPath(request.param)


@pytest.fixture(scope="module")
def served(path: DataPath, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    with instance(tmp_path_factory.mktemp("link"), str(device_of(path))) as found:
        yield found


@pytest.fixture
def doomed(path: DataPath, tmp_path: Path) -> Iterator[Instance]:
    """An instance for one test, which may end it."""
    with instance(tmp_path, str(device_of(path))) as found:
        yield found


@pytest.fixture
def link(path: DataPath, served: Instance) -> Iterator[ControlLink]:
    with opened(path, served) as found:
        yield found


@pytest.fixture
def in_process(tmp_path: Path) -> Iterator[Served]:
    """A listener in this process."""
    with listening_at(tmp_path / "s", ("127.0.0.1", 0)) as found:
        yield found
