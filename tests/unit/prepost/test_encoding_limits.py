"""How long a prompt may be that a model reads as a whole."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from giornata.wire.errors import InvalidField
from giornata.wire.jobs import PromptTokens
from giornata.wire.requests import EditParameters
from giornata_prepost.encoding import MOST_TOKENS, EncodingInputs, encoded
from giornata_prepost.images.geometry import Size


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
        encoded(model, job, EncodingInputs(None), Size(64, 64))
    if isinstance(caught.value, InvalidField):
        assert (caught.value.field, caught.value.received) == ("prompt", f"{2 * read} tokens")
