"""The studio's modules without a DOM, in the browser that runs them; see studio/modules.js."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import giornata_gateway
from giornata_prepost.config import PrepostConfig
from tests.e2e.studio.browsing import find_browser
from tests.e2e.studio.gateway import Open

STATIC = Path(giornata_gateway.__file__).parent / "static"
MODULES = Path(__file__).parent / "modules.js"
SCRIPT = "text/javascript"

RUN = """async () => {
    const { tests } = await import("/modules.js");
    const failures = [];
    for (const [name, test] of Object.entries(tests)) {
        try { test(); } catch (error) { failures.push(`${name}: ${error.message}`); }
    }
    return { ran: Object.keys(tests).length, failures };
}"""


@pytest.mark.asyncio(loop_scope="session")
async def test_the_modules_keep_their_promises(opened: Open) -> None:
    async with opened(path="/studio/icon.svg") as (page, watch):
        watch.expected.append("favicon.ico")
        await page.route("**/modules.js", lambda route: route.fulfill(path=MODULES, content_type=SCRIPT))
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
