"""Both text encoders of a small Flux checkpoint and their tokenizers: a few hundred tokens; no download."""

from __future__ import annotations

import string
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)

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
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=tokenizer.model_max_length,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return CLIPTextModel(config)


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
        split = [_merge(symbols, best) for symbols in split]
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
