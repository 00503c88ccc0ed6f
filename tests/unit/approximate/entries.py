"""Entries of the approximate prompt cache, for tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from giornata.wire.jobs import BlobRef
from giornata.wire.progress import KeptLatent
from giornata.wire.prompts import PromptEntry


def embedding(*numbers: float) -> bytes:
    """An embedding as it travels."""
    return np.asarray(numbers, "<f2").tobytes()


def entry(
    name: str,
    numbers: Sequence[float] = (1, 0, 0, 0),
    *,
    key: str = "key",
    steps: Sequence[int] = (2, 4),
    size_bytes: int = 10,
    template: str = "template",
    tenant: str = "default",
    until_s: float = 100.0,
) -> PromptEntry:
    """An entry that keeps latents of so many bytes after `steps`."""
    return PromptEntry(
        entry_id=name,
        key=key,
        tenant=tenant,
        template_key=template,
        prompt_embedding=embedding(*numbers),
        kept=tuple(
            KeptLatent(step=step, latents=BlobRef(key=f"{name}/{step}", size_bytes=size_bytes, sha256="ab"))
            for step in steps
        ),
        until_s=until_s,
    )
