"""Errors as HTTP answers: their status, and the headers that tell a client what to do."""

from __future__ import annotations

import json

import pytest

from giornata.wire.errors import GiornataError, InternalError, QueueFull, ServiceUnavailable, StorageFull
from giornata_gateway.http.responses import error_answer


@pytest.mark.parametrize(
    ("error", "status", "after"),
    [
        (ServiceUnavailable(retry_after_s=2), 503, "2"),
        (ServiceUnavailable(), 503, "1"),
        (StorageFull(retry_after_s=0.2), 503, "1"),
        (QueueFull(retry_after_s=6.1), 429, "7"),
        (QueueFull(), 429, "1"),
        (InternalError(), 500, None),
    ],
)
def test_refusals_that_pass_tell_when_to_come_again(
    error: GiornataError, status: int, after: str | None
) -> None:
    answer = error_answer(error, "job_1")
    assert (answer.status, answer.headers.get("Retry-After")) == (status, after)
    assert answer.text is not None
    assert json.loads(answer.text)["error"]["code"] == error.code
