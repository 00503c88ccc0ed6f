"""Streams: what they take, keep, refuse and forget."""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from tests.fakes.nats_world.messages import ServerMessage, fields_of
from tests.fakes.nats_world.subjects import covers

S: Final = 1_000_000_000
DEFAULTS: Final[dict[str, Any]] = {
    "retention": "limits",
    "storage": "file",
    "discard": "old",
    "max_consumers": -1,
    "max_msgs": -1,
    "max_bytes": -1,
    "max_age": 0,
    "max_msgs_per_subject": -1,
    "max_msg_size": -1,
    "num_replicas": 1,
    "compression": "none",
    "consumer_limits": {},
} | dict.fromkeys(
    ("allow_direct", "mirror_direct", "sealed", "deny_delete", "deny_purge", "allow_rollup_hdrs"), False
)
MAX_WINDOW_NS: Final = 120 * S


class JetStreamRefusal(Exception):
    """An answer that says no."""

    def __init__(self, code: int, err_code: int, description: str) -> None:
        super().__init__(description)
        self.body = {"code": code, "err_code": err_code, "description": description}


def stamp(ns: int) -> str:
    """A time as answers tell it."""
    return f"{datetime.fromtimestamp(ns // S, UTC):%Y-%m-%dT%H:%M:%S}.{ns % S:09d}Z"


def completed(config: dict[str, Any]) -> dict[str, Any]:
    """A stream's configuration with what the server adds."""
    given = {name: value for name, value in config.items() if value is not None}
    full = DEFAULTS | given
    for name in ("max_msgs", "max_bytes", "max_msgs_per_subject", "max_msg_size", "max_consumers"):
        full[name] = full[name] or -1
    if not full.get("duplicate_window"):
        full["duplicate_window"] = min(full["max_age"] or MAX_WINDOW_NS, MAX_WINDOW_NS)
    return full | {"subjects": full.get("subjects") or [full["name"]]}


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A message that a stream holds."""

    sequence: int
    subject: str
    header: bytes
    data: bytes
    time_ns: int
    size: int


class MemoryStream:
    """The messages of one stream, and its consumers by name."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.created_ns = time.time_ns()
        self.messages: dict[int, StoredMessage] = {}
        self.by_subject: dict[str, dict[int, None]] = {}
        self.last_sequence, self.last_ns, self.bytes = 0, 0, 0
        self._known: dict[str, tuple[int, int]] = {}
        """Sequence and time by a message's id."""
        self._ends: list[tuple[int, int]] = []
        """When messages end that have a life of their own, earliest first."""

    @property
    def name(self) -> str:
        return str(self.config["name"])

    @property
    def first_sequence(self) -> int:
        return next(iter(self.messages), self.last_sequence + 1 if self.last_sequence else 0)

    def expire(self) -> None:
        """Forget what has come of age; every question asks this first."""
        now, age = time.time_ns(), self.config["max_age"]
        while age and self.messages and next(iter(self.messages.values())).time_ns + age <= now:
            self.remove(next(iter(self.messages)))
        while self._ends and self._ends[0][0] <= now:
            self.remove(heapq.heappop(self._ends)[1])

    def matching(self, pattern: str | None) -> Iterator[str]:
        """The subjects that have messages."""
        return (subject for subject in self.by_subject if pattern is None or covers(pattern, subject))

    def last(self, subject: str) -> StoredMessage | None:
        """The last message of a subject, or of those that a pattern covers."""
        found = [next(reversed(self.by_subject[one])) for one in self.matching(subject)]
        return self.messages[max(found)] if found else None

    def remove(self, sequence: int) -> None:
        """Forget a message, if it is there."""
        if (message := self.messages.pop(sequence, None)) is not None:
            self.bytes -= message.size
            del self.by_subject[message.subject][sequence]
            if not self.by_subject[message.subject]:
                del self.by_subject[message.subject]

    def size_of(self, subject: str, header: bytes, data: bytes) -> int:
        """The bytes that a message takes in its store."""
        payload = len(subject) + len(header) + len(data)
        if self.config["storage"] == "memory":
            return payload + 16
        return payload + 30 + (4 if header else 0)

    def check(self, message: ServerMessage, fields: dict[str, str]) -> int | None:
        """The sequence of the message that this one repeats, or None; JetStreamRefusal where it is not taken."""
        if fields.get("Nats-Expected-Stream", self.name) != self.name:
            raise JetStreamRefusal(400, 10060, "expected stream does not match")
        self._check_life(fields.get("Nats-TTL"))
        known = self._known.get(fields.get("Nats-Msg-Id", ""))
        if known is not None and known[1] + self.config["duplicate_window"] > time.time_ns():
            return known[0]
        if (expected := fields.get("Nats-Expected-Last-Sequence")) is not None:
            _check_last(int(expected), self.last_sequence)
        last = self.last(message.subject)
        if (expected := fields.get("Nats-Expected-Last-Subject-Sequence")) is not None:
            _check_last(int(expected), last.sequence if last else 0)
        if "Nats-Rollup" in fields and not self.config["allow_rollup_hdrs"]:
            raise JetStreamRefusal(400, 10111, "rollup not permitted")
        if self.config["discard"] == "new":
            self._check_room(message)
        return None

    def _check_life(self, life: str | None) -> None:
        if life is None:
            return
        if not self.config.get("allow_msg_ttl"):
            raise JetStreamRefusal(400, 10166, "per-message TTL is disabled")
        if not life.rstrip("s").isdigit():
            raise JetStreamRefusal(400, 10165, "invalid per-message TTL")

    def _check_room(self, message: ServerMessage) -> None:
        config, size = self.config, self.size_of(message.subject, message.header, message.data)
        held, per_subject = self.by_subject.get(message.subject, {}), config["max_msgs_per_subject"]
        replaced = self.messages[next(iter(held))] if 0 < per_subject <= len(held) else None
        if 0 < config["max_msgs"] <= len(self.messages) and replaced is None:
            raise JetStreamRefusal(503, 10077, "maximum messages exceeded")
        if 0 < config["max_bytes"] < self.bytes + size and (replaced is None or replaced.size < size):
            raise JetStreamRefusal(503, 10077, "maximum bytes exceeded")

    def store(self, message: ServerMessage) -> dict[str, Any]:
        """Take a message, and return the acknowledgement; JetStreamRefusal where it is not taken."""
        self.expire()
        fields = fields_of(message.header)
        if (repeated := self.check(message, fields)) is not None:
            return {"stream": self.name, "seq": repeated, "duplicate": True}
        if "Nats-Rollup" in fields:
            for sequence in list(self.by_subject.get(message.subject, ())):
                self.remove(sequence)
        self.last_sequence, self.last_ns = self.last_sequence + 1, time.time_ns()
        size = self.size_of(message.subject, message.header, message.data)
        stored = StoredMessage(
            self.last_sequence, message.subject, message.header, message.data, self.last_ns, size
        )
        self.messages[stored.sequence] = stored
        self.by_subject.setdefault(stored.subject, {})[stored.sequence] = None
        self.bytes += size
        if (identity := fields.get("Nats-Msg-Id")) is not None:
            self._known[identity] = stored.sequence, stored.time_ns
        if (life := fields.get("Nats-TTL")) is not None:
            heapq.heappush(self._ends, (stored.time_ns + int(life.rstrip("s")) * S, stored.sequence))
        self.trim(stored.subject)
        return {"stream": self.name, "seq": stored.sequence}

    def trim(self, *subjects: str) -> None:
        """Forget the oldest messages above the limits, the one on messages of a subject at `subjects`."""
        config = self.config
        for subject in subjects:
            while 0 < config["max_msgs_per_subject"] < len(self.by_subject.get(subject, ())):
                self.remove(next(iter(self.by_subject[subject])))
        while config["discard"] == "old" and (
            0 < config["max_msgs"] < len(self.messages) or 0 < config["max_bytes"] < self.bytes
        ):
            self.remove(self.first_sequence)

    def purge(self, subject: str | None, keep: int, before: int | None) -> int:
        """Forget messages; how many they were."""
        found = [
            sequence
            for one in self.matching(subject)
            for sequence in self.by_subject[one]
            if before is None or sequence < before
        ]
        gone = sorted(found)[: len(found) - keep]
        for sequence in gone:
            self.remove(sequence)
        return len(gone)

    def state(self, consumers: int, subjects: str | None = None) -> dict[str, Any]:
        """What a question for the stream is told of its messages."""
        first = next(iter(self.messages.values()), None)
        found = {
            "messages": len(self.messages),
            "bytes": self.bytes,
            "first_seq": self.first_sequence,
            "first_ts": stamp(first.time_ns) if first else "0001-01-01T00:00:00Z",
            "last_seq": self.last_sequence,
            "last_ts": stamp(self.last_ns) if self.last_ns else "0001-01-01T00:00:00Z",
            "num_subjects": len(self.by_subject),
            "consumer_count": consumers,
        }
        if subjects is not None:
            found["subjects"] = {one: len(self.by_subject[one]) for one in self.matching(subjects)}
        return found


def _check_last(expected: int, found: int) -> None:
    if expected != found:
        raise JetStreamRefusal(400, 10071, f"wrong last sequence: {found}")
