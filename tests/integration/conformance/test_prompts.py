"""Every family reads a prompt up to its limit, and encodes special tokens or refuses them by name."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle, islice
from typing import Any, Final

import pytest
import torch

from giornata.families import Family
from giornata.wire.errors import InvalidField
from giornata_lab.model.random.text_encoders import CORPUS
from giornata_prepost.families.pipeline import ImageModel
from giornata_prepost.families.processors import PICTURE
from tests.integration.conformance.families import UNETS, OpenFamily
from tests.integration.prepost.oracle import SIZE, picture

UNCUT: Final = {Family.QWEN_IMAGE_EDIT, Family.QWEN_IMAGE_EDIT_PLUS, Family.QWEN_IMAGE_21}
WORDS: Final = [word for word in dict.fromkeys(CORPUS.split()) if word.isalpha()]
OTHER, ANOTHER = WORDS[0], WORDS[1]
KNOWN: Final = (
    "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|object_ref_start|>",
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|startoftext|>", "<think>", "[IMG]", "[IMG_BREAK]", "[IMG_END]",
    "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "<s>", "</s>", "<pad>", "<unk>", "<extra_id_0>",
)  # fmt: skip


TEXTS: Final = (
    "flux-inpaint", "sd", "sdxl", "sd3", "z-image", "chroma", "flux2", "flux2-klein", "qwen-image", "qwen-image-edit",
    "qwen-image-edit-plus", "qwen-image-2.1",
)  # fmt: skip
"""Cases whose prompts are read in different ways."""


@pytest.fixture(scope="module", params=TEXTS)
def model(request: pytest.FixtureRequest, opened_family: Callable[[str], OpenFamily]) -> Any:
    return opened_family(request.param).served.images


def words(count: int, *last: str) -> str:
    """A prompt of so many words, and the `last` ones."""
    return " ".join([*islice(cycle(WORDS), count), *last])


def seen(model: ImageModel) -> list[Any]:
    return [picture()] if model.text_varies_with_picture else []


def encoded(model: ImageModel, prompt: str) -> torch.Tensor:
    return model.encode_text(prompt, SIZE, seen(model))["prompt_embeds"]


def test_the_limit_is_where_words_begin_to_be_left_out(model: ImageModel) -> None:
    limit = model.card.max_prompt_tokens
    assert (limit is None) == (model.card.family in UNCUT)
    length = 200 if limit is None else limit
    long, other, longer = (words(length - 1, *last) for last in ((OTHER,), (ANOTHER,), (OTHER, ANOTHER)))
    told = model.prompt_tokens(long)
    assert (told.given, told.read) == (length, length), "each word is a token"
    assert model.prompt_tokens("").given == 0
    assert not torch.equal(encoded(model, long), encoded(model, other)), "the last token within is read"
    told = model.prompt_tokens(longer)
    assert (told.given, told.read) == (length + 1, length + (limit is None))
    if limit is not None:
        beyond = words(length - 1, OTHER, OTHER, ANOTHER)
        assert torch.equal(encoded(model, longer), encoded(model, beyond)), "nothing beyond is read"


def test_chunks_are_what_the_pipeline_makes_of_each(model: Any) -> None:
    """The pipeline's own encoding of each chunk's words, one behind the other; the first one's pooled embedding."""
    if model.card.family not in UNETS:
        pytest.skip("only UNets read prompts in chunks")
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


def special_tokens(model: Any) -> set[str]:
    names = ("tokenizer", "tokenizer_2", "tokenizer_3", "processor")
    parts = [part for name in names if (part := getattr(model.pipeline, name, None)) is not None]
    found = [getattr(part, "tokenizer", part) for part in parts]
    return {str(token) for one in found for token in one.added_tokens_encoder} | set(KNOWN)


def test_special_tokens_are_encoded_or_refused_by_name(model: Any) -> None:
    """The token of a picture would make the text encoder fail: it finds more of them than it has pictures."""
    refused = {PICTURE} if model.text_varies_with_picture else set()
    accepted = iter(sorted(special_tokens(model) - refused))
    while some := list(islice(accepted, 4)):  # no family cuts so few
        assert model.encode_text(" a star ".join(some), SIZE, seen(model))
    for token in refused:
        for prompt in (token, f"a {token}{token} star"):
            for encode in (model.encode_text, model.encode_unguided):
                with pytest.raises(InvalidField, match="prompt or the negative prompt") as caught:
                    encode(prompt, SIZE, seen(model))
                assert (caught.value.field, caught.value.received) == ("prompt", token)
