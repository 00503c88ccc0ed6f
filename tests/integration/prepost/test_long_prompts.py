"""A prompt is read up to the model's limit, which is told: UNets read it in chunks, others cut it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
import torch

from giornata.families import Family
from giornata.model_cards import read_model_card
from giornata_prepost.checkpoint import FAMILIES
from giornata_prepost.families.protocol import ImageModel
from giornata_tools.model.text import CORPUS
from tests.integration.prepost.oracle import SIZE, picture

UNETS = {Family.SD, Family.SD_INPAINT, Family.SDXL, Family.SDXL_INPAINT}
UNCUT = {Family.QWEN_IMAGE_EDIT, Family.QWEN_IMAGE_EDIT_PLUS, Family.QWEN_IMAGE_21}
WORDS = [word for word in dict.fromkeys(CORPUS.split()) if word.isalpha()]
OTHER, ANOTHER = WORDS[0], WORDS[1]


@pytest.fixture(scope="module", params=sorted(FAMILIES), ids=str)
def model(request: pytest.FixtureRequest, tiny_checkpoint: Callable[[Family], Path]) -> Any:
    folder = tiny_checkpoint(Family(request.param))
    return FAMILIES[request.param](folder, read_model_card(folder), torch.device("cpu"), torch.float32)


def words(count: int, *last: str) -> str:
    """A prompt of so many words, and the `last` ones."""
    return " ".join([*islice(cycle(WORDS), count), *last])


def encoded(model: ImageModel, prompt: str) -> torch.Tensor:
    seen = [picture()] if model.text_varies_with_picture else []
    return model.encode_text(prompt, SIZE, seen)["prompt_embeds"]


def test_the_limit_is_where_words_begin_to_be_left_out(model: ImageModel) -> None:
    limit = model.card.max_prompt_tokens
    assert (limit is None) == (model.card.family in UNCUT)
    length = 200 if limit is None else limit
    long, other, longer = (words(length - 1, *last) for last in ((OTHER,), (ANOTHER,), (OTHER, ANOTHER)))
    told = model.prompt_tokens(long)
    assert (told.given, told.read) == (length, length), "each word is a token"
    assert not torch.equal(encoded(model, long), encoded(model, other)), "the last token within is read"
    told = model.prompt_tokens(longer)
    assert (told.given, told.read) == (length + 1, length + (limit is None))
    if limit is not None:
        beyond = words(length - 1, OTHER, OTHER, ANOTHER)
        assert torch.equal(encoded(model, longer), encoded(model, beyond)), "nothing beyond is read"


def test_a_short_prompt_is_told_whole(model: ImageModel) -> None:
    assert model.prompt_tokens("").given == 0
    told = model.prompt_tokens(words(5))
    assert (told.given, told.read) == (5, 5)


def test_chunks_are_what_the_pipeline_makes_of_each(model: Any) -> None:
    """The pipeline's own encoding of each chunk's words, one behind the other; the first one's pooled embedding."""
    if model.card.family not in UNETS:
        return
    room = model.card.max_text_tokens - 2
    assert model.card.max_prompt_tokens == 4 * room
    for count in (room, room + 1, 2 * room, 3 * room + 5, 9 * room):
        prompt = words(count).split()
        chunks = [" ".join(prompt[at : at + room]) for at in range(0, min(count, 4 * room), room)]
        made = model.encode_text(" ".join(prompt), SIZE)
        with torch.no_grad():
            parts = [
                model.pipeline.encode_prompt(
                    chunk, device="cpu", num_images_per_prompt=1, do_classifier_free_guidance=False
                )
                for chunk in chunks
            ]
        expected = torch.cat([part[0][0] for part in parts])
        assert expected.shape[0] == len(chunks) * model.card.max_text_tokens
        torch.testing.assert_close(made["prompt_embeds"], expected, rtol=0, atol=1e-6)
        if "pooled_prompt_embeds" in made:
            torch.testing.assert_close(made["pooled_prompt_embeds"], parts[0][2][0], rtol=0, atol=1e-6)
