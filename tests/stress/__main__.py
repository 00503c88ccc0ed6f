"""``python -m tests.stress``: runs tests again and again on a disturbed machine; exit status 1 where one failed.

A new test that starts a process, a thread or a server is admitted when it fails in none of its rounds.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import signal
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

import click
import pytest

from tests.ending import MARK, end_with_run, marked
from tests.patience import CI_S, VARIABLE
from tests.stress.disturbing import busy_loops, disturb
from tests.stress.rounds import TIMES

OUT: Final = Path("out/stress")
"""What pytest says of each file, and the table of all."""
RUN: Final = "GIO_STRESS_RUN"
"""Marks every process of the whole stress run, which ends with it."""
DISTURBED: Final = "GIO_STRESS_FILE"
"""Marks the processes that are stopped now and then; the loops beside them are not."""
END_S: Final = 60
"""How long pytest may take to end its servers."""

Table = dict[str, tuple[int, int]]


@click.command("stress", context_settings={"show_default": True})
@click.argument("tests", nargs=-1)
@click.option("--rounds", type=click.IntRange(min=1), default=20, help="How often each test runs.")
@click.option("--loops", type=click.IntRange(min=0), default=5, help="Busy loops beside the tests.")
@click.pass_context
def main(ctx: click.Context, /, tests: tuple[str, ...], rounds: int, loops: int) -> None:
    """Run TESTS: folders, files or single tests. By default: what starts something in files changed against main."""
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell ignores it in what it starts in the background
    OUT.mkdir(parents=True, exist_ok=True)
    table: Table = {}
    end = end_with_run(RUN)
    try:
        with busy_loops(loops):
            for number, test in enumerate(tests or changed()):
                print(f"{test} …", flush=True)
                table |= run_disturbed(test, rounds, random.Random(number))  # noqa: S311
    except KeyboardInterrupt:
        ctx.exit(130)
    finally:
        end()
    print(as_text(table))
    (OUT / "table.json").write_text(json.dumps(table, indent=2) + "\n")
    ctx.exit(1 if any(failed for _, failed in table.values()) or not table else 0)


def changed() -> list[str]:
    """Files of tests that differ from main: committed, or not, or new."""
    told = [
        subprocess.run(["git", *command, "--", "tests"], capture_output=True, text=True, check=True)  # noqa: S607
        for command in (
            ("diff", "--name-only", "--diff-filter=d", "--merge-base", "main"),
            ("ls-files", "--others", "--exclude-standard"),
        )
    ]
    names = (name for each in told for name in each.stdout.splitlines())
    return [name for name in names if Path(name).match("test_*.py")]


def run_disturbed(test: str, rounds: int, draw: random.Random) -> Table:
    """Each test's rounds and failures. A run of pytest that does not end as it should counts as one failure."""
    log = OUT / f"{test.replace('/', '.')}.log"
    record = log.with_suffix(".json")
    record.unlink(missing_ok=True)
    command = [
        *(sys.executable, "-m", "pytest", "-p", "tests.stress.rounds", "-p", "no:cacheprovider", "-q", test),
        *("--rounds", str(rounds), "--rounds-record", str(record)),
    ]
    # Each run has a watchdog of its own, which ends what its tests have left.
    mark = secrets.token_hex(8)
    env = {VARIABLE: str(TIMES * CI_S)} | {key: value for key, value in os.environ.items() if key != MARK}
    with log.open("wb") as out:
        run = subprocess.Popen(
            command, env=env | {DISTURBED: mark}, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            stops = disturb(run, partial(marked, f"{DISTURBED}={mark}"), draw)
        finally:
            if run.poll() is None:
                run.send_signal(signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):  # then the watchdog ends it
                    run.wait(END_S)
    print(f"  {stops} stops, exit status {run.returncode}", flush=True)
    if run.returncode == pytest.ExitCode.NO_TESTS_COLLECTED:
        return {}
    found: Table = json.loads(record.read_text()) if record.exists() else {}
    return found if run.returncode in {0, 1} and found else found | {f"{test} (see {log})": (1, 1)}


def as_text(table: Table) -> str:
    """The tests that failed, and a line for the others."""
    failed = {test: row for test, row in table.items() if row[1]}
    lines = [f"{count:>4} of {rounds:<4} {test}" for test, (rounds, count) in failed.items()]
    return "\n".join(["failed      test", *lines, f"{len(table) - len(failed)} tests failed in no round."])


if __name__ == "__main__":
    main()
