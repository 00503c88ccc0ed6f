"""Servers and checkpoints as the integration tests have them."""

from __future__ import annotations

from tests.integration.conftest import (  # noqa: F401 - pytest finds fixtures by name
    nats_accounts,
    nats_url,
    redis_url,
    server_folder,
    stage,
    tiny_checkpoint,
)
