"""What a service imports of OpenTelemetry: nothing where tracing is off."""

from __future__ import annotations

import os
import subprocess
import sys

from giornata.wire.workers import ServiceName


def started(service: ServiceName, *modules: str, **variables: str) -> set[str]:
    """What of OpenTelemetry a service has imported that has `modules` and a blob store on Redis' protocol."""
    code = f"""
import asyncio, importlib, sys
for module in {modules!r}:
    importlib.import_module(module)
from giornata import runtime
from giornata.config import ServiceConfig
from giornata.wire.errors import ServiceUnavailable
from giornata.wire.workers import ServiceName

async def main(config, stop):
    from giornata.blobs import open_blobs
    try:
        async with asyncio.timeout(0.01), open_blobs("redis://127.0.0.1:1"):
            pass
    except (ServiceUnavailable, TimeoutError):
        assert "redis" in sys.modules
    importlib.import_module("throttled")  # as a gateway's quotas do
    print(*(name for name, module in sys.modules.items() if module and name.startswith("opentelemetry")))

sys.exit(runtime.start(ServiceName({service.value!r}), ServiceConfig, main))
"""
    environment = os.environ | variables
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment
    )
    return set(done.stdout.split())


def test_off_it_is_not_imported() -> None:
    """Redis' client would import its metrics by itself; so nothing imports it before tracing is switched off.

    Services that tests fork cannot import it at all (`tests/forked_programs.py`), and so none needs it.
    """
    assert started(ServiceName.GATEWAY, "giornata_gateway.__main__") == set()


def test_on_it_is_imported() -> None:
    told = started(ServiceName.GATEWAY, GIORNATA_TRACES_URL="http://127.0.0.1:1")
    assert {"opentelemetry.sdk.trace", "opentelemetry.exporter"} <= told
