"""Flux.2's small text encoder with random weights, and the text part of its processor; no download."""

from __future__ import annotations

import re
from typing import Any, Final

from diffusers.pipelines.flux2.system_messages import SYSTEM_MESSAGE
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import Mistral3Config, Mistral3ForConditionalGeneration, PreTrainedTokenizerFast

from giornata_prepost.families.processors import PixtralTextProcessor
from giornata_tools.model.random.qwen_text import byte_pairs, text_shape
from giornata_tools.model.text import CORPUS

NAMED: Final = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
MARKS: Final = (
    "[INST]",
    "[/INST]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[IMG]",
    "[IMG_BREAK]",
    "[IMG_END]",
)
CHAT: Final = (
    "{{ bos_token }}{% for message in messages %}"
    "{% set mark = 'SYSTEM_PROMPT' if message.role == 'system' else 'INST' %}[{{ mark }}]"
    "{% for part in message.content %}{{ part.text }}{% endfor %}[/{{ mark }}]{% endfor %}"
)
"""What the published chat template makes of messages in parts of text."""


def mistral_processor(tokens: int) -> PixtralTextProcessor:
    """Each word of edit instructions and of the pipeline's system message is one token.

    Conversations are padded on the left, to so many `tokens`.
    """
    words = re.findall(r"\w+", CORPUS + SYSTEM_MESSAGE)
    vocabulary, merges = byte_pairs(words, words, (*NAMED.values(), *MARKS))
    model = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    model.pre_tokenizer, model.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    sides: dict[str, Any] = {"padding_side": "left", "model_max_length": tokens}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=model, **NAMED, additional_special_tokens=[*MARKS], **sides
    )
    return PixtralTextProcessor(tokenizer, chat_template=CHAT)


def mistral3(tokenizer: Any, width: int, layers: int) -> Mistral3ForConditionalGeneration:
    """The encoder; its pictures' part is there, and no prompt reads it."""
    text = text_shape(tokenizer, width, layers) | {"model_type": "mistral"}
    sizes = {"hidden_size": width, "intermediate_size": width, "num_hidden_layers": 1, "image_size": 56}
    vision: dict[str, Any] = {**sizes, "model_type": "pixtral", "num_attention_heads": 2, "patch_size": 14}
    picture = tokenizer.convert_tokens_to_ids("[IMG]")
    config = Mistral3Config(text_config=text, vision_config=vision, image_token_index=picture)
    return Mistral3ForConditionalGeneration(config).eval()
