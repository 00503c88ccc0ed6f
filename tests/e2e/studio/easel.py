"""What a person does on the studio page, for tests: open pictures, draw, wait, download."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from playwright.async_api import FilePayload, Page, expect

from giornata_lab.bench.systems.edit_forms import Pixels, pixels
from tests.e2e.studio.browsing import LIMIT_MS
from tests.e2e.studio.gateway import GREY, plain

LONG: Final = "200"
"""Steps of an edit that is not over before the test has acted, where steps are slow: see `slow_steps`."""
CANCELLED: Final = "Cancelled. The picture is as it was."

expect.set_options(timeout=LIMIT_MS)


async def ready(page: Page) -> None:
    await page.wait_for_selector("html[data-ready]")


async def open_picture(page: Page, data: bytes, name: str = "scene.png") -> None:
    await ready(page)
    await page.set_input_files("#file", file_of(data, name))
    await expect(page.locator("#invitation")).to_be_hidden()


async def open_sample(page: Page, title: str = "Astronaut") -> None:
    await ready(page)
    await page.get_by_role("button", name=title, exact=True).click()
    await expect(page.locator("#stage-note")).to_contain_text("masked.")
    await expect(page.locator("#picture-note")).not_to_be_empty()


async def middle(page: Page) -> tuple[float, float]:
    """The middle of the picture, in the window's coordinates."""
    box = await page.locator("#stage").bounding_box()
    assert box is not None
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


async def drag(page: Page, start: tuple[float, float], end: tuple[float, float]) -> None:
    """With the mouse's left button, points relative to the middle of the picture."""
    x, y = await middle(page)
    await page.mouse.move(x + start[0], y + start[1])
    await page.mouse.down()
    await page.mouse.move(x + end[0], y + end[1], steps=4)
    await page.mouse.up()


async def masked(page: Page) -> None:
    """Open a grey picture, draw a stroke along its middle and write a prompt."""
    await open_picture(page, plain(GREY))
    await drag(page, (-60, 0), (60, 0))
    await page.fill("#prompt", "a red star")


async def masked_share(page: Page) -> float:
    """Percent of the picture, as the page says."""
    text = await page.locator("#stage-note").inner_text()
    found = re.match(r"([\d.]+) %", text)
    return float(found[1]) if found else 0.0


async def edit(page: Page, **fields: object) -> None:
    """Fill fields by the ids of their inputs and start."""
    for name, value in fields.items():
        await page.fill(f"#{name}", str(value))
    await page.click("#go")


async def running(page: Page, steps: str = LONG) -> None:
    """Until a step is told."""
    await expect(page.locator("#run-text")).to_have_text(re.compile(rf"Step \d+ of {steps}"))


async def color_at(page: Page, x: float, y: float) -> tuple[int, int, int]:
    """What the canvas shows at a point relative to its middle, once the next frame is drawn."""
    red, green, blue, _ = await page.evaluate(
        """([x, y]) => new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(() => {
            const canvas = document.getElementById("stage");
            const [left, top] = [canvas.width / 2 + x * devicePixelRatio, canvas.height / 2 + y * devicePixelRatio];
            const pixel = new OffscreenCanvas(1, 1).getContext("2d");
            pixel.drawImage(canvas, -Math.round(left), -Math.round(top));
            resolve([...pixel.getImageData(0, 0, 1, 1).data]);
        })))""",
        [x, y],
    )
    return red, green, blue


async def finished(page: Page, edits: int = 0) -> None:
    """Until a result is shown, and so many edits are there where they are counted."""
    if edits:
        await expect(page.locator("#visit-strip button")).to_have_count(edits)
    await expect(page.locator("#result")).to_be_visible()


async def from_text(page: Page, prompt: str = "") -> None:
    await ready(page)
    await page.get_by_role("button", name="From text").click()
    await page.fill("#prompt", prompt)


def file_of(data: bytes, name: str = "a.png", kind: str = "image/png") -> FilePayload:
    """A file that a person chooses."""
    return FilePayload(name=name, mimeType=kind, buffer=data)


async def downloaded(page: Page, folder: Path) -> Pixels:
    """The result as pixels."""
    async with page.expect_download() as begun:
        await page.click("#download")
    download = await begun.value
    await download.save_as(folder / "result.png")
    assert re.fullmatch(r"[\w.-]+-\d+\.png", download.suggested_filename)
    return pixels((folder / "result.png").read_bytes())
