"""What the demo measured, whether it is good enough, and the pictures that it writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from operator import attrgetter
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont
from pydantic import BaseModel
from scipy.ndimage import binary_erosion

from giornata.wire.values import StageTimes
from giornata.wire.workers import InstanceView
from giornata_gateway.views.jobs import ControlShare, JobView, LoraShare
from giornata_lab.demo.exhibits import Exhibit
from giornata_lab.model.adapters.lessons import AdapterCard, AdapterKind
from giornata_prepost.images.masks import Alpha, Region, edited_region, effective_alpha
from giornata_prepost.images.pictures import Pixels

ORACLE_LIMIT: Final = 2 / 255
"""The service rounds to 8 bits where diffusers does; a value on the edge may fall to either side."""

LEAST_OVERLAP: Final = 0.5
"""Intersection over union of a mask from words with what they name. Below it, another thing was repainted."""
WORDS: Final = {AdapterKind.LORA: "LoRA", AdapterKind.CONTROLNET: "ControlNet"}
"""What each kind of adapter is called."""


@dataclass(frozen=True)
class DemoEdit:
    """An exhibit, and what the system made and measured of it."""

    exhibit: Exhibit
    """With all that was asked for: steps and seed too. Words are answered: the mask is what they found."""
    job_id: str
    picture: bytes
    """The PNG file that was sent."""
    latency_s: float
    """Seconds from sending the request to having the picture."""
    figures: JobView
    mask_overlap: float | None = None
    """Intersection over union of what words found with what they name; None where the edit brought its mask."""

    @property
    def before(self) -> Pixels:
        """(height, width, 3) uint8."""
        return np.asarray(self.exhibit.picture)

    @property
    def after(self) -> Pixels:
        """(height, width, 3) uint8."""
        return np.asarray(Image.open(BytesIO(self.picture)).convert("RGB"))

    @property
    def region(self) -> Region:
        """Return what the mask marks, grown as the edit asked for by name: nothing else may change."""
        asked, mask = self.exhibit.parameters, np.asarray(self.exhibit.mask.convert("RGB"))
        marked = edited_region(self.before, mask, asked.mask_mode)
        return effective_alpha(marked, asked.grow_mask, 0) > 0

    @property
    def alpha(self) -> Alpha:
        """The effective alpha."""
        return effective_alpha(self.region, 0, self.exhibit.parameters.mask_blur)


@dataclass(frozen=True)
class AdapterEdit:
    """An edit, and the same one with an adapter."""

    adapter: AdapterCard
    without: DemoEdit
    under: DemoEdit


class ServiceReport(BaseModel):
    """One service of the fleet that made the edit."""

    instances: int
    version: str


class EditReport(BaseModel):
    """One edit of the demo."""

    name: str
    job_id: str
    prompt: str
    mask_prompt: str | None = None
    """Words that named what was repainted; None where a mask did."""
    seed: int
    steps: int
    width: int
    height: int
    mask_ratio: float
    """Share of the image tokens that the mask touches."""
    mask_overlap: float | None = None
    """Intersection over union of the mask that the words found with what they name."""
    latency_s: float
    stage_ms: StageTimes
    outside_mask_max_abs_diff: float
    """Output against input outside of the mask, and of what it was to grow by."""
    inside_mask_mean_abs_diff: float
    """Output against input inside."""
    oracle: str | None
    """The diffusers pipeline compared with; None where the comparison was switched off."""
    oracle_max_abs_diff: float | None


class AdapterReport(BaseModel):
    """One edit of the demo, without an adapter and with it."""

    name: str
    kind: AdapterKind
    does: str
    """What the adapter's card says."""
    loras: tuple[LoraShare, ...]
    """What the edit with it asked for."""
    controlnets: tuple[ControlShare, ...]
    """What the edit with it asked for."""
    loras_from: int | None
    """The step from which the LoRA acted, counted from 0; None of a ControlNet."""
    without: EditReport
    under: EditReport
    effect_mean_abs_diff: float
    """Inside of the mask: the output with the adapter against the one without."""


class DemoReport(BaseModel):
    """``out/demo/report.json``."""

    model: str
    edits: tuple[EditReport, ...]
    adapters: tuple[AdapterReport, ...] = ()
    """Empty where another model is served than the one that ships."""
    diff_unit: str = "1.0 is the full range of a channel, one 8-bit step is 1/255"
    services: dict[str, ServiceReport]
    versions: dict[str, str]
    machine: dict[str, str | int]


def edit_report(edit: DemoEdit, expected: Pixels | None, oracle: str | None) -> EditReport:
    """Everything measured of one edit; `expected` is the picture by the pipeline that is called `oracle`."""
    asked, figures = edit.exhibit.parameters, edit.figures
    before, after, region = edit.before, edit.after, edit.region
    return EditReport(
        name=edit.exhibit.name,
        job_id=edit.job_id,
        prompt=asked.prompt,
        mask_prompt=asked.mask_prompt,
        seed=asked.seed or 0,
        steps=figures.steps,
        width=after.shape[1],
        height=after.shape[0],
        mask_ratio=figures.mask_ratio or 0.0,
        mask_overlap=edit.mask_overlap,
        latency_s=round(edit.latency_s, 3),
        stage_ms=StageTimes(**{stage: round(ms, 1) for stage, ms in figures.stage_ms}),
        outside_mask_max_abs_diff=max_abs_diff(before, after, ~region),
        inside_mask_mean_abs_diff=mean_abs_diff(before, after, region),
        oracle=oracle,
        oracle_max_abs_diff=None if expected is None else max_abs_diff(after, expected),
    )


def adapter_report(edit: AdapterEdit) -> AdapterReport:
    """Everything measured of one adapter."""
    adapter, figures = edit.adapter, edit.under.figures
    return AdapterReport(
        name=adapter.name,
        kind=adapter.kind,
        does=adapter.does,
        loras=tuple(figures.loras),
        controlnets=tuple(figures.controlnets),
        loras_from=figures.pictures[0].loras_from,
        without=edit_report(edit.without, None, None),
        under=edit_report(edit.under, None, None),
        effect_mean_abs_diff=mean_abs_diff(edit.without.after, edit.under.after, edit.under.region),
    )


def services_of(fleet: Sequence[InstanceView]) -> dict[str, ServiceReport]:
    """Ready instances per service, and their versions."""
    versions: dict[str, list[str]] = {}
    for instance in sorted(fleet, key=attrgetter("service", "version")):
        if instance.ready:
            versions.setdefault(instance.service, []).append(instance.version)
    return {
        service: ServiceReport(instances=len(found), version=", ".join(dict.fromkeys(found)))
        for service, found in versions.items()
    }


def max_abs_diff(one: Pixels, other: Pixels, where: npt.NDArray[np.bool_] | None = None) -> float:
    """Largest difference in 0..1, over the pixels of `where` (height, width); 0 where there are none."""
    gaps = _gaps(one, other)
    return float(np.max(gaps if where is None else gaps[where], initial=0.0))


def mean_abs_diff(one: Pixels, other: Pixels, where: npt.NDArray[np.bool_]) -> float:
    """Mean difference in 0..1 over the pixels of `where`, which must mark one at least."""
    return float(_gaps(one, other)[where].mean())


def failings(report: DemoReport) -> list[str]:
    """Return what is wrong with the edits, a sentence each; empty when all are as they should be."""
    found = []
    pairs = [edit for adapter in report.adapters for edit in (adapter.without, adapter.under)]
    for edit in (*report.edits, *pairs):
        outside, oracle = edit.outside_mask_max_abs_diff, edit.oracle_max_abs_diff
        if outside != 0:
            found.append(
                f"{edit.name}: Pixels outside the mask changed by up to {_steps(outside)}; none may."
            )
        if edit.inside_mask_mean_abs_diff == 0:
            found.append(f"{edit.name}: Nothing changed inside the mask.")
        if edit.mask_overlap is not None and edit.mask_overlap < LEAST_OVERLAP:
            found.append(
                f'{edit.name}: "{edit.mask_prompt}" found something else: its mask overlaps with what is meant by '
                f"{edit.mask_overlap:.2f}; at least {LEAST_OVERLAP} is accepted."
            )
        if oracle is not None and oracle > ORACLE_LIMIT:
            found.append(
                f"{edit.name}: The picture differs from {edit.oracle} by up to {_steps(oracle)}; "
                f"at most {_steps(ORACLE_LIMIT)} is accepted."
            )
    idle = [adapter for adapter in report.adapters if adapter.effect_mean_abs_diff == 0]
    return found + [f"{each.name}: The {WORDS[each.kind]} changed nothing inside the mask." for each in idle]


def _steps(difference: float) -> str:
    return f"{round(difference * 255)}/255"


def _gaps(one: Pixels, other: Pixels) -> npt.NDArray[np.float64]:
    """Differences per pixel and channel in 0..1; in float64, so that k/255 stays below a limit of k/255."""
    if one.shape != other.shape:
        raise ValueError(f"two pictures of one shape are needed, received {one.shape} and {other.shape}")
    gaps: npt.NDArray[np.float64] = np.abs(one.astype(np.int16) - other.astype(np.int16)) / 255
    return gaps


MARGIN: Final = 16
CAPTION_HEIGHT: Final = 40
PAPER: Final = (250, 249, 246)
INK: Final = (40, 40, 40)
TINT: Final = (230, 30, 90)
TINT_SHARE: Final = 0.55


def overlay(image: Image.Image, alpha: npt.NDArray[np.float32]) -> Image.Image:
    """`image` tinted by `alpha` (height, width) in 0..1; a lighter line runs where the feather ends."""
    pixels = np.asarray(image.convert("RGB")).astype(np.float32)
    share = TINT_SHARE * alpha[..., None]
    tinted = pixels * (1 - share) + np.array(TINT, np.float32) * share
    edited = alpha > 0
    tinted[edited & ~binary_erosion(edited)] = 255
    return Image.fromarray(tinted.round().astype(np.uint8))


def stacked(rows: Sequence[Image.Image]) -> Image.Image:
    """Pictures below each other, each in the middle."""
    sheet = Image.new("RGB", (max(row.width for row in rows), sum(row.height for row in rows)), PAPER)
    top = 0
    for row in rows:
        sheet.paste(row, ((sheet.width - row.width) // 2, top))
        top += row.height
    return sheet


def side_by_side(panels: Sequence[tuple[Image.Image, str]]) -> Image.Image:
    """Pictures of one size in a row, each with its caption below."""
    width, height = panels[0][0].size
    sheet = Image.new(
        "RGB", (MARGIN + len(panels) * (width + MARGIN), 2 * MARGIN + height + CAPTION_HEIGHT), PAPER
    )
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(size=18)
    for index, (picture, caption) in enumerate(panels):
        left = MARGIN + index * (width + MARGIN)
        sheet.paste(picture.convert("RGB"), (left, MARGIN))
        middle = (left + width / 2, MARGIN + height + (MARGIN + CAPTION_HEIGHT) / 2)
        draw.text(middle, caption, INK, font, anchor="mm")
    return sheet


EDIT_HEIGHT: Final = 360
"""Height of a picture in the comparison, in pixels."""
ADAPTER_HEIGHT: Final = 256
"""The same where adapters are compared."""


def write_pictures(edits: Sequence[DemoEdit], adapters: Sequence[AdapterEdit], out: Path) -> None:
    """Write a folder for each into `out`, and a sheet of all edits and one of all adapters, where there are any."""
    for done in edits:
        _write_edit(done, out / done.exhibit.name)
    stacked([_row(done) for done in edits]).save(out / "comparison.png")
    for adapted in adapters:
        folder = out / adapted.adapter.name
        _write_edit(adapted.under, folder)
        (folder / "without.png").write_bytes(adapted.without.picture)
    if adapters:
        stacked(list(map(_adapter_row, adapters))).save(out / "adapters.png")


def _write_edit(done: DemoEdit, folder: Path) -> None:
    folder.mkdir()
    done.exhibit.picture.save(folder / "input.png")
    done.exhibit.mask.save(folder / "mask.png")
    if done.exhibit.control is not None:
        done.exhibit.control.save(folder / "control.png")
    (folder / "output.png").write_bytes(done.picture)


def _row(done: DemoEdit) -> Image.Image:
    exhibit = done.exhibit
    output = f"output: {done.figures.steps} steps, {done.latency_s:.2f} s"
    panels = ((exhibit.picture, "input"), _asked(done), (Image.fromarray(done.after), output))
    return side_by_side([(_scaled(picture, EDIT_HEIGHT), caption) for picture, caption in panels])


def _adapter_row(adapted: AdapterEdit) -> Image.Image:
    control = adapted.under.exhibit.control
    panels = (
        _asked(adapted.without),
        *(() if control is None else ((control, "control image"),)),
        (Image.fromarray(adapted.without.after), "without"),
        (
            Image.fromarray(adapted.under.after),
            f"with the {WORDS[adapted.adapter.kind]} {adapted.adapter.name}",
        ),
    )
    return side_by_side([(_scaled(picture, ADAPTER_HEIGHT), caption) for picture, caption in panels])


def _asked(done: DemoEdit) -> tuple[Image.Image, str]:
    asked = done.exhibit.parameters
    words = "" if asked.mask_prompt is None else f'"{asked.mask_prompt}": '
    return overlay(done.exhibit.picture, done.alpha), f'{words}"{asked.prompt}"'


def _scaled(picture: Image.Image, height: int) -> Image.Image:
    width = round(picture.width * height / picture.height)
    return picture.resize((width, height), Image.Resampling.LANCZOS)
