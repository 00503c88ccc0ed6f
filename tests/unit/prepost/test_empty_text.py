"""The empty prompt's conditioning: encoded once, by size where that matters, and written again once it is gone."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from giornata import tensors
from giornata.blobs.memory import MemoryBlobs
from giornata_prepost.empty_text import SIZES, EmptyText
from giornata_prepost.images.geometry import Size
from giornata_prepost.work import ModelThread


@pytest.fixture
def thread() -> Iterator[ModelThread]:
    made = ModelThread()
    yield made
    made.close()


class Encoder(SimpleNamespace):
    """Counts what it encodes."""

    def __init__(self, *, varies: bool) -> None:
        super().__init__(text_varies_with_size=varies, asked=[])

    def encode_text(self, prompt: str, size: Size) -> dict[str, Tensor]:
        self.asked.append(size)
        return {"prompt_embeds": torch.tensor([float(len(prompt)), *size])}


async def test_it_is_encoded_once_where_sizes_do_not_matter(thread: ModelThread) -> None:
    model, blobs = Encoder(varies=False), MemoryBlobs()
    text = EmptyText(_model(model), thread, blobs, "p1")
    one = await text.keep(Size(64, 64))
    assert await text.keep(Size(64, 128)) == one
    assert model.asked == [Size(64, 64)]
    await blobs.delete(one)
    again = await text.keep(Size(64, 64))
    assert await blobs.has(again)
    assert len(model.asked) == 1, "what is gone is written again, not encoded again"


async def test_the_sizes_used_last_are_remembered(thread: ModelThread) -> None:
    model, blobs = Encoder(varies=True), MemoryBlobs()
    text = EmptyText(_model(model), thread, blobs, "p1")
    first, *others = [Size(64, 64 * i) for i in range(1, SIZES + 2)]
    refs = {size: await text.keep(size) for size in (first, *others[:-1])}
    assert len({ref.key for ref in refs.values()}) == SIZES
    assert tensors.unpack(await blobs.get(refs[first]))["prompt_embeds"].tolist() == [0.0, 64.0, 64.0]
    await text.keep(first)
    assert len(model.asked) == SIZES
    await text.keep(others[-1])  # pushes out the one that was used longest ago
    await text.keep(first)
    assert len(model.asked) == SIZES + 1
    await text.keep(others[0])
    assert len(model.asked) == SIZES + 2


def _model(encoder: Encoder) -> Any:
    return encoder
