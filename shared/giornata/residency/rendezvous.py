"""Homes of templates and adapters: places in an order that every process finds by itself. Pure.

Rendezvous hashing (Thaler and Ravishankar, "Using name-based mappings to increase hit rates", 1998): a place that comes
or goes moves the homes of its own adapters alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b


def number(*parts: str) -> int:
    """A number of 64 bits that looks drawn, and is the same in every process."""
    digest = blake2b("\0".join(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def home(places: Iterable[str], name: str) -> str | None:
    """The place with the highest number for `name`; None where there is no place."""
    return max(places, key=lambda place: number(name, place), default=None)


def ranked(name: str, places: Iterable[str]) -> list[str]:
    """The places of `name`, its home first."""
    return sorted(places, key=lambda place: (-number(name, place), place))
