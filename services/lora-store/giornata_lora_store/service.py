"""The endpoint of the LoRA store."""

from __future__ import annotations

from typing import Final, NoReturn

from giornata.bus.bus import Endpoint
from giornata.wire import subjects
from giornata.wire.errors import NotSupported
from giornata.wire.messages import AdapterRequest


async def load(request: AdapterRequest) -> NoReturn:
    """Bring a LoRA to the denoisers of this host.

    Raises:
        NotSupported: always, for now.
    """
    raise NotSupported(
        "LoRA adapters are not loaded yet.",
        field="adapter",
        received=request.adapter,
        accepted="an edit without a LoRA",
    )


ENDPOINTS: Final = (Endpoint(subjects.lora("load"), AdapterRequest, load),)
