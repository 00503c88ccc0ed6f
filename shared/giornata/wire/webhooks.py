"""Webhooks of jobs: what is kept of one until its receiver has taken it."""

from __future__ import annotations

from enum import StrEnum

from giornata.wire.values import RecordModel


class WebhookState(StrEnum):
    """How far a webhook is; one that was taken has no record any more."""

    WAITING = "waiting"
    """Its job has not ended, or it is tried again."""
    DEAD = "dead"
    """It was given up."""


class WebhookRecord(RecordModel):
    """The truth about the webhook of a job."""

    job_id: str
    tenant: str
    url: str
    created_s: int
    state: WebhookState = WebhookState.WAITING
    body: str | None = None
    """What is told, the same at every attempt; None until the job has ended."""
    attempts: int = 0
    """How often it was sent."""
    next_s: float = 0.0
    """Unix time before which it is not sent again: after a failure, and while a gateway sends it."""
    error: str | None = None
    """Why the last attempt failed."""
