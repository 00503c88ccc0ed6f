"""Blob stores: images, latents and embeddings travel as claim checks to one of these."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from giornata.blob_addresses import HANDOVER_MB
from giornata.blobs.folder import Folder
from giornata.blobs.host import HostBlobs
from giornata.blobs.memory import MemoryBlobs
from giornata.blobs.store import BlobStore, intermediate, refer
from giornata.blobs.traced import TracedBlobs
from giornata.seeing import spans

if TYPE_CHECKING:
    from giornata.blobs.redis import RedisBlobs
    from giornata.blobs.s3 import S3Blobs

__all__ = [
    "BlobStore",
    "HostBlobs",
    "MemoryBlobs",
    "RedisBlobs",
    "S3Blobs",
    "intermediate",
    "open_blobs",
    "refer",
]

_CLIENTS: Final = {"RedisBlobs": "giornata.blobs.redis", "S3Blobs": "giornata.blobs.s3"}
"""Where the stores are whose clients are only imported when one is opened, or asked for by name."""


def __getattr__(name: str) -> Any:
    if name not in _CLIENTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_CLIENTS[name]), name)


@asynccontextmanager
async def open_blobs(
    url: str, handover: Path | None = None, handover_mb: int = HANDOVER_MB
) -> AsyncIterator[BlobStore]:
    """The store that ``GIORNATA_BLOBS_URL`` names, open while inside; ServiceUnavailable if it does not answer.

    ``s3://`` is an S3-compatible object store; ``redis://``, ``rediss://`` and ``unix://`` are Redis-protocol servers.
    With a folder `handover`, services of one host hand their results over there, in `handover_mb` MiB at most;
    ServiceUnavailable if it is unfit.
    """
    async with AsyncExitStack() as stack:
        kind: type[S3Blobs | RedisBlobs] = __getattr__("S3Blobs" if url.startswith("s3://") else "RedisBlobs")
        store: BlobStore = await stack.enter_async_context(kind.open(url))
        if handover is not None:
            folder = stack.enter_context(Folder.open(handover, handover_mb << 20))
            store = await stack.enter_async_context(HostBlobs.open(store, folder))
        yield TracedBlobs(store) if spans.on() else store
