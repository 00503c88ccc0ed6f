"""Memory of a denoiser that an instance maps."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from giornata import unnamed
from giornata.control.link import slabs
from giornata.wire.control_steps import OpenLink
from giornata.wire.controlnets import DataPath
from tests.contract.control_link.strangers import (
    CPU,
    SLAB_BYTES,
    TOKEN,
)


@pytest.mark.parametrize("sealed", [True, False], ids=["a memory file", "a temporary file"])
def test_a_slab_is_memory_that_two_see(sealed: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(unnamed, "_SEALABLE", sealed)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    slab = slabs.make(DataPath.UNIX, SLAB_BYTES, CPU)
    assert list(tmp_path.iterdir()) == [], "it has no name"
    other = slabs.opened(
        OpenLink(token=TOKEN, path=DataPath.UNIX, slab_bytes=SLAB_BYTES), slab.descriptor, CPU
    )
    assert other is not None
    slabs.at(other, 64, (2, 3), torch.bfloat16).fill_(1.5)
    assert slabs.at(slab.memory, 64, (2, 3), torch.bfloat16).tolist() == [[1.5] * 3] * 2
    slab.sent()


def _unsealed(size_bytes: int) -> int:
    descriptor = os.memfd_create("unsealed", os.MFD_CLOEXEC)
    os.truncate(descriptor, size_bytes)
    return descriptor


@pytest.mark.parametrize(
    ("descriptor", "slab_bytes", "why"),
    [
        (partial(_unsealed, SLAB_BYTES), SLAB_BYTES, "unsealed"),
        (
            lambda: slabs.make(DataPath.UNIX, SLAB_BYTES, CPU).descriptor,
            2 * SLAB_BYTES,
            "8192 bytes.* of 4096",
        ),
        (lambda: os.open("/dev/null", os.O_RDONLY), SLAB_BYTES, "cannot be mapped"),
    ],
    ids=["it could shrink", "it is short", "it is no memory"],
)
def test_a_file_that_would_end_who_writes_to_it_is_refused(
    descriptor: Any, slab_bytes: int, why: str
) -> None:
    opening, found = OpenLink(token=TOKEN, path=DataPath.UNIX, slab_bytes=slab_bytes), descriptor()
    try:
        with pytest.raises(ValueError, match=why):
            slabs.opened(opening, found, CPU)
    finally:
        os.close(found)
