"""The text part of Qwen3-VL's processor. Its picture and video parts need torchvision, and prompts alone do not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from transformers import AutoTokenizer, Qwen3VLProcessor


class TextProcessor(Qwen3VLProcessor):  # type: ignore[misc]  # transformers' is not typed
    """What `QwenImage21Pipeline` asks of its processor for prompts without pictures."""

    def __init__(self, tokenizer: Any) -> None:
        # not the parent's, which demands the parts for pictures
        self.tokenizer = tokenizer

    @classmethod
    def of(cls, folder: Path) -> Self:
        """From a processor's folder; OSError if it has no tokenizer."""
        return cls(AutoTokenizer.from_pretrained(str(folder), local_files_only=True))

    def __call__(self, text: Sequence[str], **how: object) -> Any:
        """Token ids and their mask, as the tokenizer's options say."""
        return self.tokenizer(list(text), **how)

    def apply_chat_template(self, conversation: Sequence[Mapping[str, Any]], **how: object) -> list[Any]:
        """One conversation's tokens, as the only one of a batch."""
        return [self.tokenizer.apply_chat_template(list(conversation), **how)]

    def save_pretrained(self, save_directory: str | Path, **_: object) -> None:
        """Write the tokenizer."""
        self.tokenizer.save_pretrained(save_directory)
