"""An OTLP collector in this process: takes spans as protobuf over HTTP, and lets tests look at them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as Sent
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from tests.patience import HUNG_S


@dataclass(frozen=True)
class CollectedSpan:
    """A span as it came."""

    service: str
    instance: str
    name: str
    kind: int
    trace: str
    id: str
    parent: str
    """Empty of a span without one."""
    began_ns: int
    ended_ns: int
    attributes: Mapping[str, Any]
    links: tuple[str, ...]
    """Ids of spans."""
    events: tuple[tuple[str, Mapping[str, Any]], ...]
    failed: bool

    @property
    def milliseconds(self) -> float:
        return (self.ended_ns - self.began_ns) / 1e6


def _told(attributes: Sequence[KeyValue]) -> dict[str, Any]:
    return {one.key: getattr(one.value, str(one.value.WhichOneof("value"))) for one in attributes}


def _seen(resource: Mapping[str, Any], span: Sent) -> CollectedSpan:
    return CollectedSpan(
        service=resource["service.name"],
        instance=resource["service.instance.id"],
        name=span.name,
        kind=span.kind,
        trace=span.trace_id.hex(),
        id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        began_ns=span.start_time_unix_nano,
        ended_ns=span.end_time_unix_nano,
        attributes=_told(span.attributes),
        links=tuple(link.span_id.hex() for link in span.links),
        events=tuple((event.name, _told(event.attributes)) for event in span.events),
        failed=span.status.code == Status.STATUS_CODE_ERROR,
    )


@dataclass
class Collector:
    """What came. Make it with :func:`collecting`."""

    url: str = ""
    bodies: list[bytes] = field(default_factory=list)
    """As they came, for tests that look for what must not be told."""
    came: threading.Condition = field(default_factory=threading.Condition)
    _read: list[CollectedSpan] = field(default_factory=list)
    _bodies_read: int = 0

    def take(self, body: bytes) -> None:
        with self.came:
            self.bodies.append(body)
            self.came.notify_all()

    @property
    def spans(self) -> list[CollectedSpan]:
        """All that have come; read when they are looked at, so that taking them costs a benchmark little."""
        with self.came:
            for body in self.bodies[self._bodies_read :]:
                for of in ExportTraceServiceRequest.FromString(body).resource_spans:
                    resource = _told(of.resource.attributes)
                    self._read += [_seen(resource, span) for scope in of.scope_spans for span in scope.spans]
            self._bodies_read = len(self.bodies)
            return list(self._read)

    def until(self, trace: str, enough: Callable[[list[CollectedSpan]], bool]) -> list[CollectedSpan]:
        """The spans of a trace, in order of their begin, once they are `enough`."""

        def of_trace() -> list[CollectedSpan]:
            return sorted((one for one in self.spans if one.trace == trace), key=lambda one: one.began_ns)

        with self.came:
            assert self.came.wait_for(lambda: enough(of_trace()), HUNG_S), [one.name for one in of_trace()]
            return of_trace()


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector that listens while inside."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            collector.take(self.rfile.read(int(self.headers["Content-Length"])))
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200 if self.path == "/v1/traces" else 404)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            """Stay silent."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, name="collector")
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
