"""Every benchmark, the lab's and those of this folder: ``python -m tests.lab.bench [--long] [NAME ...]``."""

from __future__ import annotations

from typing import Final

from giornata_lab.bench.__main__ import LONG, MODULES, command

HERE: Final[dict[str, list[str]]] = {
    "stores": [],
    "slow_crowd": [],
    "families": [],
    "pool_overhead": ["--steps", "500", "--kills", "10"],
    "router_scale": ["--seconds", "30", "--jobs", "2000"],
}

if __name__ == "__main__":
    LONG.update(HERE)
    command(MODULES | {name: f"tests.lab.bench.{name}" for name in HERE})()
