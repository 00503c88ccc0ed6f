"""A browser, and pages of the shared stack or of a gateway inside the browser."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from playwright.async_api import Browser

from tests.e2e.live import LiveStack
from tests.e2e.studio.browsing import launched, visiting
from tests.e2e.studio.easel import Visit
from tests.e2e.studio.gateway import ORIGIN, Open


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    """A browser for the tests of a module, which run in the module's event loop."""
    async with launched() as opened:
        yield opened


@pytest.fixture
def visit(browser: Browser, stack: LiveStack) -> Visit:
    """Opens pages of the shared stack: ``async with visit("/docs", color_scheme="dark") as (page, watch)``."""
    return lambda path="/", **context: visiting(browser, stack.url, path, **context)


@pytest.fixture
def opened(browser: Browser) -> Open:
    return lambda gateway: visiting(browser, ORIGIN, serve=gateway.serve)
