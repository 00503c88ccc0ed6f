"""The pages as `make docs` builds them: their front, and what their search finds first, in the system's Chromium."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from playwright.async_api import Browser

from tests.patience import HUNG_MS, HUNG_S

ROOT = Path(__file__).parents[3]
WORDS = (
    "429", "503", "docker", "install", "gpu memory", "storage full", "cuda", "slow", "black picture", "mask inverted",
    "port taken", "logs",
)  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pages that a search is to find, and some that it is not to find; `make docs` builds all and checks the links."""
    folder = tmp_path_factory.mktemp("site")
    pages = "docs/index.md,docs/troubleshooting.md,docs/deploy.md,CHANGELOG.md,docs/adr/000*.md"
    command: list[str | Path] = [
        sys.executable,
        "-m",
        "sphinx",
        "-Q",
        "-D",
        f"include_patterns={pages}",
        "--conf-dir",
        ROOT / "docs",
    ]
    subprocess.run([*command, ROOT, folder], check=True, timeout=2 * HUNG_S)
    return folder


FOUND = """words => words.map((one) => {
    const results = Search._performSearch(...Search._parseQuery(one));
    return results.map(([page]) => page);
})"""
"""The pages that the search of Sphinx finds for each of several queries, as its own tests ask for them."""


@pytest.mark.asyncio(loop_scope="session")
async def test_a_search_finds_what_to_do_and_not_what_was_decided_and_the_front_leads_to_the_index(
    browser: Browser, site: Path
) -> None:
    page = await browser.new_page()
    page.set_default_timeout(HUNG_MS)
    await page.goto(f"{site.as_uri()}/search.html?q={WORDS[0]}")
    await page.locator('#search-results a[href*="docs/troubleshooting.html"]').first.wait_for()
    for words, pages in zip(WORDS, await page.evaluate(FOUND, WORDS), strict=True):
        assert "docs/troubleshooting" in pages, words
        assert not any(one.startswith(("docs/adr/", "CHANGELOG")) for one in pages), words
    await page.goto(f"{site.as_uri()}/index.html")
    await page.wait_for_url("**/docs/index.html")
    assert await page.get_by_role("link", name="Troubleshooting").count()
    await page.close()
