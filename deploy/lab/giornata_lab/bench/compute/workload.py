"""What the benchmarks serve: edits with masks, step counts and templates as in production, and when they arrive. Pure.

The figures are those of :mod:`giornata_lab.loadgen.workload`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name
from torch import Tensor

from giornata.planning.operations import NetworkOperations, SequenceShape, StepWork, step_work
from giornata.wire.models import BlockSpec
from giornata.wire.values import BlockMode
from giornata_lab.loadgen import workload
from giornata_lab.loadgen.workload import Mix, at_percentile, chosen, zipf


def grown(touched: Tensor, halo: int) -> Tensor:
    """(height, width) bool: the tokens `touched`, and all within `halo` tokens of them (Chebyshev distance)."""
    side = 2 * halo + 1
    return F.max_pool2d(touched.cpu().to(torch.float32)[None, None], side, stride=1, padding=halo)[0, 0] > 0


PERCENTILES: Final = workload.MASK_RATIOS["production"]

MIXES: Final[Mapping[str, Mix]] = {
    "production": workload.STEPS,
    "8/20/28/50": dict.fromkeys((8, 20, 28, 50), 1.0),
}
"""Step counts of requests."""
IMAGES: Final[Mapping[str, Mix]] = {
    "one": {1: 1.0},
    "production": workload.IMAGES,
}
"""Pictures a request asks for."""


@dataclass(frozen=True)
class WorkloadEdit:
    """One row that is to be served."""

    index: int
    template: int
    ratio: float
    """Ratio of the mask to the picture."""
    top: float
    left: float
    """Where the square mask lies: shares of the room that it leaves."""
    steps: int


@dataclass(frozen=True)
class Arrival:
    """One request."""

    at_s: float
    edits: tuple[WorkloadEdit, ...]


def edits(count: int, mix: Mix, *, templates: int, seed: int, divide: int = 1) -> list[WorkloadEdit]:
    """`count` edits whose mask ratios and step counts follow production even where they are few.

    Stratified: one edit of each of `count` equal shares of both distributions, paired and ordered by chance.

    Args:
        count: of edits.
        mix: of step counts.
        templates: whose popularity follows Zipf's law.
        seed: of chance.
        divide: step counts by this, at least to 1.
    """
    chance = random.Random(seed)  # noqa: S311 - a workload, no secret
    shares = [(place + 0.5) / count for place in range(count)]
    ratios = [at_percentile(PERCENTILES, share) for share in shares]
    steps = [max(1, round(chosen(mix, share) / divide)) for share in shares]
    chance.shuffle(ratios)
    chance.shuffle(steps)
    popular = zipf(templates, workload.ZIPF)
    return [
        WorkloadEdit(index, chosen(popular, chance.random()), ratio, chance.random(), chance.random(), many)
        for index, (ratio, many) in enumerate(zip(ratios, steps, strict=True))
    ]


def arrivals(times: Sequence[float], of: Sequence[WorkloadEdit], images: Mix, seed: int) -> list[Arrival]:
    """A request at each of `times`: one edit of `of`, in order and again from the first, in some pictures of `images`.

    Pictures of one request share template, mask and step count.
    """
    chance = random.Random(seed)  # noqa: S311 - likewise
    found: list[Arrival] = []
    index = 0
    for number, at_s in enumerate(times):
        edit, many = of[number % len(of)], chosen(images, chance.random())
        rows = tuple(
            WorkloadEdit(index + place, edit.template, edit.ratio, edit.top, edit.left, edit.steps)
            for place in range(many)
        )
        found.append(Arrival(at_s, rows))
        index += many
    return found


def square(edit: WorkloadEdit, side: int) -> Tensor:
    """(side, side) bool, in tokens: the edit's mask, the square next to its ratio, of one token at least."""
    width = min(side, max(1, round(side * edit.ratio**0.5)))
    top, left = (round(share * (side - width)) for share in (edit.top, edit.left))
    touched = torch.zeros(side, side, dtype=torch.bool)
    touched[top : top + width, left : left + width] = True
    return touched


def multiplications(work: StepWork) -> float:
    """Multiplications of all kinds together."""
    return work.linear + work.attention + work.convolution + work.low_rank + work.control


def operation_limit(specs: Sequence[BlockSpec], shape: SequenceShape, mode: BlockMode) -> float:
    """What steps in `mode` can gain at most by their multiplications, projections of outside tokens among them."""
    operations = NetworkOperations(specs)

    def multiplied(of: SequenceShape, how: BlockMode) -> float:
        return multiplications(step_work(operations, [of], [(how,) * operations.blocks]))

    return multiplied(replace(shape, padding=0), BlockMode.FULL) / multiplied(shape, mode)


def token_limit(text: int, tokens: int, computed: Sequence[int], padding: int = 0) -> float:
    """(T + L) / (T + M) of several edits: tokens in full over tokens computed, text included, halo counted in M.

    Args:
        text: tokens of each edit's prompt.
        tokens: of each edit's picture.
        computed: of each edit's picture, with the halo.
        padding: tokens of the prompt that are kept, not computed.
    """
    return len(computed) * (text + tokens) / sum(text - padding + own for own in computed)
