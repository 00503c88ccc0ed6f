"""A real headless Chromium for tests, and what every page is held to: no error in its console, nothing from elsewhere.

It is the system's browser (Debian's ``chromium``), driven by Playwright. Without it the tests skip and say why;
``GIORNATA_REQUIRE_BROWSER=1`` forbids the skip.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest
from playwright.async_api import Browser, ConsoleMessage, Page, Request, async_playwright

from tests.patience import HUNG_MS

NAMES: Final = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
FLAGS: Final = (
    "--no-sandbox",  # tests may run as root, in containers
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
SCREENS: Final = Path(__file__).parents[3] / "out" / "screens"
LIMIT_MS: Final = HUNG_MS
"""How long a page may take for anything; machines that run tests are busy."""


def find_browser() -> str:
    """Path of the system's Chromium; skips the test, or fails it where it must not skip, when there is none."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        said = (
            f"no browser: none of {', '.join(NAMES)} is on the PATH; `apt-get install -y chromium` brings one"
        )
        if os.environ.get("GIORNATA_REQUIRE_BROWSER") == "1":
            pytest.fail(said)
        pytest.skip(said)
    return found


@asynccontextmanager
async def launched() -> AsyncIterator[Browser]:
    """A browser while inside."""
    path = find_browser()
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, headless=True, args=FLAGS)
        try:
            yield browser
        finally:
            await browser.close()


@dataclass
class Watch:
    """What a page did that it must not do."""

    origin: str
    expected: list[str] = field(default_factory=list)
    """Parts of console messages that this test provokes."""
    complaints: list[str] = field(default_factory=list)

    def attach(self, page: Page) -> None:
        """Look at `page` from now on."""
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.complaints.append(f"uncaught: {error}"))
        page.on("request", self._request)

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in {"error", "warning"}:
            self.complaints.append(f"{message.type}: {message.text} {message.location}")

    def _request(self, request: Request) -> None:
        if not request.url.startswith((self.origin, "blob:", "data:")):
            self.complaints.append(f"a request leaves the origin: {request.url}")

    def verdict(self) -> list[str]:
        """What nobody expected."""
        return [said for said in self.complaints if not any(part in said for part in self.expected)]


def options_of(context: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a browser context: those of every test, but for `context`."""
    return {"viewport": {"width": 1280, "height": 860}, "color_scheme": "light", **context}


@asynccontextmanager
async def visiting(
    browser: Browser, origin: str, path: str = "/", **context: Any
) -> AsyncIterator[tuple[Page, Watch]]:
    """A page of `origin` in the browser's first context, or in one with the options `context`.

    It remembers nothing of `origin`, where an earlier server may have listened. On leaving, it has behaved.
    """
    opened = await browser.new_context(**options_of(context)) if context else browser.contexts[0]
    opened.set_default_timeout(LIMIT_MS)
    page, watch = await opened.new_page(), Watch(origin)
    try:
        cleaning = await opened.new_cdp_session(page)
        await cleaning.send("Storage.clearDataForOrigin", {"origin": origin, "storageTypes": "all"})
        await cleaning.detach()
        watch.attach(page)
        await page.goto(origin + path)
        yield page, watch
        if watch.verdict():
            pytest.fail("\n".join(watch.verdict()))
    finally:
        await opened.set_offline(False)
        await (opened.close() if context else page.close())


async def screenshot(page: Page, name: str) -> None:
    """``out/screens/<name>.png``."""
    SCREENS.mkdir(parents=True, exist_ok=True)
    await page.screenshot(path=SCREENS / f"{name}.png")
