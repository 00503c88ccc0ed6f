"""The model's thread, and the texts that it encodes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from giornata import tensors
from giornata.wire.errors import InvalidField
from giornata.wire.jobs import PromptTokens
from giornata.wire.requests import EditParameters
from giornata_prepost.encoding import MOST_TOKENS, SIZES, EmptyPromptCache, EncodingInputs, encode_job
from giornata_prepost.families.pipeline import SeenPictures
from giornata_prepost.images.pictures import Size
from giornata_prepost.worker_pools import CallPriority, ModelThread
from tests.fakes.blobs import MemoryBlobs
from tests.patience import HUNG_S


@pytest.fixture
def thread() -> Iterator[ModelThread]:
    made = ModelThread()
    yield made
    made.close()


class Held:
    """Occupies the thread until it is let go."""

    def __init__(self, thread: ModelThread) -> None:
        self._begun = asyncio.Event()
        self._gate = threading.Event()
        self._loop = asyncio.get_running_loop()
        self.task = asyncio.create_task(thread.timed(CallPriority.BEGIN, self._hold))

    async def begun(self) -> None:
        await asyncio.wait_for(self._begun.wait(), HUNG_S)

    def let_go(self) -> None:
        self._gate.set()

    def _hold(self) -> None:
        self._loop.call_soon_threadsafe(self._begun.set)
        assert self._gate.wait(HUNG_S)


async def test_what_finishes_an_edit_goes_before_what_begins_one(thread: ModelThread) -> None:
    order: list[str] = []
    held = Held(thread)
    await held.begun()
    calls = [
        asyncio.create_task(thread.timed(turn, order.append, name))
        for turn, name in (
            (CallPriority.BEGIN, "encode 1"),
            (CallPriority.FINISH, "decode 1"),
            (CallPriority.BEGIN, "encode 2"),
            (CallPriority.FINISH, "decode 2"),
        )
    ]
    await asyncio.sleep(0)  # each puts itself in the queue at its first step
    held.let_go()
    await asyncio.gather(held.task, *calls)
    assert order == ["decode 1", "decode 2", "encode 1", "encode 2"]


async def test_a_call_that_is_cancelled_while_it_waits_never_runs(thread: ModelThread) -> None:
    ran: list[str] = []
    held = Held(thread)
    await held.begun()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await thread.timed(CallPriority.FINISH, ran.append, "cancelled")
    other = asyncio.create_task(thread.timed(CallPriority.BEGIN, ran.append, "other"))
    held.let_go()
    await asyncio.gather(held.task, other)
    assert ran == ["other"]


async def test_results_and_errors_come_back_to_their_caller(thread: ModelThread) -> None:
    results = await asyncio.gather(
        thread.timed(CallPriority.BEGIN, divmod, 7, 2),
        thread.timed(CallPriority.FINISH, divmod, 7, 0),
        return_exceptions=True,
    )
    assert isinstance(results[0], tuple)
    assert results[0][0] == (3, 1)
    assert results[0][1] >= 0
    assert isinstance(results[1], ZeroDivisionError)


# Texts: the empty prompt is encoded once, by size where that matters; a prompt may not be too long.


class Encoder(SimpleNamespace):
    """Counts what it encodes."""

    def __init__(self, *, varies: bool) -> None:
        super().__init__(text_varies_with_size=varies, asked=[])

    def encode_text(self, prompt: str, size: Size, seen: SeenPictures) -> dict[str, Tensor]:
        self.asked.append(size)
        colours = (float(picture.mean()) for picture in seen)
        return {"prompt_embeds": torch.tensor([float(len(prompt)), *size, *colours])}


async def test_it_is_encoded_once_where_sizes_do_not_matter(thread: ModelThread) -> None:
    model, blobs = Encoder(varies=False), MemoryBlobs()
    text = EmptyPromptCache(_model(model), thread, blobs, "p1")
    one = await text.keep("alice", Size(64, 64))
    assert await text.keep("alice", Size(64, 128)) == one
    assert model.asked == [Size(64, 64)]
    await blobs.delete(one)
    again = await text.keep("alice", Size(64, 64))
    assert await blobs.has(again)
    assert len(model.asked) == 1, "what is gone is written again, not encoded again"


async def test_the_sizes_used_last_are_remembered(thread: ModelThread) -> None:
    model, blobs = Encoder(varies=True), MemoryBlobs()
    text = EmptyPromptCache(_model(model), thread, blobs, "p1")
    first, *others = [Size(64, 64 * i) for i in range(1, SIZES + 2)]
    refs = {size: await text.keep("alice", size) for size in (first, *others[:-1])}
    assert len({ref.key for ref in refs.values()}) == SIZES
    assert tensors.unpack(await blobs.get(refs[first]))["prompt_embeds"].tolist() == [0.0, 64.0, 64.0]
    await text.keep("alice", first)
    assert len(model.asked) == SIZES
    await text.keep("alice", others[-1])  # pushes out the one that was used longest ago
    await text.keep("alice", first)
    assert len(model.asked) == SIZES + 1
    await text.keep("alice", others[0])
    assert len(model.asked) == SIZES + 2


async def test_a_picture_that_is_seen_has_its_own(thread: ModelThread) -> None:
    model, blobs, size = Encoder(varies=False), MemoryBlobs(), Size(4, 2)
    text = EmptyPromptCache(_model(model), thread, blobs, "p1")
    black, white = (np.full((2, 4, 3), colour, np.uint8) for colour in (0, 255))
    refs = [await text.keep("alice", size, [seen]) for seen in (black, white, black)]
    assert [tensors.unpack(await blobs.get(ref))["prompt_embeds"][-1] for ref in refs] == [0, 255, 0]
    assert len(model.asked) == 2
    turned = await text.keep("alice", Size(2, 4), [black.reshape(4, 2, 3)])
    assert turned.key not in {ref.key for ref in refs}, "equal pixels of another size are another picture"
    beside = await text.keep("alice", size, [black, white])
    assert tensors.unpack(await blobs.get(beside))["prompt_embeds"].tolist()[-2:] == [0, 255]
    one, other = [
        await text.keep("alice", size, [black, black.reshape(sides)]) for sides in ((1, 8, 3), (8, 1, 3))
    ]
    assert len({beside.key, one.key, other.key, *(ref.key for ref in refs)}) == 5


def _model(encoder: Encoder) -> Any:
    return encoder


class CalledError(Exception):
    """The text encoder was called."""


class Reader:
    """A model whose prompts are as long as they say."""

    card = SimpleNamespace(name="wide", family="qwen-image-edit")
    text_varies_with_picture = False

    def prompt_tokens(self, prompt: str) -> PromptTokens:
        return PromptTokens(given=2 * int(prompt), read=int(prompt))

    def encode_text(self, *_: object) -> None:
        raise CalledError


@pytest.mark.parametrize(("read", "refused"), [(MOST_TOKENS, CalledError), (MOST_TOKENS + 1, InvalidField)])
def test_a_prompt_of_which_too_much_would_be_read_never_reaches_the_text_encoder(
    read: int, refused: type[Exception]
) -> None:
    model: Any = Reader()
    parameters = EditParameters(prompt=str(read), seed=1, strength=1.0)
    job: Any = SimpleNamespace(parameters=parameters, regions=(), cfg_scale=None)
    with pytest.raises(refused) as caught:
        encode_job(model, job, EncodingInputs(None), Size(64, 64))
    if isinstance(caught.value, InvalidField):
        assert (caught.value.field, caught.value.received) == ("prompt", f"{2 * read} tokens")
