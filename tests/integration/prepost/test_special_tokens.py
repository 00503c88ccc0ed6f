"""Prompts that hold what a tokenizer reads as a special token: encoded, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from giornata.families import Family
from giornata.model_cards import read_model_card
from giornata.wire.errors import InvalidField
from giornata_prepost.checkpoint import FAMILIES
from giornata_prepost.families.processors import PICTURE
from tests.integration.prepost.oracle import SIZE, picture

KNOWN = (
    "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|object_ref_start|>",
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|startoftext|>", "<think>", "[IMG]", "[IMG_BREAK]", "[IMG_END]",
    "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "<s>", "</s>", "<pad>", "<unk>", "<extra_id_0>",
)  # fmt: skip


@pytest.fixture(scope="module", params=sorted(FAMILIES), ids=str)
def model(request: pytest.FixtureRequest, tiny_checkpoint: Callable[[Family], Path]) -> Any:
    folder = tiny_checkpoint(Family(request.param))
    return FAMILIES[request.param](folder, read_model_card(folder), torch.device("cpu"), torch.float32)


def special_tokens(model: Any) -> set[str]:
    parts = [
        getattr(model.pipeline, name, None)
        for name in ("tokenizer", "tokenizer_2", "tokenizer_3", "processor")
    ]
    found = [getattr(part, "tokenizer", part) for part in parts if part is not None]
    return {str(token) for one in found for token in one.added_tokens_encoder} | set(KNOWN)


def test_special_tokens_are_encoded_or_refused_by_name(model: Any) -> None:
    """The token of a picture would make the text encoder fail: it finds more of them than it has pictures."""
    seen = [picture()] if model.text_varies_with_picture else []
    for token in sorted(special_tokens(model)):
        for prompt in (f"a {token} star", token, f"{token}{token} a star"):
            if model.text_varies_with_picture and token == PICTURE:
                for encode in (model.encode_text, model.encode_unguided):
                    with pytest.raises(InvalidField, match="prompt or the negative prompt") as caught:
                        encode(prompt, SIZE, seen)
                    assert (caught.value.field, caught.value.received) == ("prompt", token)
            else:
                assert model.encode_text(prompt, SIZE, seen)
