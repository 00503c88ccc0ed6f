"""Blobs that no job will read are deleted; where that fails they expire."""

from __future__ import annotations

import structlog

from giornata.blobs import BlobStore
from giornata.wire.jobs import BlobRef

log = structlog.get_logger(__name__)


async def forget(blobs: BlobStore, *refs: BlobRef) -> None:
    """Delete `refs`. It raises nothing: what fails is logged."""
    try:
        await blobs.delete(*refs)
    except Exception:  # the task's edge: logged; the blobs expire
        log.exception("forget_failed", keys=[ref.key for ref in refs])
