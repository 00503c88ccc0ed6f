"""Runs tests in children of a process that has imported what takes long, so that a run begins at once.

It is started as a program in a copy of the checkout, and imports nothing of it. Each line of standard input asks for a
run: ``{"tests": [...], "limit_s": 60, "log": "..."}``. Each is answered with a line: ``{"status": 1, "took_s": 3.2}``;
the status is pytest's, or null for a run that was ended at its limit.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import signal
import sys
import time
from contextlib import suppress

PRELOADED = ("pytest", "numpy", "scipy.optimize", "torch", "pydantic", "structlog", "aiohttp", "nats.js")
"""No plugin of pytest is among them: it rewrites their asserts when it imports them itself."""


def run(tests: list[str], limit_s: float, log: str) -> tuple[int | None, float]:
    """Run test files up to their first failure: pytest's status, None after the limit, and how long it took."""
    began = time.monotonic()
    process = multiprocessing.get_context("fork").Process(target=_child, args=(tests, log))
    process.start()
    status = None
    try:
        process.join(limit_s)
        status = process.exitcode
    finally:
        with suppress(
            ProcessLookupError
        ):  # also what the tests have left, and also where this process is ended
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
    return None if status is None or status < 0 else status, time.monotonic() - began


def _child(tests: list[str], log: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setsid()
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    pytest = importlib.import_module("pytest")
    flags = ["--exitfirst", "--quiet", "--tb=line", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
    sys.exit(int(pytest.main([*flags, *tests])))


def main() -> None:
    """Answer until the input ends, or SIGTERM comes."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    for name in PRELOADED:
        importlib.import_module(name)
    for line in sys.stdin:
        status, took_s = run(**json.loads(line))
        print(json.dumps({"status": status, "took_s": took_s}), flush=True)


if __name__ == "__main__":
    sys.path.pop(0)  # this folder
    main()
