"""Webhooks as their receivers and ``/v1/webhooks`` are told."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Literal

from giornata.wire.jobs import JobState
from giornata.wire.progress import JobRecord
from giornata.wire.webhooks import WebhookRecord, WebhookState
from giornata_gateway.views.answers import View
from giornata_gateway.views.jobs import JobView, job_view
from giornata_gateway.views.pages import page_of


class WebhookMessage(View):
    """The body of a webhook (Standard Webhooks)."""

    type: Literal["job.completed", "job.failed", "job.cancelled"]
    timestamp: datetime
    """When the gateway learnt of the job's end; that of an attempt is in its headers."""
    data: JobView
    """As `GET /v1/jobs/{id}` tells it."""


class WebhookView(View):
    """A webhook that was not taken yet."""

    id: str
    """Its job's."""
    object: Literal["webhook"] = "webhook"
    state: WebhookState
    url: str
    attempts: int
    """How often it was sent."""
    next_at: int | None
    """Unix time in seconds of the next attempt; null until the job has ended, and of one that was given up."""
    created_at: int
    """Unix time in seconds."""
    error: str | None = None
    """Why the last attempt failed."""


class WebhookList(View):
    """Answer of ``GET /v1/webhooks``."""

    object: Literal["list"] = "list"
    data: list[WebhookView]
    """The newest first."""
    has_more: bool
    """Whether a request with the last id as `after` tells more."""


class WebhookDeleted(View):
    """Answer of ``DELETE /v1/webhooks/{id}``."""

    id: str
    object: Literal["webhook"] = "webhook"
    deleted: Literal[True] = True


class WebhookSecret(View):
    """Answer of ``GET /v1/webhook-secret``."""

    object: Literal["webhook_secret"] = "webhook_secret"
    secret: str
    """For libraries of Standard Webhooks: `whsec_` and base64."""


def webhook_body(record: JobRecord, base_url: str) -> str:
    """What a receiver is told of a job that has ended."""
    ends = {JobState.COMPLETED: "completed", JobState.FAILED: "failed", JobState.CANCELLED: "cancelled"}
    message = {
        "type": f"job.{ends[record.state]}",
        "timestamp": datetime.now(UTC),
        "data": job_view(record, base_url),
    }
    return WebhookMessage.model_validate(message).model_dump_json()


def webhook_view(hook: WebhookRecord) -> WebhookView:
    """A webhook as it is told."""
    waits = hook.state is WebhookState.WAITING and hook.body is not None
    told = {"id": hook.job_id, "created_at": hook.created_s, "next_at": int(hook.next_s) if waits else None}
    return WebhookView.model_validate(vars(hook) | told)


def webhook_list(hooks: Sequence[WebhookRecord], limit: int, after: str | None) -> WebhookList:
    """A page of the sorted `hooks`, from the one that follows that of the job `after`; InvalidField without it."""
    page, has_more = page_of(hooks, lambda hook: hook.job_id, limit, after)
    return WebhookList(data=[webhook_view(hook) for hook in page], has_more=has_more)
