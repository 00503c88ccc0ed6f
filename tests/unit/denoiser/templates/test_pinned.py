"""Templates in pinned memory, of which torch gives blocks of powers of two: they take little more than their bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from giornata_denoiser.choices import BITS
from giornata_denoiser.rows.stored import store
from giornata_denoiser.rows.template import CachedBlock, CachedTemplate, Entry


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The pinned blocks that are made, in bytes as torch makes them."""
    made: list[int] = []

    def rounded(size_bytes: int) -> None:
        made.append(1 << (size_bytes - 1).bit_length())

    def empty(*shape: int, _of: Any = torch.empty, pin_memory: bool = False, **how: Any) -> Tensor:
        found: Tensor = _of(*shape, **how)
        if pin_memory:
            rounded(found.nbytes)
        return found

    def pin_memory(self: Tensor) -> Tensor:
        rounded(self.nbytes)
        return self.clone()

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
    return made


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("tokens", [1, 33, 70])
def test_an_entry_in_pinned_memory_is_the_same_and_takes_a_tenth_more_at_most(
    blocks: list[int], bits: int, tokens: int
) -> None:
    def kept(seed: int) -> CachedBlock:
        made = torch.Generator().manual_seed(seed)
        return CachedBlock(*(store(torch.randn(tokens, 1024, generator=made), bits) for _ in range(2)))

    recording = CachedTemplate("t", (1, 1), (Entry(0.5, tuple(map(kept, range(24)))),))
    pinned = recording.pinned()
    before, after = ([*each.entries[0].blocks] for each in (recording, pinned))
    for one, other in zip(before, after, strict=True):
        for part, same in zip(one.parts, other.parts, strict=True):
            for tensor, copy in zip(part.tensors, same.tensors, strict=True):
                assert torch.equal(tensor, copy)
                assert copy.data_ptr() % 16 == 0
                assert copy.is_contiguous()
    assert pinned.size_bytes == recording.size_bytes
    assert sum(blocks) <= 1.1 * recording.size_bytes
