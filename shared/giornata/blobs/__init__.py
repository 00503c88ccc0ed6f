"""Blob stores: images, latents and embeddings travel as claim checks to one of these.

One contract (:class:`BlobStore`), two implementations, one suite of tests held against both.
"""

from giornata.blobs.memory import MemoryBlobs
from giornata.blobs.protocol import BlobStore, refer
from giornata.blobs.redis import RedisBlobs

__all__ = ["BlobStore", "MemoryBlobs", "RedisBlobs", "refer"]
