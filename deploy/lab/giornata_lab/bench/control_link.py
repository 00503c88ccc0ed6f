"""A step's samples on their way from a ControlNet instance to a denoiser, beside a copy in memory.

``python -m giornata_lab.bench.control_link``. Two processes of this host, over a Unix socket with shared memory and
over TCP, in turns with the copy of as many bytes within one process. A step is timed from when it is asked for until
its last sample has come, latents of the whole picture included; the instance has its samples already. *First byte* is
a step of its own whose sample is one token.

Processor time is that of both processes: it tells more than the clock where others share the machine.
"""

from __future__ import annotations

import multiprocessing
import queue
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch

from giornata.control.link.client import ControlLink
from giornata.control.link.server import ControlStepRequest, Listener, is_known_token
from giornata.wire.controlnets import DataPath
from giornata_lab.bench.reporting.report import measured, write
from giornata_lab.flags import option, parsed

TOKEN: Final = "bench"  # noqa: S105 - of this run alone
CPU: Final = torch.device("cpu")
DTYPE: Final = torch.bfloat16
COPY: Final = "memory copy"
CLOCK, END = "clock", "end"
"""Rows that are none: the first asks for the instance's processor time."""
WARM_UP: Final = 3
"""Turns that do not count."""
FIRSTS: Final = 10
"""Measurements of the first byte in each turn."""
WAIT_S: Final = 60
Taken = tuple[float, float]
"""Seconds of the clock, and of processors."""


def options_of(arguments: Sequence[str] | None = None) -> SimpleNamespace:
    """Flags."""
    return parsed(
        __doc__,
        [
            option("--samples", type=int, default=7, help="of a step"),
            option(
                "--tokens", type=int, default=837, help="of a sample: live ones of a 1024² picture, mask 0.2"
            ),
            option("--channels", type=int, default=3072, help="of a token"),
            option("--picture", type=int, default=4096, help="tokens of the latents"),
            option("--repeats", type=int, default=30),
        ],
        arguments,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write ``out/bench/control_link.json``."""
    options = options_of(arguments)
    torch.set_num_threads(1)
    shape = (options.tokens, options.channels)
    size = options.samples * shape[0] * shape[1] * DTYPE.itemsize
    steps: dict[str, list[Taken]] = {}
    firsts: dict[str, list[Taken]] = {}
    with ExitStack() as stack:
        addresses = stack.enter_context(_instance(options))
        ways: dict[str, Callable[[], Taken]] = {COPY: _copying(size)}
        asking: dict[str, Callable[[], Taken]] = {}
        for path in (DataPath.UNIX, DataPath.TCP):
            link = stack.enter_context(
                ControlLink(path, addresses[path], TOKEN, slab_bytes=2 * size, device=CPU)
            )
            ways[path] = partial(_step, link, options, [shape] * options.samples)
            asking[path] = partial(_step, link, options, [(1, 64)])
        for turn in range(options.repeats + WARM_UP):
            for name, way in ways.items():
                _note(steps, name, way(), turn)
            for name, way in asking.items():
                for _ in range(FIRSTS):
                    _note(firsts, name, way(), turn)
        _end(link)
    lines = [_line(name, size, steps, firsts.get(name)) for name in steps]
    write("control_link", lines, workload={**vars(options), "bytes": size, "dtype": str(DTYPE)})


def _note(found: dict[str, list[Taken]], name: str, taken: Taken, turn: int) -> None:
    if turn >= WARM_UP:
        found.setdefault(name, []).append(taken)


def _line(
    name: str, size: int, steps: dict[str, list[Taken]], firsts: Sequence[Taken] | None
) -> dict[str, Any]:
    speeds = sorted(size / seconds / 1e9 for seconds, _ in steps[name])
    processor_ms = [processor * 1e3 for _, processor in steps[name]]
    ratios = [own / base for (_, own), (_, base) in zip(steps[name], steps[COPY], strict=True)]
    first = measured([seconds * 1e3 for seconds, _ in firsts]) if firsts else None
    return {
        "way": name,
        "GB/s": statistics.median(speeds),
        "least-most": f"{speeds[0]:.1f}-{speeds[-1]:.1f}",
        "processor ÷ copy": statistics.median(ratios),
        "processor_ms": measured(processor_ms).as_dict(),
        "first_byte_ms": first.as_dict() if first else "",
        "least": first.least_ms if first else "",
    }


def _copying(size: int) -> Callable[[], Taken]:
    """A copy of so many bytes between two places that have been touched."""
    source, target = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)

    def once() -> Taken:
        began, processor = time.perf_counter(), time.process_time()
        target.copy_(source)
        return time.perf_counter() - began, time.process_time() - processor

    return once


def _step(link: ControlLink, options: SimpleNamespace, shapes: Sequence[tuple[int, int]]) -> Taken:
    """One step; of its clock, when the last sample has come."""
    theirs = _processor_s(link)
    latents = torch.ones(options.picture, 64, dtype=DTYPE)
    began, mine = time.perf_counter(), time.process_time()
    with _asked(link, "row", latents, shapes) as asked:
        for index in range(len(shapes)):
            asked.sample(index, WAIT_S)
        ended = time.perf_counter()
    processor = time.process_time() - mine
    return ended - began, processor + _processor_s(link) - theirs


def _asked(link: ControlLink, row: str, latents: torch.Tensor, shapes: Sequence[tuple[int, int]]) -> Any:
    tokens, channels = zip(*shapes, strict=True)
    dtype = torch.float32 if row == CLOCK else DTYPE
    return link.ask(
        row=row,
        step=0,
        level=0.5,
        latents=latents,
        tokens=tokens,
        channels=channels,
        dtype=dtype,
        whole=False,
    )


def _processor_s(link: ControlLink) -> float:
    """Return what the instance's process has computed since its start, to microseconds."""
    with _asked(link, CLOCK, torch.zeros(1, 1), [(1, 2)]) as asked:
        seconds, micros = asked.sample(0, WAIT_S)[0].tolist()
    return float(seconds + micros / 1e6)


def _end(link: ControlLink) -> None:
    with _asked(link, END, torch.zeros(1, 1), [(1, 1)]) as asked:
        asked.sample(0, WAIT_S)


@contextmanager
def _instance(options: SimpleNamespace) -> Iterator[dict[DataPath, str]]:
    context = multiprocessing.get_context("spawn")
    mine, others = context.Pipe()
    with tempfile.TemporaryDirectory(prefix="gio-link-") as folder:
        process = context.Process(target=_serve, args=(others, Path(folder) / "link.sock", options))
        process.start()
        others.close()
        try:
            yield mine.recv()
            process.join(WAIT_S)
        finally:
            process.kill()
            process.join()
            mine.close()


def _serve(pipe: Connection, unix: Path, options: SimpleNamespace) -> None:
    torch.set_num_threads(1)
    asked: queue.SimpleQueue[ControlStepRequest] = queue.SimpleQueue()
    made = [
        torch.full((options.tokens, options.channels), index + 1.0, dtype=DTYPE)
        for index in range(options.samples)
    ]
    admits = partial(is_known_token, tokens=[TOKEN])
    with Listener(admits, asked.put, unix=unix, tcp=("127.0.0.1", 0), device=CPU) as listener:
        pipe.send(dict(listener.addresses))
        while True:
            step = asked.get()
            if step.row == CLOCK:
                seconds = time.process_time()
                step.answer(0, torch.tensor([[seconds // 1, seconds % 1 * 1e6]]))
                continue
            for index, (tokens, channels) in enumerate(step.shapes):
                step.answer(index, made[index][:tokens, :channels])
            if step.row == END:
                return


if __name__ == "__main__":
    main()
