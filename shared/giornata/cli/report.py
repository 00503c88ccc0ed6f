"""What one edit leaves behind: files, and lines on standard error or a report as JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from giornata.cli import outputs
from giornata.cli.edits import Outcome, Preview, sentence
from giornata.errors import ErrorBody, JobCancelled


@dataclass(frozen=True)
class Report:
    """Where pictures go, and how it is told."""

    files: tuple[str, ...]
    """By index of the picture; ``-`` is standard output."""
    as_json: bool = False
    quiet: bool = False
    previews: dict[str, Preview] = field(default_factory=dict)
    """Written so far, by file; another attempt's take the place of the first's."""

    def preview(self, preview: Preview) -> None:
        """Write a preview beside its picture."""
        name = outputs.preview_file(self.files[preview.index], preview.number, preview.suffix)
        _write(name, preview.data)
        self.previews[name] = preview

    def finished(self, outcome: Outcome, elapsed_s: float) -> int:
        """Write the pictures and tell; 1 where one of them is missing."""
        for picture in outcome.pictures:
            _write(self.files[picture.index], picture.data)
        if self.as_json:
            _print_json(self._value(outcome, elapsed_s))
        elif not self.quiet:
            for p in outcome.pictures:
                click.echo(
                    f"{self.files[p.index]}: {outcome.size}, seed {p.seed}, {elapsed_s:.1f} s", err=True
                )
        for failure in outcome.failures:
            code = f" [{failure.code}]" if failure.code else ""
            click.echo(f"A picture failed: {failure.sentence}{code}", err=True)
        return 1 if outcome.failures else 0

    def refused(self, body: ErrorBody) -> int:
        """Tell why there is no picture."""
        if self.as_json:
            _print_json({"error": body.model_dump(mode="json", exclude_none=True)})
        click.echo(f"Error: {sentence(body)}", err=True)
        return 1

    def stopped(self, text: str) -> None:
        """Tell what became of the job that was given up."""
        if self.as_json:
            _print_json({"error": {"code": JobCancelled.code, "message": text}})
        click.echo(text, err=True)

    def _value(self, outcome: Outcome, elapsed_s: float) -> dict[str, Any]:
        return {
            "job_id": outcome.job_id,
            "size": outcome.size,
            "elapsed_s": round(elapsed_s, 3),
            "pictures": [
                {"file": self.files[p.index], "index": p.index, "seed": p.seed, "bytes": len(p.data)}
                for p in outcome.pictures
            ],
            "previews": [
                {"file": name, "index": p.index, "step": p.step, "box": p.box}
                for name, p in self.previews.items()
            ],
            "errors": [{"code": f.code, "message": f.sentence, "index": f.index} for f in outcome.failures],
        }


def _write(name: str, data: bytes) -> None:
    try:
        if name == outputs.STDOUT:
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
        else:
            Path(name).write_bytes(data)
    except OSError as error:
        raise click.FileError(name, error.strerror) from error


def _print_json(value: object) -> None:
    click.echo(json.dumps(value, indent=2))
