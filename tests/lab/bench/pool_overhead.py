"""What a pool adds to its steps: idle devices, hand-over of latents, orders by pipe, and what a killed rank costs.

A tiny Flux on two ranks, on CPUs with one thread each. Idle is what lies between the end of a device's step and the
beginning of its next one, of steps that take about 30 ms, in the median, as part of a step. The hand-over is writing
and reading the state of a row of 1024², and its limit a part of the step by the profile of an H100 that is derived.
Decision record 0022 tells of pools. ``python -m tests.lab.bench.pool_overhead --help``.
"""

from __future__ import annotations

import itertools
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator, MutableMapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NoReturn

import structlog
import torch

from giornata.scheduling.degrees.pool import Devices
from giornata_denoiser.pool.messages import Ping, Pong, unpack
from giornata_denoiser.pool.ranks import loaded, start_ranks
from giornata_denoiser.pool.shared_memory import Arena, StateRing
from giornata_denoiser.pool.state import parcel
from giornata_lab.bench.reporting.report import write
from giornata_lab.flags import option, parsed
from giornata_lab.simulation.degrees.step_times import eager_s
from tests.integration.denoiser.pool.bench import After, Model, Walk, make_model, pid, running

STEP_S: Final = 0.03
SIDES: Final = (8, 12, 16, 20, 24, 28, 32, 40, 48)
LATENTS: Final = (64, 64)
"""Grid of a picture of 1024²."""
HELD: Final[tuple[Devices, ...]] = ((0,), (0, 1))
AIMS: Final = {"idle %": 1.0, "hand-over %": 0.05, "noticed s": 0.1, "rows go on s": 1.0}


def options_of(arguments: Sequence[str] | None = None) -> SimpleNamespace:
    """Flags."""
    return parsed(
        __doc__,
        [
            option("--steps", type=int, default=100, help="steps whose gaps are measured"),
            option("--repeats", type=int, default=200, help="orders, and hand-overs"),
            option("--kills", type=int, default=5, help="ranks that are killed"),
        ],
        arguments,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write ``out/bench/pool_overhead.json``."""
    options = options_of(arguments)
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder), (2,))
        side = side_of(model)
        lines = [idle(model, side, options.steps, devices) for devices in HELD]
        lines += [hand_over(model, options.repeats), order(model, options.repeats)]
        lines += killed(model, side, options.kills)
    write("pool_overhead", lines, workload={**vars(options), "model": "tiny Flux", "side": side})


def line(what: str, values: Sequence[float], aim: float | str = "-") -> dict[str, Any]:
    """The line of one measure, by its repetitions."""
    return {
        "measure": what,
        "median": round(statistics.median(values), 4),
        "least": round(min(values), 4),
        "most": round(max(values), 4),
        "count": len(values),
        "aim": aim,
    }


def side_of(model: Model) -> int:
    """The side, in tokens, of pictures whose steps take about :data:`STEP_S` here."""
    for side in SIDES:
        began = time.process_time()
        model.alone([model.row("sized", grid=(side, side), steps=4)])
        if (time.process_time() - began) / 4 >= STEP_S:
            return side
    return SIDES[-1]


def idle(model: Model, side: int, steps: int, devices: Devices) -> dict[str, Any]:
    """What lies between a row's steps on these devices, as part of a step."""
    spans: list[tuple[float, float]] = []
    with running(model.config(2), Walk([devices] * steps)) as bench:
        bench.pool.submit([model.row("row", grid=(side, side), steps=steps)])
        while len(spans) < steps:
            report = bench.told.get()
            if isinstance(report, Exception):
                raise report
            spans.append((report.began_s, report.ended_s))
    took = statistics.median(ended - began for began, ended in spans)
    gaps = [100 * (began - ended) / took for (_, ended), (began, _) in itertools.pairwise(spans)]
    found = line(f"idle %, degree {len(devices)}, steps of {took * 1e3:.0f} ms", gaps, AIMS["idle %"])
    return {**found, "most": round(statistics.quantiles(gaps, n=20)[-1], 4)}


def hand_over(model: Model, repeats: int) -> dict[str, Any]:
    """Writing and reading latents of 1024², as part of a step of an H100."""
    tokens = LATENTS[0] * LATENTS[1]
    row = model.row("large", grid=LATENTS)
    row = row.__class__(**{**vars(row), "latent": torch.zeros(tokens, 64, dtype=torch.bfloat16)})
    ring, arena = StateRing.of(row), Arena()
    slab, parts = arena.allocated(ring.size_bytes), []
    for _ in range(repeats):
        began = time.process_time()
        ring.write(slab, row)
        ring.read(slab, row, row.step).latent.clone()
        parts.append(100 * (time.process_time() - began) / eager_s(1, tokens))
    return line("hand-over %, latents of 1024²", parts, AIMS["hand-over %"])


def order(model: Model, repeats: int) -> dict[str, Any]:
    """A question to a rank and its answer, through the leader's selector."""
    config, took = model.config(2), []
    ranks = start_ranks(config)
    try:
        loaded(config, ranks)
        for _ in range(repeats):
            began = time.perf_counter()
            ranks.send(ranks.members[0], [parcel(Ping())])
            while not any(isinstance(answer, Pong) for answer in heard(ranks)):
                pass
            took.append((time.perf_counter() - began) * 1e3)
    finally:
        ranks.close()
    return line("order to a rank and answer, ms", took)


def heard(ranks: Any) -> Iterator[object]:
    """What ranks say next."""
    for key, _ in ranks.selector.select():
        messages, _ = key.data.process.channel.receive_ready()
        yield from map(unpack, messages)


class Heard:
    """When the pool's log told of what, for the first time since it was cleared."""

    def __init__(self) -> None:
        self.at: dict[str, float] = {}

    def __call__(self, logger: object, method: str, event: MutableMapping[str, Any]) -> NoReturn:
        """As a processor of structlog."""
        self.at.setdefault(str(event.get("event")), time.perf_counter())
        raise structlog.DropEvent


def killed(model: Model, side: int, kills: int) -> list[dict[str, Any]]:
    """Rank 1 of two is killed in the middle of rows that both compute together."""
    log, noticed, on, whole = Heard(), [], [], []
    structlog.configure(processors=[log])
    for _ in range(kills):
        began: list[float] = []

        def kill(pool: Any, began: list[float] = began) -> None:
            log.at.clear()
            began.append(time.perf_counter())
            os.kill(pid(pool, 1), signal.SIGKILL)

        with running(model.config(2), after=After(12, kill)) as bench:
            rows = [model.row(f"{seed}", grid=(side, side), steps=200, seed=seed) for seed in range(2)]
            bench.pool.submit(rows)
            while not began:
                bench.told.get()
            lost_s = None
            while "rank_joined" not in log.at:
                report = bench.told.get()
                if isinstance(report, Exception):
                    raise report
                if lost_s is None and report.began_s > log.at.get("rank_lost", float("inf")):
                    lost_s = report.began_s - began[0]
            noticed.append(log.at["rank_lost"] - began[0])
            on.append(lost_s or 0.0)
            whole.append(log.at["rank_joined"] - began[0])
            bench.pool.take_all()
    structlog.reset_defaults()
    return [
        line("killed rank is noticed, s", noticed, AIMS["noticed s"]),
        line("its rows' next step begins, s", on, AIMS["rows go on s"]),
        line("the pool is whole, s", whole, "model loaded"),
    ]


if __name__ == "__main__":
    main()
