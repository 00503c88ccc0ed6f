"""Composition root: ``python -m giornata_controlnet --help``."""

from __future__ import annotations

import sys
from functools import partial

from giornata import runtime
from giornata.config import ServiceConfig
from giornata.wire.workers import ServiceName
from giornata_controlnet.service import ENDPOINTS

if __name__ == "__main__":
    serve = partial(runtime.serve_stateless, ServiceName.CONTROLNET, ENDPOINTS)
    sys.exit(runtime.start(ServiceName.CONTROLNET, ServiceConfig, serve))
