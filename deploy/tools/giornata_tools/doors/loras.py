"""Uploads of LoRAs over the REST door."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from giornata_tools.doors.http_door import HttpClient

WAITED_MS: Final = 60_000
"""How long the gateway holds a question for the end of a validation."""


async def uploaded(gateway: HttpClient, file: Path, fields: Mapping[str, str]) -> dict[str, Any]:
    """What ``/v1/loras`` tells of `file` once it is ready or refused; `fields` may be `model` and `name`.

    Raises:
        Refused: the gateway refuses the file at once, or does not answer.
    """
    told = await gateway.send_file("/v1/loras", file, fields)
    while told["state"] == "validating":
        told = await gateway.read(f"/v1/loras/{told['id']}?wait_ms={WAITED_MS}")
    return told
