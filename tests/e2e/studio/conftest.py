"""One browser for all tests of a worker, and pages of the shared stack or of a gateway in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page

from tests.e2e.studio.browsing import Watch, launched, options_of, visiting
from tests.e2e.studio.gateway import FakeGateway, Open


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncIterator[Browser]:
    """The browser of all tests that run in the session's event loop, with a context for most of their pages."""
    async with launched() as opened:
        await (await opened.new_context(**options_of({}))).new_page()  # which keeps the context's processes
        yield opened


@pytest.fixture
def opened(browser: Browser) -> Open:
    """Opens the page of a gateway: ``async with opened(gateway, "/docs", has_touch=True) as (page, watch)``."""

    @asynccontextmanager
    async def open_page(
        gateway: FakeGateway | None = None, path: str = "/", **context: Any
    ) -> AsyncIterator[tuple[Page, Watch]]:
        served = gateway or FakeGateway()
        async with served.listening() as url, visiting(browser, url, path, **context) as visit:
            yield visit

    return open_page
