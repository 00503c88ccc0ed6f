"""The devices that the tests of this folder run on: the CPU, and a CUDA device where there is one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import tests.examples  # noqa: F401 - the profiles of properties: the campaign reads no other conftest

NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def exact_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, not in TensorFloat-32, whose rounding is 1e-3."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=NEEDS_CUDA)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Indexed, as tensors tell it."""
    return torch.device("cuda:0" if request.param == "cuda" else "cpu")


@pytest.fixture
def cuda() -> Iterator[torch.device]:
    """A CUDA device with all of its memory to be had, afterwards as well."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    torch.cuda.empty_cache()
    yield torch.device("cuda:0")
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()
