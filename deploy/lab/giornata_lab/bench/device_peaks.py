"""What a device can do at most, which other figures are held against, and how near to it keys and values are gathered.

``python -m giornata_lab.bench.device_peaks`` times a matrix product, copies, attention, and the kernel that
dequantises what a step of masked rows takes, also from addresses that are no multiples of 16. Bytes are those that
must be read and written once.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from giornata.packed import elementwise
from giornata.packed.attention import (
    KVPages,
    PageDestination,
    ProjectedKV,
    QuantisedTensor,
    choose_attention,
    grouped,
)
from giornata.packed.packing import Segments
from giornata_lab.bench.harness import clock_of, in_turns, write
from giornata_lab.flags import option, parsed

HEADS, WIDTH = 24, 128
"""FLUX.1-dev's."""
ROWS, TEXT, PICTURE, COMPUTED = 8, 512, 4096, 700
"""Rows of a step, tokens of a prompt, of a picture of 1024², and those that a mask of 0.11 computes."""
SMALL: Final = 16
"""Everything is so many times smaller on a CPU."""


@torch.inference_mode()
def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write ``out/bench/device_peaks.json``."""
    flags = [
        option("--device", default="cuda"),
        option("--repeats", type=int, default=20),
        option("--processor-time", is_flag=True, help="what this process computed, not the clock"),
    ]
    options = parsed(__doc__, flags, arguments)
    device = torch.device(options.device)
    lines = [_line(name, unit, amount, run, device, options) for name, unit, amount, run in _works(device)]
    write("device_peaks", lines, workload=vars(options))


Work = tuple[str, str, float, Callable[[], object]]
"""Name, unit, how many units a call does, and the call."""


def _works(device: torch.device) -> list[Work]:
    on_gpu = device.type == "cuda"
    side = 8192 if on_gpu else 8192 // SMALL
    dtype = torch.bfloat16
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    block = torch.randn((1 << 30) // (1 if on_gpu else SMALL * SMALL), device=device, dtype=dtype)
    other, host = torch.empty_like(block), torch.empty(block.shape, dtype=dtype, pin_memory=on_gpu)
    works: list[Work] = [
        (f"matrix product {side}³", "TFLOP/s", 2 * side**3 / 1e12, lambda: left @ right),
        ("copy on the device", "GB/s", 2 * block.nbytes / 1e9, lambda: other.copy_(block)),
        ("copy from pinned memory", "GB/s", block.nbytes / 1e9, lambda: other.copy_(host, non_blocking=True)),
        ("copy to pinned memory", "GB/s", block.nbytes / 1e9, lambda: host.copy_(other, non_blocking=True)),
    ]
    return works + _attention(device, dtype) + _gathers(device, dtype)


def _attention(device: torch.device, dtype: torch.dtype) -> list[Work]:
    """Of rows in full, each over itself alone."""
    tokens = (TEXT + PICTURE) // (1 if device.type == "cuda" else SMALL)
    own = Segments((tokens,) * ROWS, device)
    query, key, value = torch.randn(3, ROWS * tokens, HEADS, WIDTH, device=device, dtype=dtype).unbind()
    attend = choose_attention(device, dtype, elementwise.choose_elementwise(device, dtype).gather)
    operations = 4 * ROWS * tokens**2 * HEADS * WIDTH / 1e12
    name = f"attention, {ROWS} rows of {tokens}"

    def by_cudnn() -> None:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            grouped(query, key, value, own, {})

    works: list[Work] = [
        (f"{name}, as chosen", "TFLOP/s", operations, lambda: attend(query, key, value, own, {})),
        (f"{name}, as one batch", "TFLOP/s", operations, lambda: grouped(query, key, value, own, {})),
    ]
    if device.type == "cuda":
        works.append((f"{name}, as one batch by cuDNN", "TFLOP/s", operations, by_cudnn))
    return works


def _gathers(device: torch.device, dtype: torch.dtype) -> list[Work]:
    """Of masked rows that take the same template, with corrections in 8 bits."""
    gather = elementwise.choose_elementwise(device, dtype).gather
    picture, computed, text = (
        n // (1 if device.type == "cuda" else SMALL) for n in (PICTURE, COMPUTED, TEXT)
    )
    own_tokens, outside = text + computed, picture - computed
    channels = HEADS * WIDTH

    length = own_tokens + outside

    def levels(tokens: int, first: int) -> QuantisedTensor:
        data = torch.randint(0, 256, (first + tokens * channels,), device=device, dtype=torch.uint8)
        return QuantisedTensor(
            data[first:].view(tokens, channels), *torch.rand(2, channels, device=device).unbind()
        )

    def placed(first: int) -> list[PageDestination]:
        kept_key, kept_value = levels(picture, first), levels(picture, first)

        def pages() -> KVPages:
            index = torch.randperm(picture, device=device)[:outside]
            return KVPages(index, kept_key, kept_value, levels(outside, first), levels(outside, first))

        return [PageDestination(pages(), row * length + own_tokens) for row in range(ROWS)]

    places = torch.cat([row * length + torch.arange(own_tokens, device=device) for row in range(ROWS)])
    own_key, own_value = torch.randn(2, ROWS * own_tokens, HEADS, WIDTH, device=device, dtype=dtype).unbind()
    own = ProjectedKV(own_key, own_value, places)
    key, value = (torch.empty(ROWS * length, HEADS, WIDTH, device=device, dtype=dtype) for _ in range(2))
    read = ROWS * outside * channels * 2 * 2 + own.key.nbytes * 2  # keys and values, levels and corrections
    amount = (read + key.nbytes + value.nbytes) / 1e9
    return [
        (f"gather, {name}", "GB/s", amount, partial(gather, placed(first), own, key, value))
        for first, name in enumerate(("aligned", "not aligned"))
    ]


def _line(
    name: str, unit: str, amount: float, run: Callable[[], object], device: torch.device, options: Any
) -> dict[str, Any]:
    found = in_turns({name: run}, options.repeats, clock=clock_of(options), device=device, warm_up=3)
    times = [time_ms / 1e3 for time_ms in found[name]]
    return {
        "what": name,
        "unit": unit,
        "median": round(amount / statistics.median(times), 1),
        "spread": f"{amount / max(times):.0f}-{amount / min(times):.0f}",
        "ms": round(statistics.median(times) * 1e3, 3),
    }


if __name__ == "__main__":
    main()
