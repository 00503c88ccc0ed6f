"""A program that measures nothing: ``python -m tests.fakes.measured_part HOW``, as a part of a campaign."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path


def main(how: str, *given: str) -> None:
    """`done` writes its report; `half` writes it and fails; `raise` fails; `hang` never ends, nor does its child."""
    print(f"began to {how}", flush=True)
    if how in {"done", "half"}:
        path = Path(os.environ["GIORNATA_BENCH_OUT"]) / "measured_part.json"
        path.write_text(
            json.dumps({"rows": [{"what": how, "ms": 1.5}], "workload": {"given": given, "pid": os.getpid()}})
        )
    if how in {"half", "raise"}:
        raise RuntimeError(f"it was to {how}")
    if how == "hang":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        for told in given:
            Path(told).write_text(str(child.pid))
        time.sleep(600)


if __name__ == "__main__":
    main(*sys.argv[1:])
