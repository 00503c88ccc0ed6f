"""What a span may tell. No prompt, key, file or tenant has a place here. Pure."""

from __future__ import annotations

from enum import StrEnum
from typing import Final, TypedDict


class SpanAttributes(TypedDict, total=False):
    """Attributes by name. A span tells these and nothing else: text of users has no name here."""

    job: str
    model: str
    task: str
    """``edit`` or ``generate``."""
    attempt: int
    tries: int
    """Which try of a question this is, 1 for the first."""
    index: int
    """The picture's index within its job."""
    rows: int
    """Pictures."""
    steps: int
    """Steps that the span stands for."""
    batch_rows: int
    """Pictures in the batch that a step computed."""
    tokens: int
    """Image tokens that a step computed, of all rows of the batch."""
    mask_ratio: float
    worker: str
    """A denoiser's instance, or a prepost's that is asked."""
    predicted_ms: float
    """From the decision to the job's last step, as the router expects."""
    outcome: str
    """How an attempt ended."""
    template: str
    """What a template did for an edit."""
    state: str
    """The terminal state of a job."""
    wait_ms: float
    """From acceptance to the first step."""
    compute_ms: float
    """Time in the process, thread or device that computed."""
    load_wait_ms: float
    """Part of a step: it waited for what a recording's blocks take."""
    loaded_bytes: int
    bytes: int
    """Size of a blob."""
    code: str
    """An error's stable code, or the name of its class."""
    method: str
    route: str
    """With names for what differs from request to request."""
    status: int
    """HTTP status code."""
    subject: str
    """Kind of the NATS subject."""


NAMES: Final = {
    "code": "error.type",
    "method": "http.request.method",
    "route": "http.route",
    "status": "http.response.status_code",
    "subject": "messaging.destination.name",
}
"""Attributes that OpenTelemetry's conventions name; every other is ``giornata.`` and its name."""


def attribute(name: str) -> str:
    """The attribute's name in OpenTelemetry."""
    return NAMES.get(name, f"giornata.{name}")


class TraceSpanKind(StrEnum):
    """Which side of a message a span is on."""

    INSIDE = "internal"
    ASKS = "client"
    ANSWERS = "server"
    TAKES = "consumer"
    """From a queue."""
