"""Small Qwen text encoders with random weights, and their tokenizer: byte-level byte-pair encoding; no download."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from giornata_prepost.families.processors import PICTURE, QwenPictureProcessor
from giornata_tools.model.text import CORPUS, learn_merges

SPACE: Final = "\u0120"
"""How byte-level encodings write a blank."""
SPECIAL: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
VISION: Final = ("<|vision_start|>", PICTURE, "<|vision_end|>")
"""A picture in a prompt."""
TEMPLATE: Final = (
    "describe image by detailing color shape size texture quantity text spatial relationships objects"
)
"""Words of Qwen-Image's instruction, which has 34 tokens in the published vocabulary, as it has here."""
VISION_IDS: Final = ("vision_start_token_id", "image_token_id", "vision_end_token_id")
ROLES: Final = ("system", "user", "assistant", "Describe")
CHAT: Final = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
)
"""What Qwen3's chat template makes of one message."""
CHAT_IN_PARTS: Final = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% for part in message.content %}{{ part.text }}{% endfor %}<|im_end|>\n{% endfor %}"
)
"""What Qwen3-VL's makes of messages in parts."""
HEADS: Final = 4


def qwen_tokenizer(tokens: int, more: Sequence[str] = ()) -> Qwen2Tokenizer:
    """Each word of edit instructions is one token; prompts are padded to so many `tokens`. `more` are special ones."""
    vocabulary, merges = byte_pairs(f"{CORPUS} {TEMPLATE}".split(), ROLES, (*SPECIAL, *more))
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary,
        merges=merges,
        model_max_length=tokens,
        additional_special_tokens=[*SPECIAL[1:], *more],
    )
    tokenizer.chat_template = CHAT
    return tokenizer


def byte_pairs(
    words: Sequence[str], first: Sequence[str], special: Sequence[str]
) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges in which each of `words` behind a blank, of `first` and of `special` is one token."""
    merges = learn_merges([*(f"{SPACE}{word}" for word in dict.fromkeys(words)), *first], end="")
    pieces = [*sorted(ByteLevel.alphabet()), *(left + right for left, right in merges), *special]
    return {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}, merges


def qwen3(tokenizer: Qwen2Tokenizer, width: int, layers: int) -> Qwen3Model:
    """Z-Image's encoder."""
    return Qwen3Model(_config(tokenizer, width, layers)).eval()


def qwen3_causal(tokenizer: Qwen2Tokenizer, width: int, layers: int) -> Qwen3ForCausalLM:
    """Klein's encoder, of which the outputs of layers 9, 18 and 27 are read."""
    return Qwen3ForCausalLM(_config(tokenizer, width, layers)).eval()


def qwen_vl(tokenizer: Qwen2Tokenizer, width: int, layers: int) -> Qwen2_5_VLForConditionalGeneration:
    """Qwen-Image's encoder, and Qwen-Image-Edit's, whose tokenizer knows :data:`VISION`."""
    half = width // HEADS // 2
    text = {
        "vocab_size": len(tokenizer),
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": [half - 2 * (half // 3), half // 3, half // 3],
        },
    }
    vision = {
        "depth": 1,
        "hidden_size": width,
        "intermediate_size": width,
        "num_heads": 2,
        "out_hidden_size": width,
        "fullatt_block_indexes": [0],
    }
    places = dict(zip(VISION_IDS, map(tokenizer.convert_tokens_to_ids, VISION), strict=True))
    known = places if PICTURE in tokenizer.get_vocab() else {}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, **known)
    return Qwen2_5_VLForConditionalGeneration(config).eval()


def picture_processor(tokenizer: Qwen2Tokenizer) -> QwenPictureProcessor:
    """The processor of prompts with a picture, with the published limits on a picture's pixels."""
    limits = {"shortest_edge": 56 * 56, "longest_edge": 12_845_056}
    return QwenPictureProcessor(Qwen2VLImageProcessorPil(size=limits), tokenizer)


def qwen3_vl(tokenizer: Qwen2Tokenizer, width: int, layers: int) -> Qwen3VLForConditionalGeneration:
    """Qwen-Image 2.1's encoder; its pictures' part is there, and no prompt reads it."""
    half = width // HEADS // 2
    text = _config(tokenizer, width, layers).to_dict() | {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": [half - 2 * (half // 3), half // 3, half // 3],
            "mrope_interleaved": True,
        }
    }
    text.pop("model_type")
    vision = {
        "depth": 1,
        "hidden_size": width,
        "intermediate_size": width,
        "num_heads": 2,
        "out_hidden_size": width,
        "deepstack_visual_indexes": [0],
        "num_position_embeddings": 16,
    }
    return Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=vision)).eval()


def _config(tokenizer: Qwen2Tokenizer, width: int, layers: int) -> Qwen3Config:
    return Qwen3Config(**text_shape(tokenizer, width, layers), tie_word_embeddings=True)


def text_shape(tokenizer: Any, width: int, layers: int) -> dict[str, Any]:
    """What the configurations of Qwen3's and Mistral's language models have in common."""
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 2,
        "head_dim": width // HEADS,
        "max_position_embeddings": 1024,
    }
