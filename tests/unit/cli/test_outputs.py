"""Where pictures go, by what was typed after ``-o``."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Final

import pytest
from rich.console import Console, Group
from rich.text import Text

from giornata.wire.errors import ErrorBody
from giornata.wire.requests import OutputFormat
from giornata_tools.cli.edit import EditDelivery, format_of, picture_files, preview_file
from giornata_tools.clients import http
from giornata_tools.clients.edits import EditOutcome, PaintedPicture, PictureFailure, Preview, sentence
from giornata_tools.terminal import show, table


@pytest.mark.parametrize(
    ("out", "chosen", "expected"),
    [
        ("a.png", None, OutputFormat.PNG),
        ("a.JPG", None, OutputFormat.JPEG),
        ("some.folder/a.jpeg", None, OutputFormat.JPEG),
        ("a.webp", None, OutputFormat.WEBP),
        ("a.png", OutputFormat.WEBP, OutputFormat.WEBP),
        ("a.tiff", OutputFormat.PNG, OutputFormat.PNG),
        ("-", None, OutputFormat.PNG),
        ("-", OutputFormat.JPEG, OutputFormat.JPEG),
    ],
)
def test_the_format_follows_the_suffix_unless_chosen(
    out: str, chosen: OutputFormat | None, expected: OutputFormat
) -> None:
    assert format_of(out, chosen) is expected


@pytest.mark.parametrize("out", ["a.gif", "a", "a.", ".png", "folder.png/a"])
def test_a_suffix_that_says_nothing_is_refused_by_name(out: str) -> None:
    with pytest.raises(ValueError, match=r"\.png, \.jpg, \.jpeg, \.webp"):
        format_of(out, None)


def test_several_pictures_are_numbered() -> None:
    assert picture_files("to/a.b.png", 1) == ["to/a.b.png"]
    assert picture_files("to/a.b.png", 3) == ["to/a.b-0.png", "to/a.b-1.png", "to/a.b-2.png"]
    assert picture_files("-", 1) == ["-"]
    with pytest.raises(ValueError, match="one picture, not 2"):
        picture_files("-", 2)


FULL = "/dev/full"
"""A device on which every write fails for want of space."""
PICTURES = tuple(
    PaintedPicture(index=index, seed=7 + index, data=b"picture %d" % index) for index in range(3)
)


def preview_of(index: int, data: bytes) -> Preview:
    return Preview(index=index, partial_image_index=0, step=1, box=(0, 0, 8, 8), format="webp", image=data)


def test_a_preview_lies_beside_its_picture() -> None:
    assert preview_file("to/a-1.png", preview_of(0, b"")) == "to/a-1-preview-0.webp"


@pytest.fixture
def written(tmp_path: Path) -> tuple[str, ...]:
    """The middle one cannot be written."""
    return (str(tmp_path / "e-0.png"), FULL, str(tmp_path / "e-2.png"))


def test_a_picture_that_cannot_be_written_costs_no_other(
    written: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    status = EditDelivery(written).finished(EditOutcome("job_1", "8x8", PICTURES), 1.0)
    assert status == 1
    assert [Path(written[index]).read_bytes() for index in (0, 2)] == [b"picture 0", b"picture 2"]
    *lines, error, kept = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in lines] == [written[0], written[2]]
    assert error == "Error: /dev/full cannot be written: No space left on device. [output_not_written]"
    assert "/v1/jobs/job_1/image" in kept


def test_the_report_as_json_tells_which_file_is_missing_and_why(
    written: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    poisoned = PictureFailure("Not finite.", "row_poisoned", 3)
    assert (
        EditDelivery(written, as_json=True).finished(EditOutcome("job_1", "8x8", PICTURES, (poisoned,)), 1.0)
        == 1
    )
    report = json.loads(capsys.readouterr().out)
    assert report["job_id"] == "job_1"
    assert [picture["file"] for picture in report["pictures"]] == [written[0], written[2]]
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


ID = "lora_" + "0" * 32


def shown(width: int, *, terminal: bool) -> str:
    lines = table("id", "MB", "error", numbers={"MB"}, prose={"error"})
    lines.add_row(ID, "1.5", "a long sentence " * 10 + "[end]")
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=terminal, color_system=None, markup=False)
    show(Group(lines, Text()), Text("The end."), console=console)
    return out.getvalue()


@pytest.mark.parametrize("width", [1, 20, 40, 60, 80, 200])
@pytest.mark.parametrize("terminal", [True, False])
def test_an_id_is_whole_at_every_width(width: int, terminal: bool) -> None:
    text = shown(width, terminal=terminal)
    assert ID in text
    assert "[end]" in text, "the gateway's words are no markup"


def test_where_no_terminal_reads_a_row_is_a_line() -> None:
    lines = shown(20, terminal=False).splitlines()
    assert lines[0].split() == ["id", "MB", "error"]
    assert lines[1].startswith(ID)
    assert lines[1].rstrip().endswith("[end]")


EVIL: Final = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202ehat"


def test_an_error_is_told_without_escapes() -> None:
    told = sentence(ErrorBody(code="invalid_field", message=EVIL, received=EVIL, accepted=EVIL))
    assert told.isprintable()
    assert told.count("owned") == 3


@pytest.mark.parametrize("nested", [EVIL, [EVIL], {"name": [{"inner": EVIL}]}])
def test_answers_of_a_gateway_hold_no_escapes(nested: object) -> None:
    told = http._object(json.dumps({"value": nested, "n": 1, "lines": "a\nb", "none": None}))
    assert str(told["value"]).isprintable()
    assert (told["n"], told["lines"], told["none"]) == (1, "a\nb", None)
