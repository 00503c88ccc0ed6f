"""What a host tier holds: bytes, wanted files that others do not push out, and its numbered changes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from giornata.residency.ledger import EvictionLedger
from giornata.wire.errors import LoraTooLarge
from giornata.wire.host_tiers import TOLD_CHANGES, TierChange


class HostTierContents:
    """The books of a tier.

    Files that the plan wants stay while files come ahead or by plan. A file on demand takes their place, least wanted
    first, where nothing else can go. Files that the catalogue pins never go.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.number = 0
        self.evicted = 0
        self._ledger = EvictionLedger(budget_bytes)
        self._whole: dict[str, int] = {}
        self._changes = deque[TierChange](maxlen=TOLD_CHANGES)
        self._pins: tuple[str, ...] = ()
        self._wanted: tuple[str, ...] = ()
        """The pinned first, the most wanted first."""
        self._guarded: set[str] = set()
        """Wanted files that have a pin in the ledger."""

    @property
    def used_bytes(self) -> int:
        """Bytes of what is here or comes."""
        return self._ledger.size_bytes

    @property
    def wanted(self) -> tuple[str, ...]:
        """What the catalogue pins, then what the plan wants."""
        return self._wanted

    def __contains__(self, digest: object) -> bool:
        return digest in self._whole

    def held(self) -> Iterator[tuple[str, int]]:
        """Digest and bytes of whole files, the last used first."""
        return (
            (digest, self._whole[digest]) for digest in reversed(tuple(self._ledger)) if digest in self._whole
        )

    def changes(self) -> tuple[TierChange, ...]:
        """Changes since the last call, as many as are kept."""
        told = tuple(self._changes)
        self._changes.clear()
        return told

    def missing(self) -> list[str]:
        """Wanted files that are not here, the most wanted first."""
        return [digest for digest in self._wanted if digest not in self._whole]

    def want(self, pins: Sequence[str], wanted: Sequence[str]) -> list[str]:
        """From now on these are pinned, and these wanted; returns files that have to go."""
        self._pins = tuple(pins)
        self._wanted = tuple(dict.fromkeys((*pins, *wanted)))
        return self.guard()

    def guard(self) -> list[str]:
        """Guard all that is wanted, also what has made room for demand; returns files that have to go."""
        gone = list[str]()
        for digest in self._guarded.difference(self._wanted):
            gone += self._gone(self._ledger.unpin(digest))
        for digest in self._wanted:
            if digest not in self._guarded:
                self._ledger.pin(digest)
        self._guarded = set(self._wanted)
        return gone

    def use(self, digest: str) -> bool:
        """A job needs a file; whether it is here."""
        self._ledger.use(digest)
        return digest in self._whole

    def fits(self, size_bytes: int) -> bool:
        """Whether a file can come without a wanted one going."""
        return size_bytes <= self._ledger.room_bytes

    def enter(self, digest: str, size_bytes: int) -> list[str]:
        """Make room for a file that comes, and keep it from now on until :meth:`leave`; returns files that have to go.

        Raises:
            LoraTooLarge: pinned files, and files that come, leave no room for it.
        """
        gone = list[str]()
        for digest_of_less in reversed(self._wanted[len(self._pins) :]):
            if self.fits(size_bytes):
                break
            if digest_of_less in self._guarded and digest_of_less != digest:
                self._guarded.discard(digest_of_less)
                gone += self._gone(self._ledger.unpin(digest_of_less))
        if not self.fits(size_bytes):
            room_bytes = max(0, self._ledger.room_bytes)
            raise LoraTooLarge(
                received=f"{size_bytes} bytes", accepted=f"{room_bytes} that are free on this host"
            )
        self._ledger.pin(digest)
        return gone + self._gone(self._ledger.add(digest, size_bytes))

    def leave(self, digest: str, size_bytes: int | None) -> list[str]:
        """A file that came is whole, of so many bytes, or failed: None; returns files that have to go."""
        if size_bytes is None:
            self._ledger.remove(digest)
        else:
            self._whole[digest] = size_bytes
            self._change(digest, size_bytes)
        return self._gone(self._ledger.unpin(digest))

    def drop(self, digest: str) -> bool:
        """Forget a damaged file; whether it was here."""
        self._ledger.remove(digest)
        return bool(self._left((digest,)))

    def take_over(self, found: Iterable[tuple[str, int]]) -> list[str]:
        """Enter files of an earlier process, the oldest use first; returns files that have to go."""
        gone = list[str]()
        for digest, size_bytes in found:
            if size_bytes > self.budget_bytes:
                gone.append(digest)
                continue
            left = self._ledger.add(digest, size_bytes)
            self._whole[digest] = size_bytes
            self._change(digest, size_bytes)
            gone += self._gone(left)
        return gone

    def _gone(self, digests: Iterable[str]) -> list[str]:
        left = self._left(digests)
        self.evicted += len(left)
        return left

    def _left(self, digests: Iterable[str]) -> list[str]:
        left = [digest for digest in digests if self._whole.pop(digest, None) is not None]
        for digest in left:
            self._change(digest, None)
        return left

    def _change(self, digest: str, size_bytes: int | None) -> None:
        self.number += 1
        self._changes.append(TierChange(number=self.number, sha256=digest, size_bytes=size_bytes))
