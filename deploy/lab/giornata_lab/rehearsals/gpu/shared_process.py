"""The process in which parts run one after the other, so that they share the model on the device.

It reads an order a line, as JSON, and answers each with the exit status of what it ran; see `campaign.SharedProcess`.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any


def main() -> None:
    """Until there are no more orders."""
    with os.fdopen(os.dup(1), "w") as answers:
        for line in sys.stdin:
            order = json.loads(line)
            with Path(order["log"]).open("ab", buffering=0) as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            os.environ["GIORNATA_BENCH_OUT"] = order["out"]
            harness: Any = sys.modules.get("giornata_lab.bench.harness")
            if harness is not None:
                harness.OUT = Path(order["out"])
            status = _status(order["module"], order["arguments"])
            sys.stdout.flush()
            _forget()
            print(status, file=answers, flush=True)


def _status(module: str, arguments: list[str]) -> int:
    """Return what ``python -m module arguments`` would end with."""
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - whatever a part raises is in its log
        traceback.print_exc()
        return 1
    return 0


def _forget() -> None:
    """Return what a part left on the device, and the peak of its memory."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    main()
