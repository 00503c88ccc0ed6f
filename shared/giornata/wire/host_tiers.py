"""The host tier of a LoRA store: what it holds, as snapshots and numbered changes, and what it is asked.

A host tier is a folder of canonical files on the fast disk, or in the memory, of one machine. Its store fills it, and
the denoisers of the machine read it. Every file that comes or goes is a change with a number of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from giornata.wire.loras import StoredFile
from giornata.wire.values import WireModel

DIGEST_BYTES: Final = 32
"""Bytes of a sha-256."""
TOLD_CHANGES: Final = 256
"""Most changes of one telemetry; a listener that lacks others asks for a snapshot."""
MOST_FILES: Final = 20_000
"""Files of a snapshot, the last used first."""
MOST_WANTED: Final = 6_000
"""Files of a wanted set, the most wanted first."""


class TierChange(WireModel):
    """A file that came or went."""

    number: int
    """One more than that of the change before, from 1 on."""
    sha256: str
    size_bytes: int | None = None
    """None: it went."""


class TierLoads(WireModel):
    """Loads into a tier since its start, by their reason."""

    demand: int = 0
    """A job waited."""
    ahead: int = 0
    """A job was about to come."""
    plan: int = 0
    """The plan, or the catalogue's pins, wanted it."""
    waited_ms: float = 0.0
    """Time that loads on demand and ahead took together."""


class HostTier(WireModel):
    """Telemetry of a host tier."""

    name: str
    """Name of the tier, stable over restarts; denoisers that read it tell the same."""
    epoch: int
    """Epoch of this process's tier: microseconds of Unix time at its start. Each epoch has its own numbers."""
    number: int
    """Number of the latest change; 0 before the first."""
    changes: tuple[TierChange, ...] = ()
    """Since the last telemetry, at most :data:`TOLD_CHANGES`, the latest last."""
    budget_bytes: int
    used_bytes: int
    bytes_per_s: float = 0.0
    """Bandwidth of its loads, as measured; 0 before the first."""
    hits: int = 0
    """Files that were asked for and here."""
    loads: TierLoads = TierLoads()
    evicted: int = 0
    failed: int = 0
    """Loads that failed."""
    plans: int = 0
    """Wanted sets that were taken up."""
    plans_ignored: int = 0
    """Wanted sets that were older than one before, or unreadable."""
    wanted: int = 0
    """Files that the plan and the catalogue's pins want here."""
    missing: int = 0
    """Wanted files that are not here yet."""


class TierSnapshotRequest(WireModel):
    """router → LoRA store: what does your host tier hold? Answered by a :class:`TierSnapshot`."""

    remaining_ms: int


class TierSnapshot(WireModel):
    """What a host tier holds after its change `number`."""

    name: str
    epoch: int
    number: int
    sha256s: bytes
    """Digests of its files, :data:`DIGEST_BYTES` each; at most :data:`MOST_FILES`, the last used first."""
    sizes: tuple[int, ...]
    """Bytes of each."""

    @classmethod
    def of(cls, name: str, epoch: int, number: int, held: Iterable[tuple[str, int]]) -> TierSnapshot:
        """A snapshot of digests and sizes."""
        listed = tuple(held)
        return cls(
            name=name,
            epoch=epoch,
            number=number,
            sha256s=packed(sha256 for sha256, _ in listed),
            sizes=tuple(size_bytes for _, size_bytes in listed),
        )

    @property
    def held(self) -> dict[str, int]:
        """Bytes by digest."""
        return dict(zip(unpacked(self.sha256s), self.sizes, strict=False))


class TierLoadRequest(WireModel):
    """denoiser → LoRA store: have a file in your host tier. Answered, once it is there, by :class:`TierLoadReply`."""

    file: StoredFile
    ahead: bool = False
    """No job waits for it yet."""
    damaged: bool = False
    """What is there was read, and is not this file."""
    remaining_ms: int


class TierLoadReply(WireModel):
    """LoRA store → denoiser: the file is in the tier's folder, under its digest."""

    loaded: bool
    """Whether it had to be copied from the store's folder."""


class WantedFiles(WireModel):
    """active router → stores, in the bucket of wanted sets: what a host tier should hold."""

    epoch: tuple[int, int]
    """Epoch of the router's lease."""
    number: int
    """Number of this router's plan; a later one replaces an earlier one."""
    sha256s: bytes
    """Digests of the files, :data:`DIGEST_BYTES` each, the most wanted first; at most :data:`MOST_WANTED`."""

    @property
    def revision(self) -> tuple[tuple[int, int], int]:
        """Grows with every plan."""
        return self.epoch, self.number

    @property
    def digests(self) -> tuple[str, ...]:
        """The files, the most wanted first."""
        return tuple(unpacked(self.sha256s))


def packed(sha256s: Iterable[str]) -> bytes:
    """Digests in hexadecimal as bytes, one after the other; ValueError for another text."""
    return b"".join(map(bytes.fromhex, sha256s))


def unpacked(sha256s: bytes) -> Iterator[str]:
    """The digests of :func:`packed`, in hexadecimal; a part of one at the end is left out."""
    for first in range(0, len(sha256s) - DIGEST_BYTES + 1, DIGEST_BYTES):
        yield sha256s[first : first + DIGEST_BYTES].hex()
