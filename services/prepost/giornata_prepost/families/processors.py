"""Processors of prompts, of which the whole ones need torchvision for parts that are not used here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

from PIL import Image
from transformers import AutoTokenizer, BatchFeature, ProcessorMixin, Qwen2VLProcessor, Qwen3VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from giornata.wire.errors import InvalidField


class PixtralTextProcessor(ProcessorMixin):  # type: ignore[misc]  # transformers' is not typed
    """A text-only `PixtralProcessor`, as `Flux2Pipeline` asks its tokenizer for conversations without pictures."""

    def __init__(self, tokenizer: Any, chat_template: str | None = None) -> None:
        super().__init__(tokenizer, chat_template=chat_template)

    def apply_chat_template(self, conversation: Any, **how: Any) -> Any:
        """Token ids and their mask; the tokenizer's options are named as such, or transformers warns in every call."""
        sized = {name: how.pop(name) for name in ("padding", "truncation", "max_length")}
        return super().apply_chat_template(conversation, processor_kwargs=sized, **how)


class QwenTextProcessor(Qwen3VLProcessor):  # type: ignore[misc]  # transformers' is not typed
    """A text-only processor, as `QwenImage21Pipeline` asks its processor for prompts without pictures."""

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


PICTURE: Final = "<|image_pad|>"
"""Where a picture stands in a prompt; each of its tokens is one of these."""


class QwenPictureProcessor(Qwen2VLProcessor):  # type: ignore[misc]  # transformers' is not typed
    """A processor as Qwen-Image-Edit's pipelines ask it: for prompts, each with as many pictures."""

    def __init__(self, image_processor: Any, tokenizer: Any) -> None:
        # not the parent's, which demands the part for videos
        self.image_processor, self.tokenizer = image_processor, tokenizer

    @classmethod
    def of(cls, folder: Path) -> Self:
        """From a processor's folder; OSError if it lacks the tokenizer or the picture part's configuration."""
        return cls(
            Qwen2VLImageProcessorPil.from_pretrained(str(folder), local_files_only=True),
            AutoTokenizer.from_pretrained(str(folder), local_files_only=True),
        )

    def __call__(
        self, text: Sequence[str], images: Image.Image | Sequence[Image.Image], **how: object
    ) -> BatchFeature:
        """`input_ids`, `attention_mask`, `pixel_values` (patches, channels) and `image_grid_thw` (pictures, 3)."""
        seen = self.image_processor(images=images, return_tensors="pt")
        counts = seen["image_grid_thw"].prod(dim=1) // self.image_processor.merge_size**2
        words = self.tokenizer(list(_widened(text, counts.tolist())), **how)
        return BatchFeature({**words, **seen})

    def save_pretrained(self, save_directory: str | Path, **_: object) -> None:
        """Write both parts."""
        self.image_processor.save_pretrained(save_directory)
        self.tokenizer.save_pretrained(save_directory)


def _widened(prompts: Sequence[str], counts: Sequence[int]) -> Iterator[str]:
    """Each prompt with as many tokens for each of its pictures as the picture has; InvalidField where it names more."""
    each = len(counts) // len(prompts)
    for first, prompt in enumerate(prompts):
        before, *rest = prompt.split(PICTURE, each)
        if PICTURE in rest[-1]:  # one more than the template has
            why = "The prompt or the negative prompt holds the token of a picture."
            raise InvalidField(why, field="prompt", received=PICTURE, accepted=f"words without {PICTURE}")
        yield before + "".join(
            PICTURE * count + words for count, words in zip(counts[first * each :], rest, strict=False)
        )
