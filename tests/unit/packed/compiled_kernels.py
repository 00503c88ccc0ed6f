"""``python -m tests.unit.packed.compiled_kernels CAPABILITY…``: Triton's kernels, compiled for GPUs that are not here.

Prints as JSON, by capability and kernel at the shapes of published models: registers and spilled bytes of a thread, and
how many loads and stores of global memory there are of each width. Run without `TRITON_INTERPRET`. ptxas comes with
Triton.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, Final

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from giornata.packed import kernels

TOOLS: Final = Path(triton.__file__).parent / "backends/nvidia/bin"
TYPES: Final = {
    **dict.fromkeys(("sequence", "positions", "table", "places"), "*i64"),
    **dict.fromkeys(("cosine", "sine"), "*fp32"),
    **dict.fromkeys(("eps", "query_eps", "key_eps"), "fp32"),
    **dict.fromkeys(("stored", "own"), "i32"),
}
"""Of arguments; strides are i32 as well, and all else is a pointer to bfloat16."""


def rows(kernel: Any, channels: int, *, one: bool) -> tuple[Any, dict[str, Any], int]:
    block = triton.next_power_of_2(channels)
    return kernel, {"ONE": one, "CHANNELS": channels, "BLOCK": block}, kernels.warps(block)


def rotate(heads: int, width: int, query: bool, value: bool, moves: bool) -> tuple[Any, dict[str, Any], int]:
    blocks = triton.next_power_of_2(heads), triton.next_power_of_2(width)
    what = {"HAS_QUERY": query, "HAS_VALUE": value, "MOVES": moves, "HEADS": heads, "WIDTH": width}
    constants = {**what, "HEAD_BLOCK": blocks[0], "WIDTH_BLOCK": blocks[1]}
    return kernels._rotate, constants, kernels.warps(blocks[0] * blocks[1])


def gather(channels: int, aligned: int = kernels.ALIGNMENT) -> tuple[Any, dict[str, Any], int]:
    block = triton.next_power_of_2(channels)
    constants = {"FIELDS": kernels.FIELDS, "CHANNELS": channels, "BLOCK": block, "ALIGNED": aligned}
    return kernels._gather, constants, min(32, max(1, block // 512))


GELU: Final = {"X_CHANNELS": 3072, "CHANNELS": 15360, "BLOCK": 1024}
CASES: Final = {
    "flux modulate, one row": rows(kernels._modulate, 3072, one=True),
    "flux modulate": rows(kernels._modulate, 3072, one=False),
    "flux gate": rows(kernels._gate, 3072, one=False),
    "flux gelu": (kernels._gelu_beside, GELU, 4),
    "flux rotate, two streams": rotate(24, 128, query=True, value=True, moves=True),
    "flux rotate, one stream": rotate(24, 128, query=True, value=False, moves=False),
    "flux rotate, hidden": rotate(24, 128, query=False, value=False, moves=False),
    "flux gather": gather(3072),
    "z-image gather": gather(3840),
    "sdxl gather": gather(4 * 640),
    "flux gather, unaligned": gather(3072, aligned=1),
}


def compiled(kernel: Any, constants: dict[str, Any], warps: int, capability: int) -> dict[str, Any]:
    names = [each.name for each in kernel.params]
    given = [name for name in names if name not in constants]
    signature = dict.fromkeys(constants, "constexpr")
    signature |= {name: TYPES.get(name, "i32" if name.endswith("stride") else "*bf16") for name in given}
    aligned = [  # as the launcher finds them: tensors of 16 bytes, strides of 16 elements
        each.num
        for each in kernel.params
        if each.name in given
        and (signature[each.name].startswith("*") or each.name.endswith("stride"))
        and not each.do_not_specialize_on_alignment
    ]
    source = ASTSource(
        kernel,
        {name: signature[name] for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(place,): [["tt.divisibility", 16]] for place in aligned},
    )
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        told = subprocess.run(
            [TOOLS / "cuobjdump", "--dump-resource-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    uses = {what: int(count) for what, count in re.findall(r"(REG|STACK|LOCAL):(\d+)", told)}
    widths = re.findall(
        r"(ld|st)\.global[\w:.]*?\.((?:v\d\.)?[bfu]\d+)", re.sub(r"\.L\d::\w+", "", made.asm["ptx"])
    )
    return {
        "registers": uses["REG"],
        "spilled": uses["STACK"] + uses["LOCAL"],
        "moves": Counter(f"{way} {width}" for way, width in widths),
    }


if __name__ == "__main__":
    told = {of: {name: compiled(*case, int(of)) for name, case in CASES.items()} for of in sys.argv[1:]}
    json.dump(told, sys.stdout)
