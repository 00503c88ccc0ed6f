"""Flux.2's small text encoder with random weights, and the text part of its processor; no download."""

from __future__ import annotations

import re
from typing import Any, Final

from diffusers.pipelines.flux2.system_messages import SYSTEM_MESSAGE
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    MistralConfig,
    PixtralVisionConfig,
    PreTrainedTokenizerFast,
)

from giornata_prepost.families.flux2.processor import PixtralTextProcessor
from giornata_tools.model.random.qwen_text import HEADS, byte_pairs
from giornata_tools.model.text import CORPUS

PICTURE: Final = "[IMG]"
SPECIAL: Final = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    *(PICTURE, "[IMG_BREAK]", "[IMG_END]", "<pad>"),
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
    words = re.findall(r"\w+", SYSTEM_MESSAGE)
    vocabulary, merges = byte_pairs([*CORPUS.split(), *words], [*CORPUS.split(), *words], SPECIAL)
    model = Tokenizer(BPE(vocab=vocabulary, merges=merges))
    model.pre_tokenizer, model.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=model,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=[*SPECIAL[3:-1]],
        padding_side="left",
        model_max_length=tokens,
    )
    tokenizer.chat_template = CHAT
    return PixtralTextProcessor(tokenizer)


def mistral3(tokenizer: Any, width: int, layers: int) -> Mistral3ForConditionalGeneration:
    """The encoder; its pictures' part is there, and no prompt reads it."""
    text = MistralConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        head_dim=width // HEADS,
        max_position_embeddings=1024,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    vision = PixtralVisionConfig(
        hidden_size=width,
        intermediate_size=width,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=56,
        patch_size=14,
    )
    picture = tokenizer.convert_tokens_to_ids(PICTURE)
    config = Mistral3Config(text_config=text, vision_config=vision, image_token_index=picture)
    return Mistral3ForConditionalGeneration(config).eval()
