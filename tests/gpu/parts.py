"""What the campaign consists of: parts, each a program of its own with a limit, in the order of their worth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

TINY, FLUX = "tiny", "flux"
SIZES: Final = (FLUX, TINY)
"""FLUX.1-dev's shape, and one to rehearse with."""
PICTURES: Final = {FLUX: {"1024": 4096, "512": 1024}, TINY: {"256": 256}}
"""Tokens by side of the pictures in pixels."""
TEXT: Final = {FLUX: 512, TINY: 16}
BENCH: Final = "tests.bench"


@dataclass(frozen=True)
class Part:
    """One program of the campaign."""

    name: str
    module: str
    """What ``python -m`` runs; it writes a report of the module's last name."""
    arguments: tuple[str, ...]
    limit_s: float
    """After so many seconds it is ended, and counts as failed."""
    shows: str
    """What its report tells."""

    @property
    def report(self) -> str:
        """The name of the report that it writes, without suffix."""
        return self.module.rpartition(".")[2]


def parts(size: str, device: str) -> tuple[Part, ...]:
    """All parts, those first that tell most. Their limits add up to more than they need together.

    Args:
        size: one of `SIZES`.
        device: as torch names it.
    """
    pictures = PICTURES[size]
    return (
        Part(
            "tests", "tests.gpu.suite", (), 420, "the engine on the device against the CPU and other oracles"
        ),
        *(_bench(f"step_trace_{side}", _step_trace(size, side, device), side) for side in list(pictures)[:1]),
        *(_bench(f"step_time_{side}", _step_time(size, side, device), side) for side in pictures),
        *(_bench(f"step_rows_{side}", _step_rows(size, side, device), side) for side in pictures),
        *(_bench(f"throughput_{side}", _throughput(size, side, device), side) for side in pictures),
        *(_bench(f"loading_{side}", _loading(size, side, device), side) for side in pictures),
        _bench("pictures", _pictures(size, device)),
        _bench("launches", _launches(size)),
    )


SHOWS: Final = {
    "step_trace": "one masked step of 8 rows by streams; its Chrome trace lies beside it",
    "step_time": "one row's step in full ÷ masked, by mask ratio",
    "step_rows": "a step's time and memory by rows",
    "throughput": "edits a second beside static batching",
    "loading": "a picture's time where loading is slow, planned and taken",
    "pictures": "what speed costs in picture, on the model that ships",
    "launches": "operations and bytes of a step, counted without a device",
}
LIMITS_S: Final = {"throughput": 480.0}
LIMIT_S: Final = 240.0


def _bench(name: str, arguments: tuple[str, ...], side: str = "") -> Part:
    benchmark = name.removesuffix(f"_{side}")
    shows = f"{SHOWS[benchmark]}, pictures of {side}²" if side else SHOWS[benchmark]
    return Part(name, f"{BENCH}.{benchmark}", arguments, LIMITS_S.get(benchmark, LIMIT_S), shows)


def _shape(size: str, side: str, device: str) -> tuple[str, ...]:
    """The flags that the benchmarks of one transformer share."""
    model = "real" if size == FLUX else "tiny"
    dtype = "float32" if device == "cpu" else "bfloat16"
    tokens, text = PICTURES[size][side], TEXT[size]
    return (
        *("--model", model, "--device", device, "--dtype", dtype),
        *("--tokens", str(tokens), "--text", str(text)),
        *(("--threads", "1") if size == TINY else ()),
    )


def _step_trace(size: str, side: str, device: str) -> tuple[str, ...]:
    return _shape(size, side, device)


def _step_time(size: str, side: str, device: str) -> tuple[str, ...]:
    return (*_shape(size, side, device), "--repeats", "10" if size == FLUX else "1")


def _step_rows(size: str, side: str, device: str) -> tuple[str, ...]:
    rows, repeats = ("1,2,4,8", "5") if size == FLUX else ("1,2", "1")
    return (*_shape(size, side, device), "--rows", rows, "--repeats", repeats)


def _throughput(size: str, side: str, device: str) -> tuple[str, ...]:
    run = ("--templates", "1", "--repeats", "1")
    if size == TINY:
        return (
            *_shape(size, side, device),
            *run,
            "--batch",
            "2",
            "--steps",
            "2",
            "--edits",
            "2",
            "--divide",
            "10",
        )
    mixed = ("--edits", "8", "--divide", "4" if side == "1024" else "2")
    return (*_shape(size, side, device), *run, "--batch", "8", "--steps", "7", *mixed)


def _loading(size: str, side: str, device: str) -> tuple[str, ...]:
    shape = _shape(size, side, device)
    return (*shape, "--repeats", "3") if size == FLUX else (*shape, "--repeats", "1", "--loads", "1.0")


def _pictures(size: str, device: str) -> tuple[str, ...]:
    """At the size that the model was trained for."""
    dtype = "float32" if device == "cpu" else "bfloat16"
    edits = (
        ("--limit", "8")
        if size == FLUX
        else ("--limit", "1", "--side", "128", "--steps", "3", "--threads", "1")
    )
    thresholds = "0.05,0.1,0.2" if size == FLUX else "0.1"
    return ("--device", device, "--dtype", dtype, *edits, "--thresholds", thresholds)


def _launches(size: str) -> tuple[str, ...]:
    """On `meta`: the same everywhere."""
    return () if size == FLUX else ("--model", "tiny", "--tokens", "256", "--text", "16", "--rows", "2")
