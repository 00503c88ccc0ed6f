"""A row whose latents are kept for similar prompts, as routers tell the next one of it."""

from __future__ import annotations

from giornata.wire.progress import KeptLatent
from giornata.wire.values import Recorded


class PromptEntry(Recorded):
    """One entry of the approximate prompt cache: a row that was made from its own noise, and ended well."""

    entry_id: str
    """Job id and index of the row: a token of a subject."""
    key: str
    """See :func:`giornata.approximate.key.key_of`."""
    tenant: str
    template_key: str
    """Template key of the picture that was edited; empty for a generation."""
    prompt_embedding: bytes
    """See :attr:`giornata.wire.jobs.Encoding.prompt_embedding`."""
    kept: tuple[KeptLatent, ...]
    until_s: float
    """When it ends, in seconds since 1970."""
