"""Stacks that rehearsals start for themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import pytest

from giornata.wire.workers import ServiceName
from tests.e2e.conftest import _patient_launcher, pace, tiny_model  # noqa: F401 - pytest finds fixtures by name
from tests.e2e.live import NO_ENV, NO_ENV_OF, EnvOf, LiveStack, live_stack


class StartStack(Protocol):
    """Starts a stack for one test: the replicas that differ from one each, environment for all services and for one."""

    def __call__(
        self,
        replicas: Mapping[ServiceName, int],
        env: Mapping[str, str] = NO_ENV,
        nats_servers: int = 1,
        env_of: EnvOf = NO_ENV_OF,
    ) -> LiveStack: ...


@pytest.fixture
def start_stack(tiny_model: Path) -> Iterator[StartStack]:  # noqa: F811 - the fixture
    """Starts a stack that belongs to this test alone: ``start_stack({ServiceName.DENOISER: 2})``."""
    with ExitStack() as opened:
        yield lambda replicas, env=NO_ENV, nats_servers=1, env_of=NO_ENV_OF: opened.enter_context(
            live_stack(tiny_model, replicas, env, nats_servers, env_of)
        )
