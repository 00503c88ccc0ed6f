"""A pool as a program: it tells its ranks after a few steps of long rows, and goes no further."""

from __future__ import annotations

import signal
import sys
from dataclasses import replace
from pathlib import Path

from giornata_denoiser.pool.leader import DevicePool
from tests.integration.denoiser.pool.bench import After, open_model, pid, running


def tell(pool: DevicePool) -> None:
    print("ranks", pid(pool, 0), pid(pool, 1), flush=True)
    signal.pause()


if __name__ == "__main__":
    folder, profile = map(Path, sys.argv[1:])
    model = replace(open_model(folder), profile=profile)
    with running(model.config(2), after=After(6, tell)) as bench:
        bench.pool.submit([model.row("long", steps=40), model.row("other", steps=40, seed=1)])
        bench.until_ended(["long"])
