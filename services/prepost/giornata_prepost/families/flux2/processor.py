"""The text part of Pixtral's processor. Its picture part needs torchvision, and prompts do not."""

from __future__ import annotations

from typing import Any

from transformers import ProcessorMixin


class PixtralTextProcessor(ProcessorMixin):  # type: ignore[misc]  # transformers' is not typed
    """What `Flux2Pipeline` asks of its tokenizer, a `PixtralProcessor`: conversations without pictures."""

    def __init__(self, tokenizer: Any, chat_template: str | None = None) -> None:
        super().__init__(tokenizer, chat_template=chat_template)

    def apply_chat_template(self, conversation: Any, **how: Any) -> Any:
        """Token ids and their mask; the tokenizer's options are named as such, or transformers warns in every call."""
        sized = {name: how.pop(name) for name in ("padding", "truncation", "max_length")}
        return super().apply_chat_template(conversation, processor_kwargs=sized, **how)
