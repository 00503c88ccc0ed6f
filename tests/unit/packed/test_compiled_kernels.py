"""Triton's kernels as GPUs get them: compiled, not run, since what the interpreter takes the compiler need not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest

REGISTERS = {"modulate": 40, "gate": 40, "gelu": 40, "rotate": 64, "gather": 64}
"""Most of a thread, by kernel: with 64, a multiprocessor runs 1,024 threads of it at a time."""
NARROW = {"flux rotate, two streams": 48, "flux rotate, one stream": 48, "flux rotate, hidden": 24}
"""Loads of two bytes, of each channel's partner in the rotation; their lines are in the cache by then."""
WIDE = {
    "flux modulate, one row": 6,
    "flux modulate": 6,
    "flux gate": 6,
    "flux gelu": 2,
    "flux rotate, two streams": 16,
    "flux rotate, one stream": 14,
    "flux rotate, hidden": 7,
    **dict.fromkeys(("flux gather", "z-image gather", "sdxl gather"), 26),
    "flux gather, unaligned": 2,
}
"""Loads of 16 bytes."""


CAPABILITIES = [
    pytest.param(number, marks=pytest.mark.slow if number == "90" else pytest.mark.long)
    for number in ("80", "90", "120")
]


@pytest.fixture(scope="module", params=CAPABILITIES, ids="sm_{}".format)
def kernels(request: pytest.FixtureRequest) -> dict[str, Any]:
    """By kernel and shape: what the compiler made of it for a capability."""
    if find_spec("triton") is None:
        pytest.skip("there is no Triton for this platform")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.unit.packed.compiled_kernels", request.param]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return told[request.param]


def test_kernels_keep_all_they_compute_in_few_registers(kernels: dict[str, Any]) -> None:
    assert len(kernels) == len(WIDE)
    for name, made in kernels.items():
        assert made["spilled"] == 0, name
        [most] = [most for kernel, most in REGISTERS.items() if kernel in name]
        assert made["registers"] <= (most if "unaligned" not in name else 128), name


def test_kernels_move_sixteen_bytes_a_thread(kernels: dict[str, Any]) -> None:
    """Of an address that is known as aligned; the gather took seven times as long with loads of one byte."""
    for name, made in kernels.items():
        moves = made["moves"]
        assert moves.get("ld v4.b32", 0) == WIDE[name], name
        narrow = sum(count for move, count in moves.items() if move.endswith((".b8", " b8", " b16", " b32")))
        assert "unaligned" in name or narrow == NARROW.get(name, 0), name
        assert not any(move.startswith("st") and move != "st v4.b32" for move in moves), name
