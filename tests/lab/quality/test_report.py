"""What the report counts, when its gates hold, and what the page and the tables show of it."""

from __future__ import annotations

import io
import json
import re

import click
import numpy as np
import pytest
from rich.console import Console

from giornata.wire.requests import EditParameters
from giornata_lab.cli.system import quality
from giornata_lab.model.scenes import SceneTask
from giornata_lab.quality import page as tables
from giornata_lab.quality import report
from giornata_lab.quality.cases import QualityCase, draw, slots, spread
from giornata_lab.quality.checker import DetectedShape
from giornata_lab.quality.evaluation import assess
from giornata_lab.quality.metrics import (
    PSNR_CEILING_DB,
    Scored,
    ScoredAddition,
    ScoredRemoval,
    score,
    strayed_px,
)
from giornata_lab.quality.page import outlined, page, panels
from giornata_lab.quality.report import MaskBlur, QualityGate, QualityReport, QualityRun

RUN = QualityRun(
    model="fresco",
    model_digest="0123456789abcdef",
    family="flux-fill",
    steps=8,
    guidance_scale=4.0,
    mask_blur=MaskBlur(),
    cases=8,
    of_cases=612,
    cases_digest="x",
    seeds="s",
    in_flight=2,
    edits_s=1.0,
    edit_ms_p50=10.0,
    edit_ms_p95=20.0,
    machine={},
    versions={},
)


@pytest.fixture(scope="module")
def additions() -> list[QualityCase]:
    return [draw(slot) for slot in spread([s for s in slots() if s.task is SceneTask.ADD], 8)]


@pytest.fixture(scope="module")
def removals() -> list[QualityCase]:
    kinds = {s.ground: s for s in slots() if s.task is SceneTask.REMOVE and s.side == 128}
    return [draw(slot) for slot in kinds.values()]


def perfect(cases: list[QualityCase]) -> list[Scored]:
    return [score(case, case.scene.after) for case in cases]


def untouched(cases: list[QualityCase]) -> list[Scored]:
    return [score(case, case.scene.before) for case in cases]


def test_the_truth_passes_every_gate(additions: list[QualityCase], removals: list[QualityCase]) -> None:
    found = assess(RUN, perfect([*additions, *removals]), None)
    assert found.holds
    assert [gate.measured for gate in found.gates] == [1.0, PSNR_CEILING_DB, 1.0, 0.0]


def test_pictures_that_nobody_edited_do_not_pass(
    additions: list[QualityCase], removals: list[QualityCase]
) -> None:
    found = assess(RUN, untouched([*additions, *removals]), None)
    adherence, completion, _, strayed = found.gates
    assert (adherence.holds, completion.holds, strayed.holds) == (False, False, True)
    assert adherence.measured == 0
    assert not found.holds


def test_rates_are_counted_overall_and_by_group(additions: list[QualityCase]) -> None:
    scored = perfect(additions[:6]) + untouched(additions[6:])
    rates = report.adherence([s for s in scored if isinstance(s, ScoredAddition)])
    assert rates is not None
    assert (rates.overall.n, rates.overall.both, rates.overall.colour) == (8, 0.75, 0.75)
    for groups in (rates.by_side, rates.by_shape, rates.by_colour, rates.by_ground):
        assert sum(r.n for r in groups.values()) == 8
        assert sum(r.n * r.both for r in groups.values()) == pytest.approx(6)


def test_colour_and_shape_count_apart(additions: list[QualityCase]) -> None:
    case = additions[0]
    right = score(case, case.scene.after)
    assert isinstance(right, ScoredAddition)
    wrong_shape = ScoredAddition(case, right.edit, seen(case.slot.colour, None))
    rate = report.adherence([right, wrong_shape])
    assert rate is not None
    assert (rate.overall.both, rate.overall.colour, rate.overall.shape) == (0.5, 1.0, 0.5)


def seen(colour: str | None, shape: str | None) -> DetectedShape:
    return DetectedShape(colour, shape, 100, 0.9)


def test_patches_are_averaged_and_a_flat_ground_has_no_ratio(removals: list[QualityCase]) -> None:
    scored = [s for s in perfect(removals) if isinstance(s, ScoredRemoval)]
    found = report.completion(scored)
    assert found is not None
    assert found.overall.n == len(removals)
    assert found.by_ground["flat"].seam_ratio is None
    assert found.by_ground["noise"].seam_ratio == 1
    assert found.overall.seam_truth == found.overall.seam_edit > 0
    assert set(found.by_side) == {"128"}


@pytest.mark.parametrize(
    ("gate", "holds"),
    [
        (QualityGate(name="g", measured=0.9, at_least=0.9), True),
        (QualityGate(name="g", measured=0.899, at_least=0.9), False),
        (QualityGate(name="g", measured=1.2, at_least=0.8, at_most=1.2), True),
        (QualityGate(name="g", measured=1.21, at_least=0.8, at_most=1.2), False),
        (QualityGate(name="g", measured=0.79, at_least=0.8, at_most=1.2), False),
        (QualityGate(name="g", measured=None, at_least=0.8), False),
        (QualityGate(name="g", measured=float("nan"), at_most=1), False),
        (QualityGate(name="g", measured=0, at_most=0), True),
    ],
)
def test_a_gate_holds_within_its_bounds_and_never_unmeasured(gate: QualityGate, holds: bool) -> None:
    assert gate.holds is holds


def test_without_removals_their_gates_do_not_hold(additions: list[QualityCase]) -> None:
    found = assess(RUN, perfect(additions), None)
    assert [gate.holds for gate in found.gates] == [True, False, False, True]
    assert "not measured" in page(found, perfect(additions))


def test_a_pixel_changed_outside_of_a_mask_is_counted_and_fails(
    additions: list[QualityCase], removals: list[QualityCase]
) -> None:
    case = additions[0]
    edit = case.scene.after.copy()
    y, x = np.argwhere(~case.scene.mask)[0]
    edit[y, x] ^= 1
    assert strayed_px(case, edit, 0.0) == 1
    assert strayed_px(case, case.scene.after, 0.0) == 0
    found = assess(RUN, [*perfect([*additions, *removals]), score(case, edit)], None)
    assert [gate.holds for gate in found.gates] == [True, True, True, False]


def test_a_feather_may_change_its_own_pixels(additions: list[QualityCase]) -> None:
    case = additions[0]
    mask = case.scene.mask
    beside = np.argwhere(~mask & (np.roll(mask, 1, 0) | np.roll(mask, 1, 1)))[0]
    edit = case.scene.after.copy()
    edit[tuple(beside)] ^= 1
    assert strayed_px(case, edit, 0.0) == 1
    assert strayed_px(case, edit, 4.0) == 0


def test_numbers_survive_their_file(additions: list[QualityCase], removals: list[QualityCase]) -> None:
    found = assess(RUN, perfect([*additions, *removals]), None)
    text = found.model_dump_json()
    assert QualityReport.model_validate_json(text) == found
    assert [gate["holds"] for gate in json.loads(text)["gates"]] == [True] * 4


def test_frechet_distances_grow_with_the_difference(additions: list[QualityCase]) -> None:
    same, other = (assess(RUN, scored, None).frechet for scored in (perfect(additions), untouched(additions)))
    assert same is not None
    assert other is not None
    assert same.edit_to_truth == pytest.approx(0, abs=1e-2)
    assert other.edit_to_truth == pytest.approx(other.unedited_to_truth)
    assert other.edit_to_truth > 10


def test_equal_pictures_are_as_close_as_can_be_and_others_are_not(additions: list[QualityCase]) -> None:
    scored = perfect(additions)
    same = report.closeness([(s, s.edit) for s in scored], "out/full", RUN, 0.0)
    assert (same.n, same.identical, same.psnr_db, same.psnr_in_mask_db) == (
        8,
        8,
        PSNR_CEILING_DB,
        PSNR_CEILING_DB,
    )
    assert same.ssim == pytest.approx(1)
    assert same.ssim_in_mask == pytest.approx(1)
    other = report.closeness([(s, s.case.scene.before) for s in scored], "out/full", RUN, None)
    assert other.identical == 0
    assert other.ssim_in_mask < other.ssim < 1
    assert other.psnr_in_mask_db < other.psnr_db < PSNR_CEILING_DB


def test_the_page_shows_every_edit_failures_first_and_asks_nothing_of_the_network(
    additions: list[QualityCase], removals: list[QualityCase]
) -> None:
    scored = [*perfect(additions[:6]), *untouched(additions[6:]), *perfect(removals)]
    document = page(assess(RUN, scored, None), scored)
    assert document.count("<figure>") == len(scored)
    titles = re.findall(r"<h2>(.*?)</h2>", document)
    assert titles == [
        "Additions that are wrong (2)",
        f"Removals of 24 dB and above ({len(removals)})",
        "Additions that are right (6)",
    ]
    sources = re.findall(r'(?:src|href)="(.*?)"', document)
    assert len(sources) == 3 * len(scored)
    assert all(source.startswith("data:image/webp;base64,") for source in sources)
    assert "http" not in re.sub(r'src="[^"]*"', "", document)
    assert "nothing was painted" in document
    for case in additions:
        assert case.slot.name in document


def test_an_edit_is_shown_beside_what_was_before_and_the_truth(additions: list[QualityCase]) -> None:
    case = additions[0]
    shown = panels(score(case, case.scene.before))
    assert list(shown) == ["before", "edit", "truth"]
    assert np.array_equal(shown["before"], outlined(case.scene.before, case.scene.mask))
    assert np.array_equal(shown["edit"], case.scene.before)
    assert np.array_equal(shown["truth"], case.scene.after)


def test_the_outline_is_seen_on_white_and_on_black() -> None:
    mask = np.zeros((32, 32), bool)
    mask[8:20, 8:20] = True
    for level in (0, 255):
        flat = np.full((32, 32, 3), level, np.uint8)
        drawn = outlined(flat, mask)
        assert (drawn != flat).any()
        assert np.array_equal(drawn[10:18, 10:18], flat[10:18, 10:18])
        assert np.array_equal(drawn[:6], flat[:6])


def test_the_terminal_shows_every_table_and_verdict(
    additions: list[QualityCase], removals: list[QualityCase]
) -> None:
    scored = [*perfect([*additions, *removals])]
    closeness = report.closeness([(s, s.edit) for s in scored], "out/full", RUN, 0.0)
    found = assess(RUN, scored, closeness)
    console = Console(file=io.StringIO(), width=140)
    for table in tables.rich_tables(found):
        console.print(table)
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    for words in (
        "(a) Prompt adherence",
        "by shape",
        "by colour",
        "Background completion",
        "out/full",
        "0.8 to 1.2",
    ):
        assert words in shown
    assert shown.count("holds") == 4
    assert tables.described(found).startswith("fresco (0123456789ab): 8 of 612 edits, 8 steps, guidance 4")


def test_flags_are_refused_where_they_make_no_sense() -> None:
    for flags in (["--limit", "0"], ["--steps", "-1"], ["--in-flight", "x"]):
        with pytest.raises(click.UsageError):
            quality.make_context("quality", flags)


def test_things_are_added_with_a_hard_edge_and_removed_as_users_get_it() -> None:
    assert (MaskBlur().of(SceneTask.ADD), MaskBlur().of(SceneTask.REMOVE)) == (
        0,
        EditParameters(prompt="x").mask_blur,
    )
    asked = MaskBlur(add=2, remove=1)
    assert (asked.of(SceneTask.ADD), asked.of(SceneTask.REMOVE)) == (2, 1)
