"""What the campaign consists of: parts, each a program with a limit, in the order of their worth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

TINY, FLUX = "tiny", "flux"
SIZES: Final = (FLUX, TINY)
"""FLUX.1-dev's shape, and one to rehearse with."""
PICTURES: Final = {FLUX: {"1024": 4096, "512": 1024}, TINY: {"256": 256}}
"""Tokens by side of the pictures in pixels."""
TEXT: Final = {FLUX: 512, TINY: 16}
BENCH: Final = "giornata_lab.bench"
SUITE: Final = "tests.lab.gpu.suite"
PROCESSES: Final = ("tests/contract/control_link/test_losses.py",)
"""Tests of processes that die while others hold what was theirs: they take longest."""


ORACLES: Final = (
    "tests/lab/gpu/test_attention.py",
    "tests/lab/gpu/test_low_rank.py",
    "tests/lab/gpu/test_published_shape.py",
    "tests/unit/packed/test_elementwise.py",
    "tests/unit/packed/test_pages.py",
)
"""Tests of what every step is made of; they compile Triton's kernels, too."""


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
    alone: bool = False
    """In a process of its own."""
    last: bool = False
    """In the process that the parts before it share, which ends with it."""

    @property
    def report(self) -> str:
        """The name of the report that it writes, without suffix."""
        return self.module.rpartition(".")[2]


def parts(size: str, device: str) -> tuple[Part, ...]:
    """All parts, those first that tell most. Their limits add up to more than they need together.

    Those before the tests fit into nine minutes of an H100, and the first of them share the model of 12 B weights.

    Args:
        size: one of `SIZES`.
        device: as torch names it.
    """
    first, *others = PICTURES[size]
    return (
        Part("oracles", SUITE, ORACLES, 120, "attention and kernels on the device against other oracles"),
        _bench("device_peaks", "", ("--device", device)),
        *_of_flux(size, first, device),
        _of("step_time", "sdxl", size, device),
        # The last: launches take longer in a process that torch's profiler has looked at.
        replace(_bench("step_trace", first, _shape(size, first, device)), last=True),
        _of("throughput", "flux2-klein", size, device),
        _of("step_rows", "flux2-klein", size, device),
        _of("step_time", "flux2-klein", size, device),
        Part(
            "tests", SUITE, (), 240, "the engine on the device against the CPU and other oracles", alone=True
        ),
        *(part for side in others for part in _of_flux(size, side, device)),
        *(_bench("loading", side, _loading(size, side, device)) for side in (first, *others)),
        _bench("pictures", "", _pictures(size, device)),
        Part("tests_of_processes", SUITE, PROCESSES, LIMIT_S, "what is left when a process dies", alone=True),
        _bench("launches", "", _launches(size)),
    )


SHOWS: Final = {
    "device_peaks": "what the device can do at most, and how near to it keys and values are gathered",
    "step_trace": "one masked step of 8 rows by streams; its Chrome trace lies beside it",
    "step_time": "one row's step in full ÷ masked, by mask ratio",
    "step_rows": "a step's time and memory by rows",
    "throughput": "edits a second beside static batching",
    "loading": "a picture's time where loading is slow, planned and taken",
    "pictures": "what speed costs in picture, on the model that ships",
    "launches": "operations and bytes of a step, counted without a device",
}
LIMIT_S: Final = 240.0
CELLS: Final = {"sdxl": 1024, "flux2-klein": 4096}
"""Of a picture of 1024²: a UNet's are tiles of 4x4 latent pixels."""
WORDS: Final = {"sdxl": 77, "flux2-klein": 512}


def _bench(benchmark: str, of: str, arguments: tuple[str, ...]) -> Part:
    """`of` is the side of its pictures, or a family; nothing where there is one such part."""
    shows = SHOWS[benchmark] + (f", pictures of {of}²" if of.isdigit() else f", {of}" if of else "")
    name = f"{benchmark}_{of}" if of else benchmark
    return Part(name, f"{BENCH}.{benchmark}", arguments, LIMIT_S, shows)


def _of_flux(size: str, side: str, device: str) -> tuple[Part, ...]:
    return (
        _bench("step_time", side, (*_shape(size, side, device), *_STEP_TIME[size])),
        _bench("step_rows", side, (*_shape(size, side, device), *_STEP_ROWS[size])),
        _bench("throughput", side, _throughput(size, side, device)),
    )


_STEP_TIME: Final = {
    FLUX: ("--forms", "kv", "--ratios", "0.05,0.11,0.2,0.5", "--repeats", "10"),
    TINY: ("--repeats", "1"),
}
_STEP_ROWS: Final = {FLUX: ("--rows", "1,4,8", "--repeats", "5"), TINY: ("--rows", "1,2", "--repeats", "1")}
_EDITS: Final = ("--steps", "4", "--templates", "1", "--repeats", "1", "--mixes", "")
_OF_FAMILY: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "step_time": _STEP_TIME,
    "step_rows": _STEP_ROWS,
    "throughput": {FLUX: ("--batch", "1,8", *_EDITS), TINY: ("--batch", "1,2", *_EDITS)},
}


def _of(benchmark: str, family: str, size: str, device: str) -> Part:
    return _bench(benchmark, family, _of_family(size, family, device, benchmark))


def _of_family(size: str, family: str, device: str, benchmark: str) -> tuple[str, ...]:
    """A published shape; mid-size to rehearse with, since families have none that is smaller."""
    cells, text = (CELLS[family], WORDS[family]) if size == FLUX else (256, 16)
    model, dtype = ("real", "bfloat16") if size == FLUX else ("mid", "float32")
    return (
        *("--family", family, "--model", model, "--device", device, "--dtype", dtype),
        *("--tokens", str(cells), "--text", str(text), *_OF_FAMILY[benchmark][size]),
    )


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
    mixed = ("--mixes", "") if side == "1024" else ("--edits", "8", "--divide", "2")
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
    return ("--device", device, "--dtype", dtype, *edits)


def _launches(size: str) -> tuple[str, ...]:
    """On `meta`: the same everywhere."""
    return () if size == FLUX else ("--model", "tiny", "--tokens", "256", "--text", "16", "--rows", "2")
