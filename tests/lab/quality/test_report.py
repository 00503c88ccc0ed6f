"""What the report counts, when its gates hold, and what the page and the tables show of it."""

from __future__ import annotations

import json

import numpy as np
import pytest

from giornata.wire.requests import EditParameters
from giornata_lab.model.scenes import SceneTask
from giornata_lab.quality import report
from giornata_lab.quality.cases import QualityCase, draw, slots, spread
from giornata_lab.quality.evaluation import assess
from giornata_lab.quality.metrics import (
    PSNR_CEILING_DB,
    DetectedShape,
    Scored,
    ScoredAddition,
    ScoredRemoval,
    score,
    strayed_px,
)
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


def test_equal_pictures_are_as_close_as_can_be_and_others_are_not(additions: list[QualityCase]) -> None:
    scored = perfect(additions)
    same = report.closeness([(s, s.edit) for s in scored], "out/full", RUN)
    assert (same.n, same.identical, same.psnr_db, same.psnr_in_mask_db) == (
        8,
        8,
        PSNR_CEILING_DB,
        PSNR_CEILING_DB,
    )
    assert same.ssim == pytest.approx(1)
    assert same.ssim_in_mask == pytest.approx(1)
    other = report.closeness([(s, s.case.scene.before) for s in scored], "out/full", RUN)
    assert other.identical == 0
    assert other.ssim_in_mask < other.ssim < 1
    assert other.psnr_in_mask_db < other.psnr_db < PSNR_CEILING_DB


def test_of_pictures_unequally_close_the_spread_is_told(additions: list[QualityCase]) -> None:
    scored = perfect(additions)
    first, *others = scored
    found = report.closeness(
        [(first, first.case.scene.before), *((s, s.edit) for s in others)], "out/full", RUN
    )
    assert found.ssim_in_mask_median == pytest.approx(1)
    assert found.ssim_in_mask_least < found.ssim_in_mask_p5 < found.ssim_in_mask < 1


def test_things_are_added_with_a_hard_edge_and_removed_as_users_get_it() -> None:
    assert (MaskBlur().of(SceneTask.ADD), MaskBlur().of(SceneTask.REMOVE)) == (
        0,
        EditParameters(prompt="x").mask_blur,
    )
    asked = MaskBlur(add=2, remove=1)
    assert (asked.of(SceneTask.ADD), asked.of(SceneTask.REMOVE)) == (2, 1)
