"""Every benchmark, one after the other, each in its process: ``python -m giornata_lab.bench [--long] [NAME ...]``.

By default the sizes are small enough for two CPU cores; ``--long`` takes larger pictures and more repeats.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Final

import click

LONG: Final[dict[str, list[str]]] = {
    "overhead": [],
    "step_time": ["--tokens", "4096", "--text", "512"],
    "unet_step": ["--repeats", "9"],
    "lora_rows": ["--tokens", "1024", "--text", "128", "--repeats", "9"],
    "step_rows": ["--tokens", "1024", "--text", "128"],
    "step_calls": [],
    "loading": ["--tokens", "1024", "--text", "128", "--steps", "8", "--repeats", "5"],
    "throughput": [
        *("--tokens", "1024", "--text", "128", "--steps", "4", "--divide", "4"),
        *("--repeats", "3", "--mixes", "production,8/20/28/50"),
    ],
    "latency": ["--seconds", "180", "--divide", "4", "--shares", "0.2,0.4,0.6,0.8,0.95"],
    "reuse_quality": ["--limit", "24"],
    "router_decision": [],
    "adapters_at_scale": ["--device-mb", "512,2048"],
    "batching": [],
    "degrees": [],
}
"""The benchmarks in their order, and the flags of a long run; each module's ``--help`` tells the others."""


@click.command(help=__doc__)
@click.argument("names", nargs=-1, metavar="[NAME]...", type=click.Choice(list(LONG)))
@click.option("--long", is_flag=True, help="larger pictures, more repeats: hours on a CPU")
@click.pass_context
def bench(ctx: click.Context, names: tuple[str, ...], *, long: bool) -> None:
    """Run benchmarks; the exit status is that of the first that failed, after all have run."""
    # Threads that wait must not keep a core busy that another process computes on.
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    failed = 0
    for name in names or LONG:
        began = time.perf_counter()
        command = [sys.executable, "-m", f"giornata_lab.bench.{name}", *(LONG[name] if long else [])]
        ended = subprocess.run(command, env=environment, check=False)
        print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)
        failed = failed or ended.returncode
    ctx.exit(failed)


if __name__ == "__main__":
    bench()
