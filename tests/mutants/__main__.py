"""``python -m tests.mutants``: puts faults into a copy of the code; exit status 1 where too few were caught."""

from __future__ import annotations

import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import click

from giornata_lab.flags import Several
from tests.mutants.sampling import PURE, sample
from tests.mutants.trees import Mutant, Result, StaleFaultError, TestsFailedError, Tree, listed

OUT: Final = Path("out/mutants.json")
LISTED, SAMPLED = "listed", "sampled"
AIMS: Final = {LISTED: 1.0, SAMPLED: 0.9}
"""Shares that have to be caught."""


@click.command("mutants", context_settings={"show_default": True})
@click.option(
    "--sample", "size", type=click.IntRange(min=1), help="Draw so many faults in pure modules instead."
)
@click.option("--seed", type=int, default=0, help="Draws the same ones again.")
@click.option(
    "--packages", type=Several(click.Choice([*PURE])), help="Whence they are drawn; by default all."
)
@click.option("--only", default="", help="Those of the list with this in their name or file; writes nothing.")
@click.pass_context
def main(ctx: click.Context, /, size: int | None, seed: int, packages: list[str] | None, only: str) -> None:
    """Put the faults of tests/mutants/faults.toml into a copy of the code, one at a time, and run their tests."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the copy and what runs there go, too
    try:
        if size is None:
            kind, about = LISTED, {}
            mutants = [fault.mutant() for fault in listed() if only in fault.name or only in fault.file]
        else:
            kind, about = SAMPLED, {"seed": seed, "packages": packages or [*PURE]}
            mutants = sample(size, seed, packages or [*PURE])
        results = _judged(mutants)
    except (StaleFaultError, TestsFailedError) as error:
        raise click.ClickException(str(error)) from error
    caught = sum(result.caught for result in results)
    if not only:
        _keep(kind, about, mutants, results)
    print(f"{caught} of {len(mutants)} caught; the aim is {AIMS[kind]:.0%}.")
    ctx.exit(0 if caught >= AIMS[kind] * len(mutants) else 1)


def _judged(mutants: Sequence[Mutant]) -> list[Result]:
    results = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, Tree(Path(folder)) as tree:
        for mutant in mutants:
            result = tree.judge(mutant)
            results.append(result)
            word = "caught" if result.caught else "PASSED"
            print(f"{word}  {result.took_s:6.1f} s  {mutant.name}", flush=True)
            print(f"                  {mutant.file}: {result.by or 'no test fails'}", flush=True)
    return results


def _keep(kind: str, about: dict[str, Any], mutants: Sequence[Mutant], results: Sequence[Result]) -> None:
    OUT.parent.mkdir(exist_ok=True)
    rows = [
        {"name": mutant.name, "file": mutant.file, "tests": mutant.tests, **result._asdict()}
        for mutant, result in zip(mutants, results, strict=True)
    ]
    told = {
        "aim": AIMS[kind],
        "caught": sum(r.caught for r in results),
        "of": len(rows),
        **about,
        "faults": rows,
    }
    before = json.loads(OUT.read_text()) if OUT.exists() else {}
    OUT.write_text(json.dumps(before | {kind: told}, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
