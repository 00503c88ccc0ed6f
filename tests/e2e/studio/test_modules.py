"""The studio's modules without a DOM, in the browser that runs them; see studio/modules.js."""

from __future__ import annotations

from pathlib import Path

import pytest

import giornata_gateway
from tests.e2e.studio.gateway import Open

STATIC = Path(giornata_gateway.__file__).parent / "static"
MODULES = Path(__file__).parent / "modules.js"
SCRIPT = "text/javascript"

RUN = """async () => {
    const { tests } = await import("/modules.js");
    const failures = [];
    for (const [name, test] of Object.entries(tests)) {
        try { await test(); } catch (error) { failures.push(`${name}: ${error.message}`); }
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
