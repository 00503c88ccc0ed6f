"""Composition root: ``python -m giornata_lora_store --help``."""

from __future__ import annotations

import sys
from functools import partial

from giornata import runtime
from giornata.config import ServiceConfig
from giornata.wire.workers import ServiceName
from giornata_lora_store.service import ENDPOINTS

if __name__ == "__main__":
    serve = partial(runtime.serve_stateless, ServiceName.LORA_STORE, ENDPOINTS)
    sys.exit(runtime.start(ServiceName.LORA_STORE, ServiceConfig, serve))
