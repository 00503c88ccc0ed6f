"""Consumers: which message of a stream goes to whom, when it comes again, and when they end."""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from tests.fakes.nats_world.messages import ServerMessage, status, with_fields
from tests.fakes.nats_world.streams import MemoryStream, S, StoredMessage, stamp
from tests.fakes.nats_world.subjects import covers

if TYPE_CHECKING:
    from tests.fakes.nats_world.server import MemoryNatsServer

DEFAULTS: Final[dict[str, Any]] = {
    "deliver_policy": "all",
    "ack_policy": "none",
    "replay_policy": "instant",
    "max_deliver": -1,
    "num_replicas": 0,
}
EPHEMERAL_NS: Final = 5 * S
"""How long a consumer without a durable name lives while nobody listens."""


@dataclass(eq=False)
class PullRequest:
    """A client's question for messages, while it waits."""

    reply: str
    left: int


@dataclass(eq=False)
class PendingDelivery:
    """A message that was delivered and not acknowledged."""

    number: int
    """The consumer's own, of the last delivery."""
    times: int
    timer: asyncio.TimerHandle | None = None


class MemoryConsumer:
    """One consumer of a stream, which pulls or is pushed to."""

    def __init__(
        self, server: MemoryNatsServer, stream: MemoryStream, name: str, config: dict[str, Any]
    ) -> None:
        self._server, self.stream, self.name = server, stream, name
        self.durable = bool(config.get("durable_name"))
        given = {key: value for key, value in config.items() if value is not None}
        self.config: dict[str, Any] = DEFAULTS | {"name": name} | given
        if self.config["ack_policy"] != "none":
            self.config = {"ack_wait": 30 * S, "max_ack_pending": 1000} | self.config
        if not self.durable:
            self.config.setdefault("inactive_threshold", EPHEMERAL_NS)
        self.created_ns = time.time_ns()
        self.ended = False
        self.pending: dict[int, PendingDelivery] = {}
        self._again: deque[int] = deque()
        """Sequences that are due once more."""
        self._waiting: deque[PullRequest] = deque()
        self._number, self._last_sequence, self._active_ns = 0, 0, time.time_ns()
        self._next, self._latest = self._begin()
        self._scheduled, self._idle = False, True
        self.resume()

    @property
    def _target(self) -> str:
        return str(self.config.get("deliver_subject") or "")

    @property
    def filters(self) -> list[str]:
        """The subjects that it delivers; none is all."""
        one = self.config.get("filter_subject")
        return [one] if one else list(self.config.get("filter_subjects") or ())

    def _covers(self, subject: str) -> bool:
        return not self.filters or any(covers(one, subject) for one in self.filters)

    def _begin(self) -> tuple[int, set[int] | None]:
        """The first sequence to look at, and of those that are there the ones to deliver; None is all."""
        after = self.stream.last_sequence + 1
        lasts = {
            next(reversed(sequences))
            for subject, sequences in self.stream.by_subject.items()
            if self._covers(subject)
        }
        match self.config["deliver_policy"]:
            case "new":
                return after, None
            case "last":
                return max(lasts, default=after), None
            case "last_per_subject":
                return min(lasts, default=after), lasts
            case "by_start_sequence":
                return int(self.config["opt_start_seq"]), None
            case _:
                return self.stream.first_sequence, None

    def resume(self) -> None:
        """Begin, or go on after the server's restart."""
        if self._target and self.config.get("idle_heartbeat"):
            self._server.later(self.config["idle_heartbeat"] / S, self._beat)
        if self.config.get("inactive_threshold"):
            self._server.later(self.config["inactive_threshold"] / S, self._look)
        for sequence, delivery in self.pending.items():
            self._arm(sequence, delivery)
        self.wake()

    def crash(self) -> None:
        """Forget what only a running server knows."""
        self._waiting.clear()
        self._scheduled = False

    def wake(self) -> None:
        """Deliver what there is, in the loop's next turn."""
        if not (self._scheduled or self.ended):
            self._scheduled = True
            self._server.later(0, self._deliver)

    def _listened(self) -> bool:
        if self._target:
            return self._server.has_interest(self._target)
        self._waiting = deque(one for one in self._waiting if self._server.has_interest(one.reply))
        return bool(self._waiting)

    def _look(self) -> None:
        """End where nobody has listened for long."""
        if self.ended:
            return
        if self._listened():
            self._active_ns = time.time_ns()
        left_ns = self._active_ns + self.config["inactive_threshold"] - time.time_ns()
        if left_ns <= 0:
            self.end()
        else:
            self._server.later(max(left_ns / S, 0.001), self._look)

    def _beat(self) -> None:
        if self.ended:
            return
        if self._idle and self._server.has_interest(self._target):
            last = {"Nats_Last_Consumer": self._number, "Nats_Last_Stream": self._last_sequence}
            self._server.publish(self._target, b"", status("100", "Idle Heartbeat", **last))
        self._idle = True
        self._server.later(self.config["idle_heartbeat"] / S, self._beat)

    def _ready(self) -> StoredMessage | None:
        """The next message that is due, which counts as delivered."""
        self.stream.expire()
        while self._again:
            sequence = self._again.popleft()
            if sequence in self.pending and (message := self.stream.messages.get(sequence)) is not None:
                return message
            self.pending.pop(sequence, None)
        most = self.config.get("max_ack_pending", -1)
        if 0 < most <= len(self.pending):
            return None
        while self._next <= self.stream.last_sequence:
            message, self._next = self.stream.messages.get(self._next), self._next + 1
            if message is not None and self._due(message):
                return message
        return None

    def _due(self, message: StoredMessage) -> bool:
        latest = self._latest
        if latest and message.sequence <= max(latest) and message.sequence not in latest:
            return False
        return self._covers(message.subject)

    def num_pending(self) -> int:
        """How many messages are still to be delivered for the first time."""
        return sum(
            self._due(self.stream.messages[sequence])
            for subject in self.stream.by_subject
            if self._covers(subject)
            for sequence in self.stream.by_subject[subject]
            if sequence >= self._next
        )

    def _deliver(self) -> None:
        self._scheduled = False
        while not self.ended and self._listened() and (message := self._ready()) is not None:
            if self._target:
                self._send(message, self._target)
                continue
            pull = self._waiting[0]
            pull.left -= 1
            if not pull.left:
                self._waiting.popleft()
            self._send(message, pull.reply)

    def _send(self, message: StoredMessage, target: str) -> None:
        self._number, self._last_sequence = self._number + 1, message.sequence
        self._idle, self._active_ns = False, time.time_ns()
        earlier = self.pending.get(message.sequence)
        delivery = PendingDelivery(self._number, earlier.times + 1 if earlier else 1)
        if self.config["ack_policy"] != "none":
            self.pending[message.sequence] = delivery
            self._arm(message.sequence, delivery)
        reply = (
            f"$JS.ACK.{self.stream.name}.{self.name}.{delivery.times}.{message.sequence}.{self._number}."
            f"{message.time_ns}.{self.num_pending()}"
        )
        header, data = message.header, message.data
        if self.config.get("headers_only"):
            header, data = with_fields(header, {"Nats-Msg-Size": len(data)}), b""
        self._server.deliver(ServerMessage(message.subject, reply, header, data), target)

    def _arm(self, sequence: int, delivery: PendingDelivery, seconds: float | None = None) -> None:
        if delivery.timer is not None:
            delivery.timer.cancel()
        wait_s = self.config["ack_wait"] / S if seconds is None else seconds
        delivery.timer = self._server.later(wait_s, lambda: self._redeliver(sequence, delivery))

    def _redeliver(self, sequence: int, delivery: PendingDelivery) -> None:
        if self.ended or self.pending.get(sequence) is not delivery:
            return
        if 0 < self.config["max_deliver"] <= delivery.times:
            del self.pending[sequence]
            return
        self._again.append(sequence)
        self.wake()

    def pull(self, reply: str, asked: dict[str, Any]) -> None:
        """Take a client's question for messages."""
        self._active_ns = time.time_ns()
        request = PullRequest(reply, asked.get("batch") or 1)
        self._waiting.append(request)
        self._scheduled = True
        self._deliver()
        if request.left and asked.get("no_wait"):
            self._refuse(request, "404", "No Messages")
        elif request.left and asked.get("expires"):
            self._server.later(asked["expires"] / S, lambda: self._refuse(request, "408", "Request Timeout"))

    def _refuse(self, request: PullRequest, code: str, text: str) -> None:
        if request in self._waiting:
            self._waiting.remove(request)
            self._active_ns = time.time_ns()
            left = {"Nats_Pending_Messages": request.left, "Nats_Pending_Bytes": 0}
            self._server.publish(request.reply, b"", status(code, text, **(left if code == "408" else {})))

    def acknowledge(self, sequence: int, said: bytes) -> None:
        """Take a client's word on a message that it was given."""
        self._active_ns = time.time_ns()
        if (delivery := self.pending.get(sequence)) is None:
            return
        verb, _, rest = said.partition(b" ")
        if verb == b"-NAK":
            delay_ns = json.loads(rest)["delay"] if rest.startswith(b"{") else 0
            self._arm(sequence, delivery, delay_ns / S)
        elif verb == b"+WPI":
            self._arm(sequence, delivery)
        else:
            if delivery.timer is not None:
                delivery.timer.cancel()
            del self.pending[sequence]
            if self.stream.config["retention"] == "workqueue":
                self.stream.remove(sequence)
            self.wake()

    def end(self) -> None:
        """Be no more; who waits is told."""
        self.ended = True
        for delivery in self.pending.values():
            if delivery.timer is not None:
                delivery.timer.cancel()
        for request in list(self._waiting):
            self._refuse(request, "409", "Consumer Deleted")

    def info(self) -> dict[str, Any]:
        """What a question for the consumer is told."""
        self.stream.expire()
        found = {
            "stream_name": self.stream.name,
            "name": self.name,
            "created": stamp(self.created_ns),
            "config": self.config,
            "delivered": {"consumer_seq": self._number, "stream_seq": self._last_sequence},
            "ack_floor": {"consumer_seq": 0, "stream_seq": 0},
            "num_ack_pending": len(self.pending),
            "num_redelivered": sum(one.times > 1 for one in self.pending.values()),
            "num_waiting": len(self._waiting),
            "num_pending": self.num_pending(),
        }
        return found | ({"push_bound": self._listened()} if self._target else {})
