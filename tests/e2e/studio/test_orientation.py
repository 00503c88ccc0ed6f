"""The browser shows every file the way up that the service decodes it, so that masks drawn on a page fit."""

from __future__ import annotations

import base64

import pytest
from playwright.async_api import Browser

from tests.unit.prepost.oriented_files import ORIENTED

SIZES = """async (files) => Promise.all(files.map(async (file) => {
  const blob = new Blob([Uint8Array.from(atob(file), (byte) => byte.charCodeAt(0))]);
  const { width, height } = await createImageBitmap(blob);
  const image = new Image();
  image.src = URL.createObjectURL(blob);
  await image.decode();
  return [width, height, image.naturalWidth, image.naturalHeight];
}))"""
"""Sizes of files as a canvas gets them, which is what the studio edits, and as a page shows them."""


@pytest.mark.asyncio(loop_scope="module")
async def test_chromium_turns_what_the_service_turns(browser: Browser) -> None:
    page = await browser.new_page()
    files = [base64.b64encode(data).decode() for data, _ in ORIENTED.values()]
    sizes = await page.evaluate(SIZES, files)
    await page.close()
    shown = {name: tuple(size) for name, size in zip(ORIENTED, sizes, strict=True)}
    assert shown == {name: (16, 24) * 2 if turned else (24, 16) * 2 for name, (_, turned) in ORIENTED.items()}
