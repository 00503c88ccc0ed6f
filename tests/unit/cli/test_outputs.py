"""Where pictures go, by what was typed after ``-o``."""

from __future__ import annotations

import pytest

from giornata.wire.requests import OutputFormat
from giornata_tools.cli.edit.delivery import files, format_of, preview_file


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
    assert files("to/a.b.png", 1) == ["to/a.b.png"]
    assert files("to/a.b.png", 3) == ["to/a.b-0.png", "to/a.b-1.png", "to/a.b-2.png"]
    assert files("-", 1) == ["-"]
    with pytest.raises(ValueError, match="one picture, not 2"):
        files("-", 2)


def test_a_preview_lies_beside_its_picture() -> None:
    assert preview_file("to/a-1.png", 0, ".webp") == "to/a-1-preview-0.webp"
