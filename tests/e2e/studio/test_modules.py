"""The studio's modules without a DOM, in the browser that runs them; see studio/modules.js."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.async_api import Route

import giornata_gateway
from giornata_prepost.config import PrepostConfig
from tests.e2e.studio.browsing import find_browser, launched

ORIGIN = "http://studio.test"
STATIC = Path(giornata_gateway.__file__).parent / "static"
TESTS = Path(__file__).parent

RUN = """async () => {
    const { tests } = await import("/modules.js");
    const failures = [];
    for (const [name, test] of Object.entries(tests)) {
        try { test(); } catch (error) { failures.push(`${name}: ${error.message}`); }
    }
    return { ran: Object.keys(tests).length, failures };
}"""


async def serve(route: Route) -> None:
    """Files of the package and of the tests, without a server."""
    path = route.request.url.removeprefix(ORIGIN)
    if path.startswith("/studio/"):
        await route.fulfill(path=STATIC / path.removeprefix("/studio/"), content_type="text/javascript")
    elif path == "/modules.js":
        await route.fulfill(path=TESTS / "modules.js", content_type="text/javascript")
    else:
        await route.fulfill(body="<!doctype html><title>modules</title>", content_type="text/html")


async def test_the_modules_keep_their_promises() -> None:
    async with launched() as browser:
        context = await browser.new_context()
        await context.route("**/*", serve)
        page = await context.new_page()
        await page.goto(ORIGIN)
        outcome = await page.evaluate(RUN)
    assert outcome["failures"] == []
    assert outcome["ran"] > 20


def test_the_page_takes_pictures_as_large_as_the_service_does() -> None:
    (said,) = re.findall(r"MAX_PIXELS = ([\d_]+);", (STATIC / "js" / "mask.js").read_text("utf-8"))
    assert int(said) == PrepostConfig.model_fields["max_pixels"].default


def test_without_a_browser_tests_skip_and_say_how_to_get_one_unless_that_is_forbidden(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("GIORNATA_REQUIRE_BROWSER", raising=False)
    with pytest.raises(pytest.skip.Exception, match="apt-get install -y chromium"):
        find_browser()
    monkeypatch.setenv("GIORNATA_REQUIRE_BROWSER", "1")
    with pytest.raises(pytest.fail.Exception, match="no browser"):
        find_browser()
