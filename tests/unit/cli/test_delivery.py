"""What an edit leaves behind where a file cannot be written: every other file, a sentence and a stable code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from giornata_tools.cli.edit.delivery import EditDelivery
from giornata_tools.doors.edits import EditOutcome, PaintedPicture, PictureFailure, Preview

FULL = "/dev/full"
"""A device on which every write fails for want of space."""
PICTURES = tuple(PaintedPicture(index, 7 + index, b"picture %d" % index) for index in range(3))


def preview_of(index: int, data: bytes) -> Preview:
    return Preview(index, 0, 1, (0, 0, 8, 8), ".webp", data)


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, ...]:
    """The middle one cannot be written."""
    return (str(tmp_path / "e-0.png"), FULL, str(tmp_path / "e-2.png"))


def test_a_picture_that_cannot_be_written_costs_no_other(
    files: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    status = EditDelivery(files).finished(EditOutcome("job_1", "8x8", PICTURES), 1.0)
    assert status == 1
    assert [Path(files[index]).read_bytes() for index in (0, 2)] == [b"picture 0", b"picture 2"]
    *written, error, kept = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in written] == [files[0], files[2]]
    assert error == "Error: /dev/full cannot be written: No space left on device. [output_not_written]"
    assert "/v1/jobs/job_1/image" in kept


def test_the_report_as_json_tells_which_file_is_missing_and_why(
    files: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    poisoned = PictureFailure("Not finite.", "row_poisoned", 3)
    assert (
        EditDelivery(files, as_json=True).finished(EditOutcome("job_1", "8x8", PICTURES, (poisoned,)), 1.0)
        == 1
    )
    report = json.loads(capsys.readouterr().out)
    assert report["job_id"] == "job_1"
    assert [picture["file"] for picture in report["pictures"]] == [files[0], files[2]]
    assert [(e["code"], e["index"]) for e in report["errors"]] == [
        ("row_poisoned", 3),
        ("output_not_written", 1),
    ]


def test_a_preview_that_cannot_be_written_costs_no_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "e-preview-0.webp").mkdir()
    report = EditDelivery((str(tmp_path / "e.png"),), as_json=True)
    report.preview(preview_of(0, b"preview"))
    assert report.finished(EditOutcome("job_1", "8x8", PICTURES[:1]), 1.0) == 1
    assert (tmp_path / "e.png").read_bytes() == b"picture 0"
    captured = capsys.readouterr()
    told = json.loads(captured.out)
    assert (told["previews"], len(told["pictures"]), told["errors"][0]["code"]) == (
        [],
        1,
        "output_not_written",
    )
    assert "/v1/jobs" not in captured.err  # every picture is here


def test_a_preview_that_another_attempt_writes_is_not_missing(tmp_path: Path) -> None:
    blocked = tmp_path / "e-preview-0.webp"
    blocked.mkdir()
    report = EditDelivery((str(tmp_path / "e.png"),), quiet=True)
    report.preview(preview_of(0, b"first"))
    blocked.rmdir()
    report.preview(preview_of(0, b"second"))
    assert report.finished(EditOutcome("job_1", "8x8", PICTURES[:1]), 1.0) == 0
    assert blocked.read_bytes() == b"second"
    assert report.previews.keys() == {str(blocked)}


def test_a_preview_whose_successor_cannot_be_written_is_missing(tmp_path: Path) -> None:
    file = tmp_path / "e-preview-0.webp"
    report = EditDelivery((str(tmp_path / "e.png"),), quiet=True)
    report.preview(preview_of(0, b"first"))
    file.unlink()
    file.mkdir()
    report.preview(preview_of(0, b"second"))
    assert report.finished(EditOutcome("job_1", "8x8", PICTURES[:1]), 1.0) == 1
    assert not report.previews
