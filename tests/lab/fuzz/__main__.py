"""``python -m tests.lab.fuzz``: looks for bytes and requests that break something; exit status 1 where any did."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import click

from giornata_lab.flags import Several
from tests.lab.fuzz import openapi
from tests.lab.fuzz.seeds import CORPORA
from tests.lab.fuzz.targets import TARGETS

OUT: Final = Path("out/fuzz.json")
FOLDER: Final = Path("out/fuzz")
"""What a run finds: a folder for each target, with its new inputs, and with a file for each that broke something."""
OPENAPI: Final = "openapi"
UNIT_S: Final = 20
"""No input takes longer."""
KEPT: Final = 60
"""Most inputs that a fuzzer adds to a corpus."""
KEPT_BYTES: Final = 2048
"""None of them is larger."""


@click.command("fuzz", context_settings={"show_default": True})
@click.option("--seconds", type=click.IntRange(min=10), default=3600, help="How long each target is tried.")
@click.option("--only", type=Several(click.Choice([*TARGETS, OPENAPI])), help="Targets; by default all.")
@click.option("--keep", is_flag=True, help="Add inputs that reach new code to tests/lab/fuzz/corpora.")
@click.pass_context
def main(ctx: click.Context, /, seconds: int, only: list[str] | None, keep: bool) -> None:
    """Look for bytes and requests that break something, in one target after the other."""
    found = 0
    for name in only or [*TARGETS, OPENAPI]:
        print(f"{name}: {seconds} s …", flush=True)
        told = _openapi(seconds) if name == OPENAPI else _target(name, seconds, keep=keep)
        print(f"{name}: " + ", ".join(f"{value} {what}" for what, value in told.items()), flush=True)
        OUT.parent.mkdir(exist_ok=True)
        kept = json.loads(OUT.read_text()) if OUT.exists() else {}
        OUT.write_text(json.dumps(kept | {name: told}, indent=2) + "\n")
        found += len(told["findings"])
    print(f"{found} findings. Counts are in {OUT}, inputs in {FOLDER}.")
    ctx.exit(1 if found else 0)


def _openapi(seconds: int) -> dict[str, Any]:
    outcome = openapi.run(seconds, FOLDER / OPENAPI)
    share = outcome.reached / max(1, outcome.with_ids)
    print(f"{share:.0%} of the requests with an id reach a record", flush=True)
    counted = asdict(outcome)
    return {"seconds": seconds, "findings": list(counted.pop("failures")), **counted}


def _target(name: str, seconds: int, *, keep: bool) -> dict[str, Any]:
    """Run libFuzzer on a target; it goes on after a finding only with the next run."""
    folder, corpus = FOLDER / name, CORPORA / name
    folder.mkdir(parents=True, exist_ok=True)
    log = folder.with_suffix(".log")
    flags = [
        f"-max_total_time={seconds}",
        f"-timeout={UNIT_S}",
        "-print_final_stats=1",
        f"-artifact_prefix={folder}-",
    ]
    with log.open("wb") as lines:
        subprocess.run([*_fuzzer(name), *flags, folder, corpus], stdout=lines, stderr=lines, check=False)
    text = log.read_text(errors="replace")
    runs = re.search(r"stat::number_of_executed_units:\s*(\d+)", text)
    findings = [
        found
        for found in re.findall(r"Test unit written to (\S+)", text)
        if not Path(found).name.startswith(f"{name}-timeout-") or _breaks(name, found)
    ]
    if runs is None and not findings:
        findings = [f"{log}: it did not run"]
    if keep:
        _keep(folder, corpus)
    kept = sum(1 for _ in corpus.iterdir())
    return {"seconds": seconds, "inputs": int(runs[1]) if runs else 0, "kept": kept, "findings": findings}


def _breaks(name: str, found: str) -> bool:
    """Whether an input that was slow is so when it is alone: libFuzzer's clock goes on while the machine does not."""
    alone = subprocess.run([*_fuzzer(name), f"-timeout={UNIT_S}", found], capture_output=True, check=False)
    return alone.returncode != 0


def _keep(folder: Path, corpus: Path) -> None:
    """Add to the corpus what a run has found to reach new code, the smallest inputs first, up to the corpus's size."""
    known = sum(1 for path in corpus.iterdir() if re.fullmatch(r"[0-9a-f]{40}", path.name))
    found = sorted(folder.iterdir(), key=lambda path: (path.stat().st_size, path.name))
    for path in found[: max(0, KEPT - known)]:
        if path.stat().st_size <= KEPT_BYTES:
            shutil.copy(path, corpus / path.name)


def _fuzzer(name: str) -> list[str]:
    return [sys.executable, "-m", "tests.lab.fuzz.worker", name]


if __name__ == "__main__":
    main()
