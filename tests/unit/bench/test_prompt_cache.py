"""The table that follows from measured edits, and the file it is written to."""

from __future__ import annotations

from pathlib import Path

from giornata.approximate.steps import SHARES
from giornata.approximate.table import Tables
from tests.bench.prompt_cache import PAIRS, Sample, fitted, report, write


def samples(cosine: float, fails_from: float, count: int = PAIRS) -> list[Sample]:
    """Pairs so alike whose pictures are right up to a share of the steps."""
    return [
        Sample("kind", share, cosine, right=share < fails_from, scratch=True, ssim=0.9)
        for share in SHARES
        for _ in range(count)
    ]


def test_each_share_has_the_lowest_cosine_at_which_no_adherence_is_lost() -> None:
    table = fitted([*samples(0.96, 1.0), *samples(0.85, 0.35), *samples(0.605, 0.1)])
    assert [(each.cosine, each.share) for each in table.thresholds] == [(0.96, 0.5), (0.85, 0.3)]


def test_what_saves_more_at_no_higher_cosine_makes_the_others_needless() -> None:
    assert [(e.cosine, e.share) for e in fitted(samples(0.8, 1.0)).thresholds] == [(0.8, 0.5)]


def test_few_pairs_and_pairs_that_lose_tell_no_threshold() -> None:
    assert fitted(samples(0.9, 1.0, count=PAIRS - 1)).thresholds == ()
    assert fitted(samples(0.9, 0.0)).thresholds == ()


def test_the_report_tells_kinds_and_thresholds() -> None:
    found = [*samples(0.96, 1.0), *samples(0.85, 0.35)]
    lines = list(report(found, fitted(found)))
    assert any(line.startswith("| kind | 0.90 (0.85-0.96) |") for line in lines)
    assert "| 0.96 | 50% | 8 | 100.0% | 100.0% | 0.900 |" in lines


def test_a_table_is_written_beside_the_others(tmp_path: Path) -> None:
    file = tmp_path / "tables.json"
    file.write_text('{"other": {"thresholds": []}}')
    write(fitted(samples(0.8, 1.0)), "dd", "told", file)
    tables = Tables.model_validate_json(file.read_text())
    assert set(tables.root) == {"other", "dd"}
    assert tables.root["dd"].told == "told"
