"""Stacks for tests, each shared by the whole run. Tests of ``stack`` and ``shipped`` leave them as they found them.

What tests of ``pairs`` kill has a successor before the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import aiohttp
import pytest

from giornata.families import Family
from giornata_tools.checkout import MODELS
from giornata_tools.launcher.models import choose
from tests.e2e.collector import Collector, collecting
from tests.e2e.live import LiveStack, live_stack, paced, slowly
from tests.e2e.node_package import install
from tests.e2e.stacks import paired_stack, shipped_stack
from tests.patience import patient_launcher
from tests.s3_server import s3_server

SLOW_STEP_S = 0.25
"""Step time of a picture of 128 x 96 pixels; larger ones take up to four times as long."""


@pytest.fixture(autouse=True, scope="session")
def _patient_launcher() -> Iterator[None]:
    with patient_launcher():
        yield


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """The built-in checkpoint of the family flux-fill, built once and kept for later runs and the demo."""
    return Path(asyncio.run(choose({}, Family.FLUX_FILL, MODELS, print)).source)


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with OpenAI's package for Node and programs that ask by it."""
    folder = tmp_path_factory.mktemp("node")
    install(folder)
    return folder


@pytest.fixture(scope="session")
def pace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that lets steps wait in the stacks that are paced; see :func:`tests.e2e.live.slowly`."""
    return tmp_path_factory.mktemp("pace") / "step_s"


@pytest.fixture(scope="session")
def stack(tiny_model: Path, pace: Path) -> Iterator[LiveStack]:
    """One of each service, for all tests that only use it."""
    with ExitStack() as opened:
        with paced(pace) as env_of:
            live = opened.enter_context(live_stack(tiny_model, env_of=env_of))
        yield live


@pytest.fixture
async def http(stack: LiveStack) -> AsyncIterator[aiohttp.ClientSession]:
    """A session whose base is the gateway of `stack`."""
    async with aiohttp.ClientSession(stack.url) as session:
        yield session


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    """What ``shipped`` and ``pairs`` tell of their work."""
    with collecting() as one:
        yield one


@pytest.fixture(scope="session")
def shipped(
    tmp_path_factory: pytest.TempPathFactory, pace: Path, collector: Collector
) -> Iterator[LiveStack]:
    """The model that ships and all that ships beside it, for all tests that only use it."""
    with s3_server() as s3, shipped_stack(tmp_path_factory.mktemp("shipped"), pace, collector, s3) as live:
        yield live


@pytest.fixture(scope="session")
def generating_model() -> Path:
    """The built-in checkpoint of the family flux-inpaint, which also generates."""
    return Path(asyncio.run(choose({}, Family.FLUX_INPAINT, MODELS, print)).source)


@pytest.fixture(scope="session")
def pairs(generating_model: Path, pace: Path, collector: Collector) -> Iterator[LiveStack]:
    """Two of each service; who kills some of them starts others."""
    with paired_stack(generating_model, pace, collector) as live:
        yield live


@pytest.fixture
def slow_steps(stack: LiveStack, pace: Path) -> Iterator[Callable[[], None]]:
    """No edit of many steps is over before a test has acted; who has acted calls this, and steps wait no more."""
    with ExitStack() as slow:
        slow.enter_context(slowly(pace, SLOW_STEP_S))
        yield slow.close
