"""The mixtures that a profile measures, from one small row to a full batch, and slabs of many sizes. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from giornata.planning.operations import NetworkOperations, SequenceShape, StepWork, control_work, step_work
from giornata.wire.adapters import ControlWork
from giornata.wire.models import ModelCard
from giornata.wire.values import BlockMode

QUICK_SCALES: Final = (0.5, 1.0)
SCALES: Final = (0.5, 0.75, 1.0, 1.5)
"""Sides of pictures, as multiples of the model's own."""
QUICK_RATIOS: Final = (0.1, 0.35)
RATIOS: Final = (0.05, 0.15, 0.3, 0.6)
"""Ratios of mask to picture; the means of the traces in FlashPS lie between 0.11 and 0.35."""
QUICK_RANDOM: Final = 8
RANDOM: Final = 40
"""Mixtures in which every row is drawn for itself."""
QUICK_ROWS: Final = 4
PICTURES: Final = 8
"""Most tokens of a mixture, in pictures of the model's own size: costs are linear, and larger steps take long."""
LEAST_SIDE: Final = 4
"""Tokens; a picture below that is no picture."""
SETS: Final = 4
"""Most sets of LoRAs in a mixture: of a large network, each takes hundreds of megabytes."""

TokensBeside = Callable[[tuple[int, int]], int]
"""Tokens that stand beside a picture of so many tokens in height and width."""


@dataclass(frozen=True)
class RowSize:
    """All that a row's cost depends on."""

    height: int
    """Height of the picture in tokens."""
    width: int
    text: int
    """Text tokens of each sequence."""
    modes: tuple[BlockMode, ...]
    """The mode of every block."""
    ratio: float = 1.0
    """Ratio of mask to picture; 1 for a row without a region, whose modes are all `full`."""
    guided: bool = False
    """Two sequences, for true classifier-free guidance."""
    companions: int = 0
    """Tokens that blocks compute as the picture's: see :attr:`giornata_denoiser.rows.row.RowInputs.companions`."""
    prefix: int = 0
    """Tokens of each sequence that no step computes: see :attr:`giornata_denoiser.rows.row.RowInputs.prefix`."""
    lora: int = 0
    """Number of its set of LoRAs, from 1; 0: none."""
    lora_weights: float = 0.0
    """Weights in the factors of that set."""
    controlled: bool = False
    """Whether a ControlNet acts on it."""
    control_work: ControlWork | None = None
    """What that ControlNet computes."""

    def adapted(self, lora_weights: float, work: ControlWork | None) -> RowSize:
        """The same row: a set of LoRAs has so many weights, a ControlNet does such `work`, where it has one."""
        return replace(
            self,
            lora_weights=lora_weights if self.lora else 0.0,
            control_work=work if self.controlled else None,
        )

    def beside(self, companions: TokensBeside, prefix: TokensBeside) -> RowSize:
        """The same row with the tokens that a family has beside its picture."""
        grid = self.height, self.width
        return replace(self, companions=companions(grid), prefix=prefix(grid))

    @property
    def box(self) -> tuple[int, int]:
        """Height and width of the mask, in tokens: of the picture's own aspect."""
        if self.ratio == 1:
            return self.height, self.width
        height, width = (max(1, round(side * self.ratio**0.5)) for side in (self.height, self.width))
        return min(height, self.height - 1), min(width, self.width - 1)

    @property
    def shapes(self) -> tuple[SequenceShape, ...]:
        """Shapes of its sequences."""
        (height, width), tokens = self.box, self.height * self.width + self.companions
        computed = tokens if self.ratio == 1 else height * width
        sequences = 1 + self.guided
        control = self.control_work and control_work(
            self.control_work, text=self.text, image=self.height * self.width, sequences=sequences
        )
        shape = SequenceShape(
            self.text,
            tokens,
            computed,
            prefix=self.prefix,
            low_rank=self.lora_weights,
            control=control or 0.0,
        )
        return (shape,) * sequences

    @property
    def tokens(self) -> int:
        """Text and image tokens that it computes where nothing is `full`."""
        return sum(shape.text + shape.computed for shape in self.shapes)


@dataclass(frozen=True)
class StepShape:
    """The rows of one step."""

    rows: tuple[RowSize, ...]

    def beside(self, companions: TokensBeside, prefix: TokensBeside) -> StepShape:
        """:meth:`RowSize.beside` of every row."""
        return StepShape(tuple(row.beside(companions, prefix) for row in self.rows))

    def adapted(self, lora_weights: float, work: ControlWork | None) -> StepShape:
        """:meth:`RowSize.adapted` of every row."""
        return StepShape(tuple(row.adapted(lora_weights, work) for row in self.rows))

    def work(self, operations: NetworkOperations) -> StepWork:
        """Return what the whole step computes in a network of these operations."""
        sequences = [(shape, row.modes) for row in self.rows for shape in row.shapes]
        sets = {row.lora for row in self.rows if row.lora}
        return step_work(operations, *zip(*sequences, strict=True))._replace(segments=float(len(sets)))

    @property
    def length(self) -> int:
        """Tokens of all sequences, computed or not."""
        return sum(shape.text + shape.image for row in self.rows for shape in row.shapes)


@dataclass(frozen=True)
class ProfileScope:
    """Within what a profile measures."""

    card: ModelCard
    blocks: int
    rows: int
    """Most rows of a step."""
    tokens: int
    """Most tokens of a step with more than one row."""
    quick: bool = False
    modes: tuple[BlockMode, ...] = (BlockMode.HIDDEN, BlockMode.KV)
    """In which blocks take from a template; where any of them may be projected, each block has a mode of its own."""
    joint: bool = True
    """Whether text passes the blocks beside the picture."""
    controls: bool = True
    """Whether there are ControlNets for the network."""

    @property
    def grids(self) -> tuple[tuple[int, int], ...]:
        """Height and width in tokens: a square for every scale, and one upright picture."""
        side = self.card.native_size / self.card.pixel_multiple
        scales = QUICK_SCALES if self.quick else SCALES
        sides = dict.fromkeys(max(LEAST_SIDE, round(side * scale)) for scale in scales)
        upright = (max(LEAST_SIDE, round(side * 1.25)), max(LEAST_SIDE, round(side * 0.75)))
        return (*((one, one) for one in sides), upright)

    @property
    def texts(self) -> tuple[int, ...]:
        """Text tokens; prompts are padded to the last of these."""
        most = self.card.max_text_tokens
        if not self.joint:
            return (0,)
        return tuple(sorted({max(1, most // 2), most}))

    @property
    def ratios(self) -> tuple[float, ...]:
        """Ratios of masks."""
        return QUICK_RATIOS if self.quick else RATIOS

    @property
    def counts(self) -> tuple[int, ...]:
        """Numbers of rows: powers of two, and the most."""
        most = min(self.rows, QUICK_ROWS) if self.quick else self.rows
        powers = [2**power for power in range(most.bit_length())]
        return tuple(sorted({*powers, most}))

    @property
    def most_tokens(self) -> int:
        """Most tokens of a mixture of several rows, computed or not."""
        own = (self.card.native_size // self.card.pixel_multiple) ** 2 + self.card.max_text_tokens
        return min(self.tokens, PICTURES * own)


def list_mixtures(extent: ProfileScope, seed: int, *, guided: bool = False) -> tuple[StepShape, ...]:
    """Return what is to be measured.

    Rows of one size in growing numbers, single rows of every mode, rows with one set of LoRAs and with many, rows of
    which all or half have a ControlNet, and random batches. All rows are `guided` where that is asked.
    """
    full, kv = (BlockMode.FULL,) * extent.blocks, (BlockMode.KV,) * extent.blocks
    text, ratio = extent.texts[-1], extent.ratios[len(extent.ratios) // 2]
    swept = [
        StepShape((RowSize(height, width, text, modes, share),) * count)
        for height, width in extent.grids
        for modes, share in ((full, 1.0), (kv, ratio))
        for count in extent.counts
    ]
    single = [StepShape((size,)) for size in masked_sizes(extent)]
    small, large, most = extent.grids[0], extent.grids[-2], extent.counts[-1]
    sizes = [
        (size, count)
        for (height, width), count in sorted({(small, 1), (small, most), (large, 1), (large, min(2, most))})
        for size in (RowSize(height, width, text, full), RowSize(height, width, text, kv, ratio))
    ]
    adapted = [
        StepShape(tuple(replace(size, lora=lora) for lora in sets))
        for size, count in sizes
        for sets in dict.fromkeys(((1,) * count, _spread(count)))
    ]
    controlled = [
        StepShape(tuple(replace(size, controlled=row < acting) for row in range(count)))
        for size, count in sizes
        for acting in sorted({(count + 1) // 2, count})
        if extent.controls
    ]
    chance = random.Random(seed)  # noqa: S311 - a design, not a secret
    drawn = [
        StepShape(tuple(_row(extent, chance) for _ in range(chance.randint(1, extent.counts[-1]))))
        for _ in range(QUICK_RANDOM if extent.quick else RANDOM)
    ]
    found = (*swept, *single, *adapted, *controlled, *drawn)
    if guided:
        found = tuple(StepShape(tuple(replace(row, guided=True) for row in one.rows)) for one in found)
    every = dict.fromkeys(found)
    return tuple(one for one in every if len(one.rows) == 1 or one.length <= extent.most_tokens)


def _spread(rows: int) -> tuple[int, ...]:
    """Sets of LoRAs of so many rows: as many sets as may be, rows of one set side by side."""
    sets = min(SETS, rows)
    return tuple(1 + row * sets // rows for row in range(rows))


def masked_sizes(extent: ProfileScope) -> tuple[RowSize, ...]:
    """Rows of every picture and mask that take one form in all blocks; slabs of both kinds are loaded for them."""
    return tuple(
        RowSize(height, width, extent.texts[-1], (mode,) * extent.blocks, ratio)
        for height, width in extent.grids
        for ratio in extent.ratios
        for mode in extent.modes
    )


def unlike(size: RowSize) -> RowSize:
    """A row in the modes of `size` whose text and picture are of other lengths, companions not counted."""
    return replace(size, height=size.height + 1, text=size.text - size.text // 2)


def _row(extent: ProfileScope, chance: random.Random) -> RowSize:
    height, width = chance.choice(extent.grids)
    apart = (None,) if BlockMode.HIDDEN in extent.modes else ()
    modes = chance.choice((*((mode,) * extent.blocks for mode in (BlockMode.FULL, *extent.modes)), *apart))
    if modes is None:  # every block for itself, as a planner may want it
        modes = tuple(chance.choice(list(BlockMode)) for _ in range(extent.blocks))
    whole = set(modes) == {BlockMode.FULL}
    guided = extent.card.takes_negative_prompt and chance.random() < 0.25
    ratio = 1.0 if whole else chance.choice(extent.ratios)
    return RowSize(height, width, chance.choice(extent.texts), modes, ratio, guided)
