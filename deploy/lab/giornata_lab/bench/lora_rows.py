"""A masked step of rows under LoRAs of their own, beside the same step without any.

``python -m giornata_lab.bench.lora_rows`` prints ratios to the step without, both measured in turns: a LoRA of its
own for each row on all linear layers of the blocks, on those of attention alone, two for each row, and one for all
rows. `by operations` counts the multiplications of the blocks' linear layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from giornata.packed.low_rank import SequenceLoras, low_rank
from giornata_denoiser.families.network import ModelFamily
from giornata_lab.bench.compute.models import described, transformer_of
from giornata_lab.bench.compute.rows import Batches
from giornata_lab.bench.harness import clock_of, compared, in_turns, median_ms, write
from giornata_lab.bench.options import rows_of, shared
from giornata_lab.flags import option, parsed

NONE: Final = "none"
SIZE: Final = 0.02
"""Standard deviation of factors."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write ``out/bench/lora_rows.json``."""
    options = parsed(
        __doc__,
        [
            *shared(tokens=256, text=32, repeats=3),
            option("--rows", type=int, default=8, help="of a step"),
            option("--rank", type=int, default=16, help="of every LoRA"),
            option("--mask", type=float, default=0.2, help="mask ratio of every row"),
        ],
        arguments,
    )
    rows = rows_of(options)
    batches = Batches(rows, options.mask)
    kinds = _kinds(rows.family, options.rows, options.rank)
    steps = {
        name: batches.prepared(options.rows, masked=True, low_ranks=sets) for name, sets in kinds.items()
    }
    times = in_turns(steps, options.repeats, clock=clock_of(options), device=rows.family.device)
    lines = [_line(name, found, times[NONE], kinds[name], rows.family) for name, found in times.items()]
    workload = {**vars(options), "model": described(rows.family), "setting": rows.setting.as_dict()}
    write("lora_rows", lines, workload=workload)


def _kinds(family: ModelFamily, rows: int, rank: int) -> dict[str, list[SequenceLoras | None]]:
    """Return which set each row has, by what the sets are."""
    loras = [tensors_of(family, rank, seed) for seed in range(rows)]
    own = [low_rank(str(index), [(lora, 1.0)]) for index, lora in enumerate(loras)]
    attention = [
        low_rank(str(index), [({name: part for name, part in lora.items() if ".attn." in name}, 1.0)])
        for index, lora in enumerate(loras)
    ]
    two = [
        low_rank(str(index), [(lora, 1.0), (loras[(index + 1) % rows], 0.5)])
        for index, lora in enumerate(loras)
    ]
    return {
        NONE: [],
        "one each, all layers": [*own],
        "one each, attention": [*attention],
        "two each, all layers": [*two],
        "one for all, all layers": [own[0]] * rows,
    }


def tensors_of(family: ModelFamily, rank: int, seed: int) -> dict[str, Tensor]:
    """A random LoRA of all linear layers of the blocks, modulation among them, as its canonical file."""
    transformer = transformer_of(family)
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for path, layer in _layers(transformer):
        for part, shape in (("down", (rank, layer.in_features)), ("up", (layer.out_features, rank))):
            values = SIZE * torch.randn(shape, generator=generator)
            found[f"{path}.{part}"] = values.to(family.device, family.dtype)
    return found


def _layers(transformer: nn.Module) -> list[tuple[str, nn.Linear]]:
    return [
        (path, layer)
        for path, layer in transformer.named_modules()
        if isinstance(layer, nn.Linear) and "blocks." in path
    ]


def _line(
    name: str,
    times: Sequence[float],
    base: Sequence[float],
    sets: Sequence[SequenceLoras | None],
    family: ModelFamily,
) -> dict[str, Any]:
    return {
        "LoRAs": name,
        **compared("÷ none", times, base),
        "by operations": round(1 + _added(sets, family), 3),
        "median ms": median_ms(times),
    }


def _added(sets: Sequence[SequenceLoras | None], family: ModelFamily) -> float:
    """Multiplications of factors ÷ those of the weights, of the layers that a step computes."""
    layers = [(path, layer) for path, layer in _layers(transformer_of(family)) if "norm" not in path]
    if not sets or sets[0] is None:
        return 0.0
    found = (sets[0].modules.get(path) for path, _ in layers)
    factors = sum(factors.down.numel() + factors.up.numel() for factors in found if factors is not None)
    return factors / sum(layer.weight.numel() for _, layer in layers)


if __name__ == "__main__":
    main()
