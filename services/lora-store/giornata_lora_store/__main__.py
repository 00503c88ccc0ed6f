"""``python -m giornata_lora_store``: the composition root, and the one endpoint, which refuses for now.

The service is discovered, watched and drained like every other one.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import NoReturn

from giornata import runtime
from giornata.bus.bus import Endpoint
from giornata.config import CellConfig
from giornata.wire import subjects
from giornata.wire.errors import NotSupported
from giornata.wire.messages import AdapterRequest
from giornata.wire.workers import ServiceName


async def load(request: AdapterRequest) -> NoReturn:
    """Bring a LoRA to the denoisers of this host; always raises NotSupported."""
    raise NotSupported(
        "LoRA adapters are not loaded yet.",
        field="adapter",
        received=request.adapter,
        accepted="an edit without a LoRA",
    )


if __name__ == "__main__":
    endpoint = Endpoint(subjects.lora("load"), AdapterRequest, load)
    serve = partial(runtime.serve_stateless, ServiceName.LORA_STORE, [endpoint])
    sys.exit(runtime.start(ServiceName.LORA_STORE, CellConfig, serve))
