"""``python -m giornata_controlnet``: the composition root, and the one endpoint, which refuses for now.

The service is discovered, watched and drained like every other one.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import NoReturn

from giornata import runtime
from giornata.bus.answering import Endpoint
from giornata.config import CellConfig
from giornata.wire import subjects
from giornata.wire.errors import NotSupported
from giornata.wire.messages import AdapterRequest
from giornata.wire.workers import ServiceName


async def residuals(request: AdapterRequest) -> NoReturn:
    """Residuals of a ControlNet for one step; always raises NotSupported."""
    raise NotSupported(
        "ControlNet residuals are not computed yet.",
        field="adapter",
        received=request.adapter,
        accepted="an edit without a ControlNet",
    )


if __name__ == "__main__":
    endpoint = Endpoint(subjects.controlnet("residuals"), AdapterRequest, residuals)
    serve = partial(runtime.serve_stateless, ServiceName.CONTROLNET, [endpoint])
    sys.exit(runtime.start(ServiceName.CONTROLNET, CellConfig, serve))
