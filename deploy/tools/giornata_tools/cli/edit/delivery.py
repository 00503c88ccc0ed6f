"""Where one edit's pictures go, from what was typed after ``-o``; what is told of them, in lines or as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import click

from giornata.wire.errors import ErrorBody, JobCancelled
from giornata.wire.requests import OutputFormat
from giornata_tools.doors.edits import (
    EditOutcome,
    PaintedPicture,
    PictureFailure,
    Preview,
    RequestRefused,
    sentence,
)

STDOUT: Final = "-"
SUFFIXES: Final[Mapping[str, OutputFormat]] = {
    ".png": OutputFormat.PNG,
    ".jpg": OutputFormat.JPEG,
    ".jpeg": OutputFormat.JPEG,
    ".webp": OutputFormat.WEBP,
}
NOT_WRITTEN: Final = "output_not_written"
"""Code of a file that cannot be written: the command line's own, since no service answers it."""


def format_of(out: str, chosen: OutputFormat | None) -> OutputFormat:
    """The encoding to ask for: the chosen one, else what `out` ends with, else PNG on standard output.

    Raises:
        ValueError: the suffix says nothing; tells which do.
    """
    if chosen is not None:
        return chosen
    if out == STDOUT:
        return OutputFormat.PNG
    suffix = Path(out).suffix.lower()
    if suffix not in SUFFIXES:
        raise ValueError(f"{out} does not end with {', '.join(SUFFIXES)}; rename it or give --output-format.")
    return SUFFIXES[suffix]


def files(out: str, n: int) -> list[str]:
    """A name for each picture: `out` itself for one; OUT-0.png, OUT-1.png and so on for several.

    Raises:
        ValueError: several pictures do not fit into standard output.
    """
    if n == 1:
        return [out]
    if out == STDOUT:
        raise ValueError(f"Standard output takes one picture, not {n}; name a file.")
    path = Path(out)
    return [str(path.with_name(f"{path.stem}-{index}{path.suffix}")) for index in range(n)]


def preview_file(file: str, number: int, suffix: str) -> str:
    """The name of preview `number` of the picture in `file`: edited-preview-0.webp beside edited.png."""
    path = Path(file)
    return str(path.with_name(f"{path.stem}-preview-{number}{suffix}"))


@dataclass(frozen=True)
class EditDelivery:
    """Where pictures go, and how it is told."""

    files: tuple[str, ...]
    """File names by index of the picture; ``-`` is standard output."""
    as_json: bool = False
    quiet: bool = False
    previews: dict[str, Preview] = field(default_factory=dict)
    """Written so far, by file; another attempt's take the place of the first's."""
    lost: dict[str, PictureFailure] = field(default_factory=dict)
    """What could not be written, by file."""

    def preview(self, preview: Preview) -> None:
        """Write a preview beside its picture; where that fails, the edit goes on and :meth:`finished` tells."""
        name = preview_file(self.files[preview.index], preview.number, preview.suffix)
        self.previews.pop(name, None)
        if self._write(name, preview.index, preview.data):
            self.previews[name] = preview

    def finished(self, outcome: EditOutcome, elapsed_s: float) -> int:
        """Write the pictures, every one that can be, and tell; 1 where a file is missing."""
        written = [p for p in outcome.pictures if self._write(self.files[p.index], p.index, p.data)]
        if self.as_json:
            _print_json(self._value(outcome, written, elapsed_s))
        elif not self.quiet:
            for p in written:
                _say(f"{self.files[p.index]}: {outcome.size}, seed {p.seed}, {elapsed_s:.1f} s")
        for failure in outcome.failures:
            code = f" [{failure.code}]" if failure.code else ""
            _say(f"A picture failed: {failure.sentence}{code}")
        for failure in self.lost.values():
            _say(f"Error: {failure.sentence} [{failure.code}]")
        if len(written) < len(outcome.pictures):
            _say(f"The gateway keeps pictures for a while: GET /v1/jobs/{outcome.job_id}/image")
        return 1 if outcome.failures or self.lost else 0

    def refused(self, body: ErrorBody) -> int:
        """Tell why there is no picture."""
        if self.as_json:
            _print_json({"error": body.model_dump(mode="json", exclude_none=True)})
        _say(f"Error: {sentence(body)}")
        return 1

    def stopped(self, text: str) -> None:
        """Tell what became of the job that was given up."""
        if self.as_json:
            _print_json({"error": {"code": JobCancelled.code, "message": text}})
        _say(text)

    def _write(self, name: str, index: int, data: bytes) -> bool:
        """Write a file; whether that succeeded."""
        try:
            if name == STDOUT:
                sys.stdout.buffer.write(data)
                sys.stdout.buffer.flush()
            else:
                Path(name).write_bytes(data)
        except OSError as error:
            self.lost[name] = PictureFailure(_not_written(name, error).message, NOT_WRITTEN, index)
            return False
        self.lost.pop(name, None)
        return True

    def _value(self, outcome: EditOutcome, written: list[PaintedPicture], elapsed_s: float) -> dict[str, Any]:
        failures = (*outcome.failures, *self.lost.values())
        return {
            "job_id": outcome.job_id,
            "size": outcome.size,
            "elapsed_s": round(elapsed_s, 3),
            "pictures": [
                {"file": self.files[p.index], "index": p.index, "seed": p.seed, "bytes": len(p.data)}
                for p in written
            ],
            "previews": [
                {"file": name, "index": p.index, "step": p.step, "box": p.box}
                for name, p in self.previews.items()
            ],
            "errors": [{"code": f.code, "message": f.sentence, "index": f.index} for f in failures],
        }


@contextmanager
def writing(name: str) -> Iterator[None]:
    """The file or folder `name` is written inside.

    Raises:
        Refused: it cannot be.
    """
    try:
        yield
    except OSError as error:
        raise RequestRefused(_not_written(name, error)) from error


def _not_written(name: str, error: OSError) -> ErrorBody:
    place = "Standard output" if name == STDOUT else name
    return ErrorBody(code=NOT_WRITTEN, message=f"{place} cannot be written: {error.strerror or error}.")


def _print_json(value: object) -> None:
    click.echo(json.dumps(value, indent=2))


_say: Final = partial(click.echo, err=True)
