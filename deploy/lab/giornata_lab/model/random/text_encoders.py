"""Small text encoders with random weights and their tokenizers; no download."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from diffusers.pipelines.flux2.system_messages import SYSTEM_MESSAGE
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from giornata_prepost.families.processors import PICTURE, PixtralTextProcessor, QwenPictureProcessor

CLIP_TOKENS: Final = 77
"""Length to which published CLIP encoders pad a prompt; their position embedding fixes it."""
T5_TOKENS: Final = 48
"""Length to which T5 pads a prompt. Real checkpoints take 512; a step's cost grows with it."""

CORPUS: Final = """
a an the of on in with and at to from by for this that one two some her his its their
add remove replace change paint draw make turn put keep fill erase restore swap extend
photo picture portrait painting person woman man model child face hair hat dress shirt shoes helmet suit jacket
background sky sea beach sunset city street wall wooden table room window door grass tree flowers mountain forest
red green blue yellow orange purple pink black white grey brown golden bright dark small large old new
astronaut space earth moon rocket flag dog cat horse bird car bicycle boat house bottle cup book lamp chair
realistic detailed soft sharp blurry cinematic high low quality light shadow style vintage masked region
"""
"""Words of edit instructions, for models that learn none: each one is a single token."""


@dataclass(frozen=True)
class TextEncoders:
    """Both encoders of a Flux checkpoint and their tokenizers."""

    clip: CLIPTextModel
    clip_tokenizer: CLIPTokenizer
    t5: T5EncoderModel
    t5_tokenizer: T5TokenizerFast


def text_encoders(words: str, tokens: int, *, width: int, layers: int) -> TextEncoders:
    """Encoders of random weights with four heads, over a vocabulary in which each of `words` is one token.

    Args:
        words: separated by blanks.
        tokens: length to which T5 pads a prompt.
        width: of CLIP's pooled and of T5's embeddings.
        layers: of each encoder.
    """
    clip, t5 = clip_tokenizer(words), t5_tokenizer(words, tokens)
    t5_config = T5Config(
        vocab_size=len(t5),
        d_model=width,
        d_kv=width // 4,
        d_ff=2 * width,
        num_layers=layers,
        num_heads=4,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
        is_encoder_decoder=False,
        use_cache=False,
    )
    return TextEncoders(clip_encoder(clip, width=width, layers=layers), clip, T5EncoderModel(t5_config), t5)


def clip_encoder(tokenizer: CLIPTokenizer, *, width: int, layers: int) -> CLIPTextModel:
    """CLIP's text encoder of random weights with four heads, for prompts as long as `tokenizer` pads them."""
    return CLIPTextModel(clip_config(tokenizer, width, layers))


def clip_config(tokenizer: CLIPTokenizer, width: int, layers: int) -> CLIPTextConfig:
    """That of :func:`clip_encoder`; a projection of what it pools is as wide."""
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        projection_dim=width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=tokenizer.model_max_length,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def clip_tokenizer(words: str = CORPUS, length: int = CLIP_TOKENS) -> CLIPTokenizer:
    """Byte-level byte-pair encoding as CLIP's, so that every string has tokens; each of `words` is one.

    Prompts are padded to `length`.
    """
    byte_letters = sorted(ByteLevel.alphabet())
    merges = learn_merges(words.split())
    tokens = [*byte_letters, *(f"{letter}</w>" for letter in byte_letters)]
    tokens += [left + right for left, right in merges]
    tokens += ["<|startoftext|>", "<|endoftext|>"]
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=length)


def t5_tokenizer(words: str = CORPUS, tokens: int = T5_TOKENS) -> T5TokenizerFast:
    """A unigram model over `words` and printable ASCII, anything else is ``<unk>``; prompts are padded to `tokens`."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -4.0)]
    pieces += [(character, -6.0) for character in string.printable.strip()]
    pieces += [(f"\u2581{word}", -3.0) for word in sorted(set(words.split()))]
    return T5TokenizerFast(vocab=pieces, extra_ids=0, model_max_length=tokens)


def learn_merges(words: list[str], end: str = "</w>") -> list[tuple[str, str]]:
    """Byte-pair merges, most frequent pair first, until every word is one token (Sennrich et al., 2016).

    `end` marks a word's last letter.

    The `tokenizers` library's own trainer breaks ties by hash order, differently in every process.
    """
    split = [(*word[:-1], f"{word[-1]}{end}") for word in words]
    merges: list[tuple[str, str]] = []
    while counts := Counter(pair for symbols in split for pair in pairwise(symbols)):
        best = max(counts, key=lambda pair: (counts[pair], pair))
        merges.append(best)
        split = [_merge(symbols, best) if best[0] in symbols else symbols for symbols in split]
    return merges


def _merge(symbols: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    """`symbols` with every occurrence of `pair`, from the left, made one."""
    merged: list[str] = []
    rest = list(symbols)
    while rest:
        width = 2 if tuple(rest[:2]) == pair else 1
        merged.append("".join(rest[:width]))
        del rest[:width]
    return tuple(merged)


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
QWEN_CHAT: Final = (
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
    tokenizer.chat_template = QWEN_CHAT
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
        "rope_parameters": _rope(width),
    }
    vision = _vision(width) | {"fullatt_block_indexes": [0]}
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
    text = _config(tokenizer, width, layers).to_dict()
    text |= {"rope_parameters": _rope(width) | {"mrope_interleaved": True}}
    text.pop("model_type")
    vision = _vision(width) | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
    return Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=vision)).eval()


def _rope(width: int) -> dict[str, Any]:
    """Rotary embeddings of three axes."""
    third, half = width // HEADS // 2 // 3, width // HEADS // 2
    return {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "mrope_section": [half - 2 * third, third, third],
    }


def _vision(width: int) -> dict[str, Any]:
    """A pictures' part of one block."""
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "out_hidden_size"), width)
    return {**sizes, "depth": 1, "num_heads": 2}


def _config(tokenizer: Qwen2Tokenizer, width: int, layers: int) -> Qwen3Config:
    return Qwen3Config(**text_shape(tokenizer, width, layers), tie_word_embeddings=True)


def text_shape(tokenizer: Any, width: int, layers: int) -> dict[str, Any]:
    """Return what the configurations of Qwen3's and Mistral's language models have in common."""
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
MISTRAL_CHAT: Final = (
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
    return PixtralTextProcessor(tokenizer, chat_template=MISTRAL_CHAT)


def mistral3(tokenizer: Any, width: int, layers: int) -> Mistral3ForConditionalGeneration:
    """The encoder; its pictures' part is there, and no prompt reads it."""
    text = text_shape(tokenizer, width, layers) | {"model_type": "mistral"}
    sizes = {"hidden_size": width, "intermediate_size": width, "num_hidden_layers": 1, "image_size": 56}
    vision: dict[str, Any] = {**sizes, "model_type": "pixtral", "num_attention_heads": 2, "patch_size": 14}
    picture = tokenizer.convert_tokens_to_ids("[IMG]")
    config = Mistral3Config(text_config=text, vision_config=vision, image_token_index=picture)
    return Mistral3ForConditionalGeneration(config).eval()
