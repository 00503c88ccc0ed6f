"""The whole evaluation: draw the cases, send them through the system, score, compare, write and tell."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from PIL import Image
from pydantic import BaseModel, ValidationError
from rich.console import Console

from giornata.wire.requests import Reuse
from giornata_lab import provenance
from giornata_lab.quality import cases, report
from giornata_lab.quality.cases import QualityCase, digest
from giornata_lab.quality.metrics import Pixels, Scored, ScoredAddition, ScoredRemoval, score, strayed_px
from giornata_lab.quality.report import MaskBlur, QualityReport, QualityRun, RunComparison
from giornata_lab.quality.system import EditSetting, SystemUnderTest, attached, edit_all, started
from giornata_tools import terminal
from giornata_tools.launcher.process import LaunchError
from giornata_tools.terminal import show

MANIFEST: Final = "run.json"


class QualityManifest(BaseModel):
    """``run.json`` in a folder of pictures."""

    run: QualityRun
    edits: dict[str, str]
    """Name of each edit, and of its file without the ending, → digest of its case."""


class EarlierQualityRun(BaseModel):
    """What an earlier run left."""

    folder: Path
    manifest: QualityManifest

    def check(self, cases: Sequence[QualityCase]) -> None:
        """Return whether these can be compared with it, before hours go into making them.

        Raises:
            LaunchError: a scene was another one, a file cannot be read, or there is none of them.
        """
        if all([self.picture(case) is None for case in cases]):  # noqa: C419 - every one is looked at
            raise LaunchError(f"{self.folder} holds none of this run's {len(cases)} edits.")

    def picture(self, case: QualityCase) -> Pixels | None:
        """(height, width, 3) the earlier edit of `case`, or None where that run did not make it.

        Raises:
            LaunchError: the scene of that name was another one, or the file is gone.
        """
        name = case.slot.name
        if name not in self.manifest.edits:
            return None
        theirs, ours = self.manifest.edits[name], digest([case])
        if theirs != ours:
            raise LaunchError(
                f"{self.folder} was made with other scenes: {name} was {theirs}, is {ours}. Make it again."
            )
        try:
            return np.asarray(Image.open(self.folder / f"{name}.png").convert("RGB"))
        except OSError as error:
            raise LaunchError(f"{self.folder / name}.png cannot be read: {error}.") from error


def empty(folder: Path) -> None:
    """Make the folder, and remove an earlier run's pictures from it and nothing else.

    Raises:
        LaunchError: something else in it is called `MANIFEST`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / MANIFEST).exists():
        for name in earlier_run(folder).manifest.edits:
            (folder / f"{name}.png").unlink(missing_ok=True)
        (folder / MANIFEST).unlink()


def save(folder: Path, case: QualityCase, edit: Pixels) -> None:
    """Write one edit into the folder."""
    Image.fromarray(edit).save(folder / f"{case.slot.name}.png")


def conclude(folder: Path, run: QualityRun, cases: list[QualityCase]) -> None:
    """Write what made the pictures: from now on they can be compared with."""
    manifest = QualityManifest(run=run, edits={case.slot.name: digest([case]) for case in cases})
    (folder / MANIFEST).write_text(manifest.model_dump_json(indent=1) + "\n", encoding="utf-8")


def earlier_run(folder: Path) -> EarlierQualityRun:
    """The run that wrote `folder`.

    Raises:
        LaunchError: none did, or none to its end.
    """
    path = folder / MANIFEST
    try:
        manifest = QualityManifest.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise LaunchError(f"{folder} holds no finished run: {MANIFEST} is missing.") from None
    except ValidationError as error:
        raise LaunchError(f"{path} is not what a run writes: {error}") from error
    return EarlierQualityRun(folder=folder, manifest=manifest)


SEEDS: Final = "each edit's place in the whole set"
VERSIONS: Final = (
    "giornata",
    "torch",
    "diffusers",
    "transformers",
    "numpy",
    "scipy",
    "scikit-image",
    "pillow",
)


@dataclass(frozen=True)
class QualityOptions:
    """Flags of ``giornata quality``."""

    out: Path
    against: Path | None
    limit: int | None
    steps: int | None
    guidance: float | None
    mask_blur: float | None
    reuse: Reuse
    in_flight: int
    timeout_s: float
    torch_threads: int
    nats: str | None
    model_name: str | None
    no_gates: bool


@dataclass(frozen=True)
class TimedEdits:
    """The edits and how long they took."""

    edits: dict[str, Pixels]
    """Pictures by the case's name."""
    each_s: list[float]
    all_s: float


async def evaluate(options: QualityOptions) -> int:
    """Run, write, tell; 0 only where every gate holds or none was asked for.

    Raises:
        LaunchError: the system did not start or answer, or the earlier run cannot be compared with.
    """
    console = Console(soft_wrap=True)
    earlier = earlier_run(options.against) if options.against else None
    if options.against and options.against.resolve() == options.out.resolve():
        raise LaunchError(
            f"--against {options.against} would be overwritten by this run: name another --out."
        )
    numbers_path, failed_path = (
        options.out.with_name(options.out.name + end) for end in (".json", "-failed.png")
    )
    for path in (numbers_path, failed_path):
        path.unlink(missing_ok=True)  # nothing of an earlier run may pass for this one's
    every = cases.slots()
    drawn = await asyncio.to_thread(lambda: [cases.draw(slot) for slot in cases.spread(every, options.limit)])
    if earlier:
        earlier.check(drawn)
    empty(options.out)

    async with _system(options, console) as system:
        setting = _setting(options, system)
        made = await _edit(system, drawn, setting, options.out, console)
    run = _run(system, setting, drawn, len(every), made)
    conclude(options.out, run, drawn)

    console.print("Measuring.")
    scored = [score(case, made.edits[case.slot.name]) for case in drawn]
    closeness = _closeness(scored, earlier) if earlier else None
    result = assess(run, scored, closeness)
    numbers_path.write_text(result.model_dump_json(indent=2) + "\n", encoding="utf-8")
    failed = report.failures(scored)
    if failed is not None:
        Image.fromarray(failed).save(failed_path)
    for table in report.tables(result):
        show(table, "")
    console.print(report.described(result), highlight=False)
    console.print(
        f"See {numbers_path} and, of edits that fail, {failed_path}; pictures are in {options.out}.",
        highlight=False,
    )
    return 0 if result.holds or options.no_gates else 1


def _system(options: QualityOptions, console: Console) -> AbstractAsyncContextManager[SystemUnderTest]:
    if options.nats:
        return attached(options.nats, options.model_name)
    return started(options.out / "logs", options.torch_threads, console.print)


def _setting(options: QualityOptions, system: SystemUnderTest) -> EditSetting:
    card, blur = system.card, options.mask_blur
    if options.guidance is not None and not card.takes_guidance:
        raise LaunchError(f"--guidance {options.guidance:g}: the model {card.name} takes none; leave it out.")
    guidance = card.default_guidance_scale if options.guidance is None else options.guidance
    return EditSetting(
        steps=options.steps or card.default_steps,
        guidance_scale=guidance if card.takes_guidance else None,
        mask_blur=MaskBlur() if blur is None else MaskBlur(add=blur, remove=blur),
        reuse=options.reuse,
        in_flight=options.in_flight,
        timeout_s=options.timeout_s,
    )


async def _edit(
    system: SystemUnderTest, drawn: Sequence[QualityCase], setting: EditSetting, out: Path, console: Console
) -> TimedEdits:
    """All edits, each saved as soon as it is there."""
    edits: dict[str, Pixels] = {}
    each_s: list[float] = []
    started_s = time.monotonic()
    with terminal.drawn("editing", len(drawn), console) as update:

        def done(case: QualityCase, edit: Pixels, seconds: float) -> None:
            save(out, case, edit)
            edits[case.slot.name] = edit
            each_s.append(seconds)
            if update:
                update(len(each_s), len(drawn), "editing")

        await edit_all(system, drawn, setting, done)
    return TimedEdits(edits, each_s, time.monotonic() - started_s)


def _run(
    system: SystemUnderTest,
    setting: EditSetting,
    drawn: Sequence[QualityCase],
    of_cases: int,
    made: TimedEdits,
) -> QualityRun:
    p50, p95 = (float(np.quantile(made.each_s, q)) * 1000 for q in (0.5, 0.95))
    card = system.card
    return QualityRun(
        model=card.name,
        model_digest=card.digest,
        family=card.family,
        steps=setting.steps,
        guidance_scale=setting.guidance_scale,
        mask_blur=setting.mask_blur,
        reuse=setting.reuse,
        cases=len(drawn),
        of_cases=of_cases,
        cases_digest=cases.digest(drawn),
        seeds=SEEDS,
        in_flight=setting.in_flight,
        edits_s=round(made.all_s, 2),
        edit_ms_p50=round(p50, 1),
        edit_ms_p95=round(p95, 1),
        machine=provenance.machine(),
        versions=provenance.versions(VERSIONS),
    )


def assess(run: QualityRun, scored: Sequence[Scored], closeness: RunComparison | None) -> QualityReport:
    """Everything measured of the edits, as one value."""
    additions = [s for s in scored if isinstance(s, ScoredAddition)]
    adherence = report.adherence(additions)
    completion = report.completion([s for s in scored if isinstance(s, ScoredRemoval)])
    strayed = sum(strayed_px(s.case, s.edit, run.mask_blur.of(s.case.slot.task)) for s in scored)
    return QualityReport(
        run=run,
        gates=report.gates(adherence, completion, strayed),
        strayed_px=strayed,
        adherence=adherence,
        completion=completion,
        closeness=closeness,
    )


def _closeness(scored: Sequence[Scored], earlier: EarlierQualityRun) -> RunComparison:
    found = [(one, earlier.picture(one.case)) for one in scored]
    pairs = [(one, theirs) for one, theirs in found if theirs is not None]
    return report.closeness(pairs, str(earlier.folder), earlier.manifest.run)
