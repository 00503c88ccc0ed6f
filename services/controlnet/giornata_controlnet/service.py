"""The endpoint of the ControlNet service."""

from __future__ import annotations

from typing import Final, NoReturn

from giornata.bus.bus import Endpoint
from giornata.wire import subjects
from giornata.wire.errors import NotSupported
from giornata.wire.messages import AdapterRequest


async def residuals(request: AdapterRequest) -> NoReturn:
    """Residuals of a ControlNet for one step.

    Raises:
        NotSupported: always, for now.
    """
    raise NotSupported(
        "ControlNet residuals are not computed yet.",
        field="adapter",
        received=request.adapter,
        accepted="an edit without a ControlNet",
    )


ENDPOINTS: Final = (Endpoint(subjects.controlnet("residuals"), AdapterRequest, residuals),)
