"""Edits whose LoRAs are cold, beside the same edits under loaded ones: what loading adds, and what it costs others.

``python -m giornata_lab.bench.lora_loading``. A LoRA store of its own process answers over a real NATS server; the
denoiser's tiers and engine run in this one. Every turn begins with empty tiers. An edit's LoRAs are asked for when it
is routed, `--ahead` seconds before its inputs are there; without that, when they are. Another row runs all the time:
its steps before the edit joins tell what loading costs others.

A file is as large as one of a real network, its factors those of the network that is measured: the other bytes are of
text encoders, which a denoiser fetches and compares, and does not move to its device.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch
from safetensors.torch import save_file

from giornata.bus import bus
from giornata.bus.bus import Bus
from giornata.config import new_instance
from giornata.packed.low_rank import TEXT_ENCODER
from giornata.scheduling.batch import Capacity, RowKey
from giornata.wire import subjects
from giornata.wire.workers import ServiceState
from giornata_denoiser.config import DenoiserConfig
from giornata_denoiser.engine.batch_tensors import LowRanks
from giornata_denoiser.engine.engine import Engine, EngineLoop
from giornata_denoiser.engine.model_runner import StepReport
from giornata_denoiser.loras import hold_loras, sha256, tiers_of
from giornata_denoiser.rows.row import Adapters, Row, RowLora
from giornata_lab.bench.compute.models import described
from giornata_lab.bench.compute.rows import Rows
from giornata_lab.bench.compute.workload import WorkloadEdit
from giornata_lab.bench.lora_rows import tensors_of
from giornata_lab.bench.options import rows_of, shared
from giornata_lab.bench.reporting.report import write
from giornata_lab.bench.systems.servers import embedded
from giornata_lab.flags import Several, option, parsed

RANK: Final = 16
LOADED, PREFETCHED, COLD = "loaded", "cold, prefetched", "cold"
OTHER_STEPS: Final = 200
"""More than fit into any turn."""


def options_of(arguments: Sequence[str] | None = None) -> SimpleNamespace:
    """Flags."""
    return parsed(
        __doc__,
        [
            *shared(tokens=576, text=72, repeats=3),
            option("--steps", type=int, default=20, help="of the edit"),
            option("--ahead", type=float, default=2.0, help="seconds from routing to the edit's inputs"),
            option("--near", is_flag=True, help="the denoiser reads the store's folder"),
            option("--megabytes", type=Several(int), default=[341, 797], help="of the files"),
        ],
        arguments,
    )


@dataclass
class Watched:
    """What the engine's thread tells."""

    steps: list[StepReport] = field(default_factory=list)
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    done: asyncio.Queue[str] = field(default_factory=asyncio.Queue)

    def __call__(self, report: StepReport) -> None:
        """Take in a step."""
        assert not report.failed
        self.steps.append(report)
        for row in report.advanced:
            if row.done:
                self.loop.call_soon_threadsafe(self.done.put_nowait, row.key.job_id)

    def step_ms(self, begin_s: float, end_s: float) -> float:
        """Median of the steps that lie in a time."""
        inside = [each for each in self.steps if each.began_s >= begin_s and each.ended_s <= end_s]
        return statistics.median((each.ended_s - each.began_s) * 1e3 for each in inside)


@dataclass(frozen=True)
class LoraFileTimes:
    """One edit."""

    edit_s: float
    others_ms: float
    """A step of the other row before the edit joins."""


async def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write ``out/bench/lora_loading.json``."""
    options = options_of(arguments)
    rows = rows_of(options)
    with ExitStack() as stack:
        url, blobs = stack.enter_context(embedded())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gio-loras-")))
        loras = [_written(rows, folder, megabytes) for megabytes in options.megabytes]
        found: dict[tuple[int, str], list[LoraFileTimes]] = {}
        async with _store(url, folder), bus.connect(url, "bench") as connected:
            near = folder if options.near else None
            config = DenoiserConfig(model="bench", nats_url=url, blobs_url=blobs, lora_folder=near)
            for turn in range(options.repeats + 1):  # one turn warms up
                for count in range(1, len(loras) + 1):
                    for kind in (LOADED, PREFETCHED, COLD):
                        chosen = tuple(sorted(loras[:count]))
                        took = await _edit(rows, connected, config, chosen, kind, options)
                        if turn:
                            found.setdefault((count, kind), []).append(took)
    lines = [_line(count, kind, took, found[count, LOADED]) for (count, kind), took in found.items()]
    write("lora_loading", lines, workload={**vars(options), "rank": RANK, "model": described(rows.family)})


def _written(rows: Rows, folder: Path, megabytes: int) -> RowLora:
    """A canonical file of so many megabytes in the store's folder."""
    tensors = {name: tensor.half().cpu() for name, tensor in tensors_of(rows.family, RANK, megabytes).items()}
    rest = (megabytes * 1_000_000 - sum(tensor.nbytes for tensor in tensors.values())) // 2
    noise = torch.randn(1 << 20, generator=torch.Generator().manual_seed(megabytes)).half()
    beside = noise.repeat(max(0, rest) // len(noise) + 1)[: max(0, rest)]
    part = folder / "part"
    save_file({**tensors, f"{TEXT_ENCODER}.layer.down": beside}, part)
    digest = sha256(part)
    (folder / "files").mkdir(exist_ok=True)
    part.rename(folder / "files" / digest)
    size = (folder / "files" / digest).stat().st_size
    weights = sum(tensor.numel() for tensor in tensors.values())
    return RowLora(digest, 1.0, RANK, len(tensors) // 2, size, weights)


@asynccontextmanager
async def _store(url: str, folder: Path) -> AsyncIterator[None]:
    """A LoRA store over the folder, in a process of its own."""
    instance = new_instance("lora-store")
    environment = {
        **os.environ,
        "GIORNATA_NATS_URL": url,
        "GIORNATA_INSTANCE": instance,
        "GIORNATA_LORA_FOLDER": str(folder),
    }
    up = asyncio.Event()
    async with (
        bus.connect(url, "bench-store") as connected,
        connected.listen(subjects.telemetry("lora-store", instance), ServiceState, lambda _: up.set()),
    ):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "giornata_lora_store", env=environment
        )
        try:
            async with asyncio.timeout(60):
                await up.wait()
            yield
        finally:
            process.terminate()
            await process.wait()


async def _edit(
    rows: Rows,
    connected: Bus,
    config: DenoiserConfig,
    loras: tuple[RowLora, ...],
    kind: str,
    options: SimpleNamespace,
) -> LoraFileTimes:
    """One edit, from routing to its last step, beside a row that runs all the time."""
    edit = _row(rows, "edit", options.steps, loras)
    watched = Watched()
    with (
        tiers_of(config, connected, rows.family.network, lambda _: None) as tiers,
        EngineLoop(
            _engine(rows, tiers), watched, on_crash=lambda error: sys.exit(f"crashed: {error}")
        ) as loop,
        ExitStack() as stack,
    ):
        loop.submit([_row(rows, "other", OTHER_STEPS)])
        if kind == LOADED:
            await asyncio.wrap_future(stack.enter_context(tiers.held(loras)))
        routed_s = time.perf_counter()
        if kind == PREFETCHED:
            tiers.prefetch(loras)
        await asyncio.sleep(options.ahead)
        began_s = time.perf_counter()
        async with hold_loras(tiers, [edit]) as arriving:
            loop.submit([edit])
            await arriving
            loop.resume("edit", 1)
            joined_s = time.perf_counter()
            await watched.done.get()
        ended_s = time.perf_counter()
    return LoraFileTimes(ended_s - began_s, watched.step_ms(routed_s, max(joined_s, began_s)))


def _engine(rows: Rows, tiers: LowRanks) -> Engine:
    return Engine(rows.family, Capacity(8, 8 * rows.tokens), time.perf_counter, low_ranks=tiers)


def _row(rows: Rows, name: str, steps: int, loras: tuple[RowLora, ...] = ()) -> Row:
    made = rows.row(WorkloadEdit(0, 0, 1.0, 0.5, 0.5, steps), reuse=False)
    return replace(made, key=RowKey(name, 1, 0), adapters=Adapters(loras))


def _line(
    count: int, kind: str, took: Sequence[LoraFileTimes], loaded: Sequence[LoraFileTimes]
) -> dict[str, Any]:
    ratios = [own.edit_s / base.edit_s for own, base in zip(took, loaded, strict=True)]
    others = [own.others_ms / base.others_ms for own, base in zip(took, loaded, strict=True)]
    return {
        "LoRAs": count,
        "kind": kind,
        "÷ loaded": round(statistics.median(ratios), 3),
        "spread": f"{min(ratios):.2f}-{max(ratios):.2f}",
        "others' step ÷": round(statistics.median(others), 3),
        "edit s": round(statistics.median(each.edit_s for each in took), 2),
        "added s": round(
            statistics.median(own.edit_s - base.edit_s for own, base in zip(took, loaded, strict=True)),
            2,
        ),
    }


if __name__ == "__main__":
    asyncio.run(main())
