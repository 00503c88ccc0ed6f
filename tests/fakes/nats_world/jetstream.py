"""JetStream's questions and answers, and which messages its streams take."""

from __future__ import annotations

import base64
import json
import secrets
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from tests.fakes.nats_world.consumers import MemoryConsumer
from tests.fakes.nats_world.messages import ServerMessage, status, with_fields
from tests.fakes.nats_world.streams import JetStreamRefusal, MemoryStream, StoredMessage, completed, stamp
from tests.fakes.nats_world.subjects import covers, overlap

if TYPE_CHECKING:
    from tests.fakes.nats_world.server import MemoryNatsServer

API: Final = "$JS.API."
Answer = dict[str, Any]


def _no_stream() -> JetStreamRefusal:
    return JetStreamRefusal(404, 10059, "stream not found")


def _filters(config: Answer) -> bool:
    return bool(config.get("filter_subject") or config.get("filter_subjects"))


def _no_consumer() -> JetStreamRefusal:
    return JetStreamRefusal(404, 10014, "consumer not found")


class MemoryJetStream:
    """The streams and consumers of a server. `max_file` and `max_memory` are the bytes that they may reserve."""

    def __init__(self, server: MemoryNatsServer, max_file: int, max_memory: int) -> None:
        self._server = server
        self._room = {"file": max_file, "memory": max_memory}
        self.streams: dict[str, MemoryStream] = {}
        self.consumers: dict[tuple[str, str], MemoryConsumer] = {}

    def begin(self) -> None:
        """Go on with what was on disk."""
        for consumer in self.consumers.values():
            consumer.resume()

    def crash(self) -> None:
        """Forget what was kept in memory."""
        self.streams = {name: one for name, one in self.streams.items() if one.config["storage"] == "file"}
        self.consumers = {
            key: one
            for key, one in self.consumers.items()
            if key[0] in self.streams and one.durable and not one.config.get("mem_storage")
        }
        for consumer in self.consumers.values():
            consumer.crash()

    def interest_changed(self) -> None:
        """Take in that somebody listens, or listens no more."""
        for consumer in self.consumers.values():
            if consumer.config.get("deliver_subject"):
                consumer.wake()

    def take(self, message: ServerMessage) -> bool:
        """Whether a message was for JetStream; it is answered."""
        subject = message.subject
        if subject.startswith("$JS."):
            if subject.startswith("$JS.ACK."):
                return self._acknowledged(message)
            if subject.startswith(f"{API}CONSUMER.MSG.NEXT."):
                return self._pulled(message)
            if subject.startswith(f"{API}DIRECT.GET."):
                return self._read_directly(message)
            return self._answered(message)
        for stream in self.streams.values():
            if any(covers(pattern, subject) for pattern in stream.config["subjects"]):
                self._store(stream, message)
                return True
        return False

    def _store(self, stream: MemoryStream, message: ServerMessage) -> None:
        try:
            told = stream.store(message)
        except JetStreamRefusal as refusal:
            told = {"error": refusal.body, "stream": stream.name, "seq": 0}
        else:
            for consumer in self._consumers_of(stream.name):
                consumer.wake()
        if message.reply:
            self._server.publish(message.reply, json.dumps(told).encode())

    def _consumers_of(self, stream: str) -> list[MemoryConsumer]:
        ended = [key for key, one in self.consumers.items() if one.ended]
        for key in ended:
            del self.consumers[key]
        return [one for (name, _), one in self.consumers.items() if name == stream]

    def _consumer(self, stream: str, name: str) -> MemoryConsumer | None:
        found = self.consumers.get((stream, name))
        return None if found is None or found.ended else found

    def _acknowledged(self, message: ServerMessage) -> bool:
        _, _, stream, name, _, sequence, *_ = message.subject.split(".")
        if (consumer := self._consumer(stream, name)) is None:
            return False
        consumer.acknowledge(int(sequence), message.data)
        if message.reply:
            self._server.publish(message.reply, b"")
        return True

    def _pulled(self, message: ServerMessage) -> bool:
        *_, stream, name = message.subject.split(".")
        if (consumer := self._consumer(stream, name)) is None:
            return False
        consumer.pull(message.reply, json.loads(message.data or b"{}"))
        return True

    def _read_directly(self, message: ServerMessage) -> bool:
        name, _, key = message.subject.removeprefix(f"{API}DIRECT.GET.").partition(".")
        stream = self.streams.get(name)
        if stream is None or not stream.config["allow_direct"]:
            return False
        asked = {"last_by_subj": key} if key else json.loads(message.data)
        try:
            found = self._message(stream, asked)
        except JetStreamRefusal:
            self._server.publish(message.reply, b"", status("404", "Message Not Found"))
            return True
        fields: dict[str, object] = {
            "Nats-Stream": name,
            "Nats-Subject": found.subject,
            "Nats-Sequence": found.sequence,
            "Nats-Time-Stamp": stamp(found.time_ns),
        }
        self._server.publish(message.reply, found.data, with_fields(found.header, fields))
        return True

    def _answered(self, message: ServerMessage) -> bool:
        if not message.subject.startswith(API):
            return True
        asked = json.loads(message.data or b"{}")
        try:
            answer = self._ask(message.subject.removeprefix(API).split("."), asked)
        except JetStreamRefusal as refusal:
            answer = {"error": refusal.body}
        if answer is not None:
            self._server.publish(message.reply, json.dumps(answer).encode())
        return True

    def _ask(self, tokens: list[str], asked: Answer) -> Answer | None:
        answer = None
        match tokens:
            case ["INFO"]:
                answer = self._account()
            case ["STREAM", "NAMES" | "LIST" as verb]:
                answer = self._list(verb, asked.get("subject"))
            case ["STREAM", "MSG", "GET" | "DELETE" as verb, name]:
                answer = self._of_message(verb, self._stream(name), asked)
            case ["STREAM", verb, name]:
                answer = self._of_stream(verb, name, asked)
            case ["CONSUMER", "CREATE" | "DURABLE", *_]:
                answer = self._create_consumer(asked)
            case ["CONSUMER", verb, stream, *name]:
                answer = self._of_consumers(verb, self._stream(stream).name, *name)
        return answer

    def _of_consumers(self, verb: str, stream: str, name: str | None = None) -> Answer:
        if name is None:
            found = self._consumers_of(stream)
            told = [one.name if verb == "NAMES" else one.info() for one in found]
            return {"total": len(told), "offset": 0, "limit": 1024, "consumers": told}
        if (consumer := self._consumer(stream, name)) is None:
            raise _no_consumer()
        if verb == "INFO":
            return consumer.info()
        consumer.end()
        return {"success": True}

    def _stream(self, name: str) -> MemoryStream:
        if (stream := self.streams.get(name)) is None:
            raise _no_stream()
        stream.expire()
        return stream

    def _account(self) -> Answer:
        used = {kind: sum(one.bytes for one in self._kept_in(kind)) for kind in self._room}
        return {
            "memory": used["memory"],
            "storage": used["file"],
            "streams": len(self.streams),
            "consumers": len(self.consumers),
            "limits": {"max_memory": -1, "max_storage": -1, "max_streams": -1, "max_consumers": -1},
            "api": {"level": 5, "total": 0, "errors": 0},
        }

    def _kept_in(self, kind: str) -> list[MemoryStream]:
        return [one for one in self.streams.values() if one.config["storage"] == kind]

    def _list(self, verb: str, subject: str | None) -> Answer:
        found = [
            one
            for one in self.streams.values()
            if subject is None or any(overlap(subject, pattern) for pattern in one.config["subjects"])
        ]
        told = [one.name if verb == "NAMES" else self._info(one) for one in found]
        return {"total": len(told), "offset": 0, "limit": 1024, "streams": told}

    def _info(self, stream: MemoryStream, subjects: str | None = None) -> Answer:
        count = len(self._consumers_of(stream.name))
        return {
            "config": stream.config,
            "created": stamp(stream.created_ns),
            "state": stream.state(count, subjects),
            "ts": stamp(time.time_ns()),
        }

    def _of_stream(self, verb: str, name: str, asked: Answer) -> Answer | None:
        verbs: dict[str, Callable[[], Answer]] = {
            "CREATE": lambda: self._create(completed(asked)),
            "UPDATE": lambda: self._update(self._stream(name), completed(asked)),
            "INFO": lambda: self._info(self._stream(name), asked.get("subjects_filter")),
            "DELETE": lambda: self._delete(self._stream(name)),
            "PURGE": lambda: self._purge(self._stream(name), asked),
        }
        return verbs[verb]() if verb in verbs else None

    def _create(self, config: Answer) -> Answer:
        name = config["name"]
        if (known := self.streams.get(name)) is not None:
            if known.config != config:
                raise JetStreamRefusal(
                    400, 10058, "stream name already in use with a different configuration"
                )
            return self._info(known)
        self._check_subjects(config)
        self._check_reservation(config)
        self.streams[name] = MemoryStream(config)
        return self._info(self.streams[name]) | {"did_create": True}

    def _check_subjects(self, config: Answer) -> None:
        others = [one for one in self.streams.values() if one.name != config["name"]]
        if any(
            overlap(mine, theirs)
            for one in others
            for theirs in one.config["subjects"]
            for mine in config["subjects"]
        ):
            raise JetStreamRefusal(400, 10065, "subjects overlap with an existing stream")

    def _check_reservation(self, config: Answer) -> None:
        kind = config["storage"]
        others = sum(
            max(one.config["max_bytes"], 0) for one in self._kept_in(kind) if one.name != config["name"]
        )
        if others + max(config["max_bytes"], 0) > self._room[kind]:
            err_code, word = (10047, "storage") if kind == "file" else (10028, "memory")
            raise JetStreamRefusal(500, err_code, f"insufficient {word} resources available")

    def _update(self, stream: MemoryStream, config: Answer) -> Answer:
        if config["storage"] != stream.config["storage"]:
            raise JetStreamRefusal(500, 10052, "stream configuration update can not change storage type")
        self._check_subjects(config)
        self._check_reservation(config)
        stream.config = config
        stream.trim(*list(stream.by_subject))
        return self._info(stream)

    def _delete(self, stream: MemoryStream) -> Answer:
        for consumer in self._consumers_of(stream.name):
            consumer.end()
        del self.streams[stream.name]
        return {"success": True}

    def _purge(self, stream: MemoryStream, asked: Answer) -> Answer:
        purged = stream.purge(asked.get("filter"), asked.get("keep") or 0, asked.get("seq"))
        return {"success": True, "purged": purged}

    def _message(self, stream: MemoryStream, asked: Answer) -> StoredMessage:
        stream.expire()
        if (last := asked.get("last_by_subj")) is not None:
            found = stream.last(last)
        elif (pattern := asked.get("next_by_subj")) is not None:
            later = (
                sequence
                for subject in stream.matching(pattern)
                for sequence in stream.by_subject[subject]
                if sequence >= (asked.get("seq") or 0)
            )
            found = stream.messages.get(min(later, default=0))
        else:
            found = stream.messages.get(asked.get("seq") or 0)
        if found is None:
            raise JetStreamRefusal(404, 10037, "no message found")
        return found

    def _of_message(self, verb: str, stream: MemoryStream, asked: Answer) -> Answer:
        if verb == "DELETE":
            if stream.config["deny_delete"]:
                raise JetStreamRefusal(500, 10057, "message delete not permitted")
            stream.remove(self._message(stream, asked).sequence)
            return {"success": True}
        found = self._message(stream, asked)
        told: Answer = {"subject": found.subject, "seq": found.sequence, "time": stamp(found.time_ns)}
        if found.data:
            told["data"] = base64.b64encode(found.data).decode()
        if found.header:
            told["hdrs"] = base64.b64encode(found.header).decode()
        return {"message": told}

    def _create_consumer(self, asked: Answer) -> Answer:
        stream, config = self._stream(asked["stream_name"]), asked["config"]
        if config.get("deliver_policy") == "last_per_subject" and not _filters(config):
            raise JetStreamRefusal(400, 10094, "consumer delivery policy is deliver last per subject")
        name = config.get("durable_name") or config.get("name") or secrets.token_hex(4)
        if (known := self._consumer(stream.name, name)) is not None:
            known.config |= {key: value for key, value in config.items() if value is not None}
            return known.info()
        consumer = MemoryConsumer(self._server, stream, name, config)
        if stream.config["retention"] == "workqueue":
            self._check_alone(consumer)
        self.consumers[stream.name, name] = consumer
        return consumer.info()

    def _check_alone(self, consumer: MemoryConsumer) -> None:
        others = self._consumers_of(consumer.stream.name)
        if any(
            overlap(mine, theirs)
            for one in others
            for theirs in one.filters or [">"]
            for mine in consumer.filters or [">"]
        ):
            consumer.ended = True
            raise JetStreamRefusal(400, 10100, "filtered consumer not unique on workqueue stream")
