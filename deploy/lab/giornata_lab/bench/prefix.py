"""How much longer is a step that computes a row's prefix once more, instead of taking what was kept of it?

``python -m giornata_lab.bench.prefix`` prints both for a prompt of Qwen-Image 2.1 and for one reference of Flux.2
Klein-KV, in full and with a mask, measured in turns, in float32 on the processor. Decision record 0012 tells of
prefixes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import isqrt
from types import SimpleNamespace
from typing import Any, Final

import torch
from diffusers import Flux2Transformer2DModel, QwenImage21Transformer2DModel
from torch import Tensor

from giornata.packed.attention import CachedKVRecorder
from giornata.packed.compute_set import BlockInputs, CachedTokens, Region, make_region
from giornata.scheduling.batch import RowKey
from giornata.wire.values import BlockMode
from giornata_denoiser.blocks.recorders import OwnKeysValues
from giornata_denoiser.engine.batch_tensors import assemble
from giornata_denoiser.families.driven.flux2 import Flux2KleinKV
from giornata_denoiser.families.driven.qwen_image import QwenImage21
from giornata_denoiser.families.protocol import ModelFamily
from giornata_denoiser.families.rows import build_row, text_shapes
from giornata_denoiser.families.sampling import FlowMatching, shifted_always
from giornata_denoiser.rows.row import Row
from giornata_lab.bench.options import clock_of, shared
from giornata_lab.bench.reporting.report import write
from giornata_lab.flags import parsed

MASK: Final = 0.11
"""The production trace's mean ratio."""
HEADS: Final[dict[str, Any]] = {"attention_head_dim": 64, "num_attention_heads": 12}
CHANNELS: Final = 64
Step = Callable[[], Tensor]


def options_of(arguments: Sequence[str] | None = None) -> SimpleNamespace:
    """Flags."""
    taken = {"tokens", "text", "threads", "repeats", "processor_time", "seed"}
    flags = shared(tokens=1024, text=512, repeats=5)
    return parsed(__doc__, [flag for flag in flags if flag.name in taken], arguments)


def qwen() -> ModelFamily:
    """Qwen-Image 2.1 with 12 blocks of width 768."""
    made: Any = QwenImage21Transformer2DModel
    transformer = made(num_layers=12, **HEADS, context_in_dim=CHANNELS, axes_dims_rope=(16, 24, 24))
    return _family(QwenImage21(_frozen(transformer)))


def klein() -> ModelFamily:
    """Klein-KV with 4 and 8 blocks of width 768."""
    made: Any = Flux2Transformer2DModel
    rope = {"axes_dims_rope": (16, 16, 16, 16), "guidance_embeds": False}
    sizes = {"in_channels": CHANNELS, "joint_attention_dim": CHANNELS, "num_single_layers": 8}
    return _family(Flux2KleinKV(_frozen(made(num_layers=4, **HEADS, **sizes, **rope))))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write ``out/bench/prefix.json``."""
    options = options_of(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    lines = [
        {"prefix": name} | _line(of, text, masked, options)
        for name, made, text in (("text", qwen, options.text), ("reference", klein, 32))
        for of in (made(),)
        for masked in (False, True)
    ]
    write("prefix", lines, workload={**vars(options), "model": "12 blocks of width 768", "mask": MASK})


def _line(of: ModelFamily, text: int, masked: bool, options: SimpleNamespace) -> dict[str, Any]:
    row, clock = _row(of, text, options), clock_of(options)
    where, uses = None, [BlockInputs()]
    with torch.inference_mode():
        if masked:
            where = _region(row)
            kept = OwnKeysValues(where.outside, replace(row, region=where).own_tokens[0])
            _step(of, row, [BlockInputs(recorder=CachedKVRecorder(kept))])()
            uses = [BlockInputs(CachedTokens((BlockMode.KV,) * of.depth, kept))]
        step, both = _step(of, row, uses, where), _anew(of, row, uses, where)
        step()
        times = [(_timed(step, clock), _timed(both, clock)) for _ in range(options.repeats)]
    ratios = [anew / once for once, anew in times]
    return {
        "tokens": sum(row.prefix),
        "masked": masked,
        "anew ÷ kept": round(statistics.median(ratios), 2),
        "spread": f"{min(ratios):.2f}-{max(ratios):.2f}",
        "kept ms": round(statistics.median(once for once, _ in times), 1),
        "anew ms": round(statistics.median(anew for _, anew in times), 1),
    }


def _timed(step: Step, clock: Callable[[], float]) -> float:
    began = clock()
    step()
    return (clock() - began) * 1e3


def _step(of: ModelFamily, row: Row, uses: Sequence[BlockInputs], where: Region | None = None) -> Step:
    """A forward with what was prepared when the row joined."""
    assembly = assemble(of, [replace(row, region=where)])
    return lambda: of.network.predict(assembly.batch, row.latent, assembly.conditioning, [0], uses=uses)


def _anew(of: ModelFamily, row: Row, uses: Sequence[BlockInputs], where: Region | None) -> Step:
    """A forward that prepares the row once more."""

    def step() -> Tensor:
        return _step(of, row, uses, where)()

    return step


def _row(of: ModelFamily, text: int, options: SimpleNamespace) -> Row:
    """An edit of noise; Klein-KV takes its picture as a reference."""
    side = isqrt(options.tokens)
    generator = torch.Generator().manual_seed(options.seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    cells = side * side
    return build_row(
        of,
        RowKey("bench", 0, 0),
        grid=(side, side),
        track=of.schedule.track(sampler=of.schedule.default_sampler, steps=4, strength=1.0, cells=cells),
        text={name: random(*shape) for name, shape in text_shapes(of, text).items()},
        conditioning={name: random(cells, width) for name, width in of.network.conditioning.items()},
        guidance_scale=1.0,
    )


def _region(row: Row) -> Region:
    touched = torch.zeros(row.grid, dtype=torch.bool)
    height, width = (max(1, round(side * MASK**0.5)) for side in row.grid)
    touched[:height, :width] = True
    found = make_region(touched)
    if found is None:
        raise ValueError(f"received a picture of {row.grid} tokens, of which a mask leaves nothing")
    return found


def _frozen(transformer: Any) -> Any:
    return transformer.eval().requires_grad_(requires_grad=False)


def _family(network: QwenImage21 | Flux2KleinKV) -> ModelFamily:
    return ModelFamily(network.text, FlowMatching({}, shifted_always), network)


if __name__ == "__main__":
    main()
