"""The NATS door, by :mod:`giornata.client`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, Final

from giornata import client
from giornata.logs import configure_logs, escape_controls
from giornata.wire.errors import GiornataError
from giornata.wire.jobs import JobState
from giornata.wire.messages import DoneEvent, PreviewEvent, StateEvent, StepEvent
from giornata_tools.clients.edits import (
    EditCall,
    EditOutcome,
    EditProgress,
    EditStopped,
    PaintedPicture,
    PictureFailure,
    Preview,
    RequestRefused,
    Tell,
)

CANCEL_S: Final = 10.0
"""How long to wait for the acceptance of an edit that is given up, and then for its cancelling."""


class NatsClient:
    """A connection to NATS. Make it with :func:`open_nats`."""

    def __init__(self, connected: client.Client, timeout_s: float) -> None:
        self._client = connected
        self._timeout_s = timeout_s

    async def edit(self, order: EditCall, tell: Tell) -> EditOutcome:
        """Carry out `order` as one request over NATS; see :class:`giornata_tools.clients.edits.EditClient`."""
        submitting = asyncio.ensure_future(self._submitted(order))
        try:
            edit = await asyncio.shield(submitting)
            async for progress in edit:
                if not isinstance(progress, DoneEvent):
                    tell(_told(progress))
            result = await edit
        except asyncio.CancelledError:
            raise EditStopped(await _cancelled(submitting)) from None
        except GiornataError as error:
            raise RequestRefused(error.body()) from error
        return EditOutcome(
            job_id=result.job_id,
            size=f"{result.width}x{result.height}",
            pictures=tuple(PaintedPicture.model_validate(dict(each)) for each in result.pictures),
            failures=tuple(PictureFailure(escape_controls(sentence)) for sentence in result.errors),
        )

    async def _submitted(self, order: EditCall) -> client.Edit:
        parameters: dict[str, Any] = {
            **order.parameters,
            "timeout_s": self._timeout_s,
            "reference": order.references,
            "control_image": order.control_images,
        }
        if order.image is None:
            return await self._client.generate(**parameters)
        return await self._client.edit(image=order.image, mask=order.mask, **parameters)


@asynccontextmanager
async def open_nats(
    url: str, blobs_url: str | None, api_key: str | None, tenant: str, timeout_s: float
) -> AsyncIterator[NatsClient]:
    """Connected while inside; arguments as of :func:`giornata.client.connect`, and the time allowed for an edit.

    Raises:
        Refused: no server answers.
    """
    configure_logs("error", "console", "giornata")  # or the library's warnings go to standard output
    async with AsyncExitStack() as stack:
        try:
            connected = await stack.enter_async_context(
                client.connect(url, blobs_url=blobs_url, api_key=api_key, tenant=tenant, name="giornata-cli")
            )
        except GiornataError as error:
            raise RequestRefused(error.body()) from error
        yield NatsClient(connected, timeout_s)


def _told(event: StateEvent | StepEvent | PreviewEvent) -> EditProgress | Preview:
    if isinstance(event, PreviewEvent):
        return Preview.model_validate(dict(event))
    return EditProgress.model_validate({"state": JobState.RUNNING, **dict(event)})


async def _cancelled(submitting: asyncio.Future[client.Edit]) -> str:
    """Cancel the edit and tell what became of it. One whose acceptance is not told yet has no name: wait for that."""
    job = "the edit"
    try:
        async with asyncio.timeout(CANCEL_S):
            edit = await asyncio.shield(submitting)
            job = f"job {edit.job_id}"
            await edit.cancel()
    except GiornataError as error:
        return f"Stopped waiting for {job}: {error}"
    except TimeoutError:
        return f"Stopped waiting. The gateway has not confirmed that {job} is cancelled."
    finally:
        if not submitting.done():
            submitting.cancel()
            with suppress(asyncio.CancelledError, GiornataError):
                await submitting
    return f"Cancelled {job}."
