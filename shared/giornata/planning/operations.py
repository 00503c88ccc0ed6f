"""The operations of a step, counted by kind from the specs of a network's blocks, and what they cost. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from operator import mul
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from giornata.wire.adapters import ControlCard, ControlKind, ControlWork
from giornata.wire.models import BlockSpec
from giornata.wire.values import BlockMode

LEAST_LEVELS: Final = 4
"""Below this many recorded noise levels the picture suffers."""


def each_block(specs: Iterable[BlockSpec]) -> tuple[BlockSpec, ...]:
    """The spec of every block, in order; each counts one."""
    return tuple(spec.model_copy(update={"count": 1}) for spec in specs for _ in range(spec.count))


def group_blocks(specs: Iterable[BlockSpec]) -> tuple[BlockSpec, ...]:
    """Equal blocks as one spec that counts them, in the order in which the first of each comes."""
    found: list[BlockSpec] = []
    for one in specs:
        alike = [one.model_copy(update={"count": other.count}) == other for other in found]
        if any(alike):
            place = alike.index(True)
            found[place] = one.model_copy(update={"count": found[place].count + one.count})
        else:
            found.append(one)
    return tuple(found)


def is_all_or_nothing(specs: Iterable[BlockSpec]) -> bool:
    """Whether a step takes all of these blocks from a recording or none: there is nothing to plan or to leave out."""
    return any(spec.together for spec in specs)


def taking_modes(specs: Sequence[BlockSpec]) -> tuple[BlockMode, ...]:
    """The modes in which any of the blocks takes from a recording."""
    return tuple(
        mode for mode in (BlockMode.HIDDEN, BlockMode.KV) if any(spec.channels([mode]) for spec in specs)
    )


def recording_bytes(specs: Sequence[BlockSpec], modes: Collection[BlockMode], cells: int, bits: int) -> int:
    """Bytes that one noise level of a recording for `modes` keeps, ranges and headers not counted.

    `cells` are those of the picture at the finest grain, and values have so many `bits`.
    """
    return sum(spec.count * (cells // spec.grain**2) * spec.cell_bits(modes, bits) // 8 for spec in specs)


@dataclass(frozen=True)
class TemplateRunScope:
    """The steps and blocks that a template run keeps."""

    levels: int
    first_block: int
    """Blocks before it keep nothing and are computed in full; it is the number of blocks where none is kept."""


def largest_scope_within(
    budget_bytes: int, *, levels: int, blocks: int, block_bytes: int, least_levels: int = LEAST_LEVELS
) -> TemplateRunScope:
    """The most that fits: first all blocks at fewer levels, then fewer blocks.

    Noise levels cost little to drop, down to a few: the next nearest serves as well. Of the blocks the first ones are
    dropped: a step that computes them in full still has the outside tokens' hidden state, which nothing has to load.
    A block keeps `block_bytes` at one noise level. Fewer than `least_levels` are kept only where fewer are wanted.
    """
    slots = budget_bytes // max(1, block_bytes)
    kept = min(levels, max(slots // blocks, min(levels, least_levels)))
    return TemplateRunScope(kept, blocks - min(blocks, slots // kept))


Array = NDArray[np.float64]
NETWORK: Final = ("calls", "sequences", "linear", "attention", "convolution", "gathered")
"""Features of what the network itself computes."""
ADAPTING: Final = ("low_rank", "segments", "control")
"""Features of what adapters add."""
COMPUTE: Final = (*NETWORK, *ADAPTING)
"""Features of a step's computing."""
LOAD: Final = ("slab", "bytes")
"""Features of one load; `slab` is 1."""
VALUE_BYTES: Final = 2
"""Bytes of a weight of an adapter whose size alone is known: most files hold 16 bits a weight."""


class StepWork(NamedTuple):
    """The work of a step, summed over sequences and blocks, in the order of :data:`COMPUTE`."""

    calls: float = 0.0
    """Forwards of the network; see :meth:`NetworkOperations.calls`."""
    sequences: float = 0.0
    linear: float = 0.0
    """Multiplications of linear layers."""
    attention: float = 0.0
    """Multiplications of scores and of weighed values."""
    convolution: float = 0.0
    """Multiplications of convolutions."""
    gathered: float = 0.0
    """Values that tiles gather from their neighbours."""
    low_rank: float = 0.0
    """Multiplications of LoRAs' factors; see :attr:`SequenceShape.low_rank`."""
    segments: float = 0.0
    """Sets of LoRAs that differ: the rows of one set are multiplied together."""
    control: float = 0.0
    """Multiplications of ControlNets in this process; see :func:`giornata.planning.operations.control_work`."""


@dataclass(frozen=True, slots=True)
class SequenceShape:
    """The tokens of one sequence."""

    text: int
    image: int
    computed: int
    """Image tokens of the compute set, or all."""
    padding: int = field(default=0, kw_only=True)
    """Text tokens, counted in `text`, whose keys and values are kept: attended to and not computed."""
    prefix: int = field(default=0, kw_only=True)
    """Tokens beside these that no step computes: they attend among themselves alone, and are attended to."""
    low_rank: float = field(default=0.0, kw_only=True)
    """Weights in the factors of its LoRAs (:func:`low_rank_weights`). A module of in * out weights multiplies a token
    so many times, and factors of rank * (in + out) weights multiply it so many times."""
    segments: float = field(default=0.0, kw_only=True)
    """Its part of its set of LoRAs: 1 where no other sequence has the set."""
    control: float = field(default=0.0, kw_only=True)
    """Multiplications of its ControlNets in this process, in every step."""

    @property
    def live_text(self) -> int:
        """Text tokens that are computed."""
        return self.text - self.padding

    def own(self, mode: BlockMode) -> int:
        """Image tokens that a block computes."""
        return self.image if mode is BlockMode.FULL else self.computed

    def projected(self, mode: BlockMode) -> int:
        """Image tokens whose keys and values a block projects, and nothing else."""
        return self.image - self.computed if mode is BlockMode.HIDDEN else 0

    def pairs(self, mode: BlockMode) -> int:
        """Queries times keys, those of text and prefix among them."""
        return (self.live_text + self.own(mode)) * (self.prefix + self.text + self.image)

    def amounts(self, mode: BlockMode) -> tuple[float, ...]:
        """Return what one block computes, in the columns of :attr:`NetworkOperations.total`."""
        own = self.own(mode)
        pairs = own * self.image
        taking = own if mode is BlockMode.KV else 0
        text, projected, rank = self.live_text, self.projected(mode), self.low_rank
        network = 1.0, own, text, projected, pairs, self.pairs(mode) - pairs, taking
        return *network, rank * own, rank * text, rank * projected, self.segments, self.control


class NetworkOperations:
    """The work of a network's blocks as matrices: features by the amounts of a sequence.

    Rows are :data:`COMPUTE` without calls. Columns are :meth:`SequenceShape.amounts`: sequences, computed cells,
    computed text tokens, projected cells, pairs of the picture, pairs with text or a prefix, cells that take from a
    recording; then cells, text tokens and projected cells, each times its LoRAs' weights; segments; multiplications
    of ControlNets.
    """

    def __init__(self, specs: Iterable[BlockSpec]) -> None:
        every = each_block(specs)
        if not every:
            raise ValueError("received no blocks; a network has one at least")
        self.specs: Final = group_blocks(every)
        """Equal blocks counted, in the order of the first of each."""
        self.blocks: Final = len(every)
        self.together: Final = is_all_or_nothing(every)
        """Whether a step takes all blocks of a sequence from a recording, or none."""
        weights = sum((spec.linear + spec.convolution) * spec.grain**2 for spec in every)
        self.by_block: Final[Array] = np.array([_matrix(spec, len(every), weights or 1.0) for spec in every])
        """(blocks, features, amounts)"""

    @cached_property
    def total(self) -> Array:
        """(features, amounts) of all blocks."""
        summed: Array = self.by_block.sum(0)
        return summed

    def calls(self, shapes: Sequence[SequenceShape], modes: Sequence[Sequence[BlockMode]]) -> int:
        """Forwards of a step of these sequences: 1 where each block takes for itself.

        Where all blocks of a sequence take or none, sequences that take are one forward, and of the others those of
        one number of tokens. `modes` are those of each sequence's blocks.
        """
        if not self.together:
            return 1
        whole = {
            shape.image
            for shape, own in zip(shapes, modes, strict=True)
            if all(m is BlockMode.FULL for m in own)
        }
        takes = any(mode is not BlockMode.FULL for own in modes for mode in own[:1])
        return max(1, len(whole) + takes)


def step_work(
    operations: NetworkOperations, shapes: Sequence[SequenceShape], modes: Sequence[Sequence[BlockMode]]
) -> StepWork:
    """Return what a whole step computes; `modes` holds those of every shape's blocks."""
    if not shapes:
        return StepWork(calls=1)
    parts = [_of_sequence(operations, shape, tuple(own)) for shape, own in zip(shapes, modes, strict=True)]
    _, *kinds = np.sum(parts, 0).tolist()
    return StepWork(operations.calls(shapes, modes), len(shapes), *kinds)


def sample_fields(
    work: StepWork, shapes: Sequence[SequenceShape], modes: Sequence[tuple[BlockMode, ...]]
) -> dict[str, Any]:
    """The fields of a step's sample in telemetry that tell what it computes, tokens and pairs as means over blocks."""
    means = dict.fromkeys(("image_tokens", "projected_tokens", "attention_pairs"), 0.0)
    for shape, own in zip(shapes, modes, strict=True):
        for mode, count in Counter(own).items():
            share = count / len(own)
            means["image_tokens"] += share * shape.own(mode)
            means["projected_tokens"] += share * shape.projected(mode)
            means["attention_pairs"] += share * shape.pairs(mode)
    text = sum(shape.live_text for shape in shapes)
    counts = {name: round(getattr(work, name)) for name in ("calls", "sequences", "segments")}
    return (
        work._asdict() | counts | {name: round(mean) for name, mean in means.items()} | {"text_tokens": text}
    )


@lru_cache(maxsize=4096)
def _of_sequence(operations: NetworkOperations, shape: SequenceShape, modes: tuple[BlockMode, ...]) -> Array:
    """(features,) of a sequence with these modes, one a block."""
    parts = [matrix @ np.array(shape.amounts(mode)) for mode, matrix in _in_modes(operations, modes)]
    summed: Array = np.sum(parts, 0)
    return summed


@lru_cache(maxsize=1024)
def _in_modes(
    operations: NetworkOperations, modes: tuple[BlockMode, ...]
) -> tuple[tuple[BlockMode, Array], ...]:
    """The modes among these, one a block, and the (features, amounts) of the blocks in each."""
    if len(modes) != operations.blocks:
        raise ValueError(f"received {len(modes)} modes for {operations.blocks} blocks")
    first, *others = set(modes)
    if not others:
        return ((first, operations.total),)
    chosen = np.array(modes)
    return tuple((mode, operations.by_block[chosen == mode].sum(0)) for mode in (first, *others))


def low_rank_weights(weights: int, size_bytes: int) -> float:
    """Weights in the factors of a LoRA: as they were counted, or, where they were not (0), by its file's size."""
    return weights or size_bytes / VALUE_BYTES


def _matrix(spec: BlockSpec, blocks: int, weights: float) -> list[list[float]]:
    """(features, amounts) of one of so many blocks; a sequence counts once in all of them together.

    The factors of LoRAs lie where the `weights` of all blocks' modules do: each block has its share of both.
    """
    each, own = 1 / blocks, (spec.linear + spec.convolution) / weights
    return [
        [each, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        [0, spec.linear, spec.text, spec.outside, 0, 0, 0, 0, 0, 0, 0, 0],
        [0, spec.across, 0, 0, spec.pair, spec.text_pair, 0, 0, 0, 0, 0, 0],
        [0, spec.convolution, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, spec.gathered, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 0, own, spec.text / weights, spec.outside / weights, 0, 0],
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, each, 0],
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, each],
    ]


def control_work(work: ControlWork, *, text: int, image: int, sequences: int) -> float:
    """Multiplications of a ControlNet for one of a row's `sequences` in one step.

    The sequence has so many `text` tokens, padding among them, and the picture so many `image` tokens. Of what
    sequences share, each has its part.
    """
    pairs = image**2
    total = (
        work.sequence
        + work.text * text
        + work.image * image
        + work.pair * pairs
        + work.text_pair * ((text + image) ** 2 - pairs)
    )
    return total / sequences if work.shared else total


def work_of(card: ControlCard) -> ControlWork:
    """As a ControlNet's card tells; where an older worker tells its size alone, each weight meets every token."""
    if card.work is not None:
        return card.work
    return work_of_weights(card.weight_bytes, shared=card.kind is ControlKind.FLUX)


def work_of_weights(weight_bytes: float, *, shared: bool) -> ControlWork:
    """The work of a ControlNet whose size alone is known: each weight meets every token."""
    weights = weight_bytes / VALUE_BYTES
    return ControlWork(text=weights, image=weights, shared=shared)


# The cost of operations and loads: linear, without negative weights.


@dataclass(frozen=True)
class StepCosts:
    """Weights of the linear model, by :data:`COMPUTE` and :data:`LOAD`, in milliseconds a unit; none is negative.

    Weights of :data:`NETWORK` alone are completed by :func:`completed`.
    """

    compute: tuple[float, ...]
    load: tuple[float, ...] = (0.0, 0.0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "compute", complete_weights(self.compute))
        if (len(self.compute), len(self.load)) != (len(COMPUTE), len(LOAD)):
            raise ValueError(
                f"received {len(self.compute)} and {len(self.load)} weights, needed are {COMPUTE} and {LOAD}"
            )

    def step_ms(self, work: StepWork) -> float:
        """Time of a step that computes `work` and waits for nothing."""
        spent: float = sum(map(mul, self.compute, work))
        return spent

    @property
    def call_ms(self) -> float:
        """Time of one forward beside what it computes."""
        return self.compute[0]

    def rates(self, operations: NetworkOperations) -> Array:
        """(blocks, amounts) milliseconds of each of `SequenceShape.amounts` in a block."""
        return _rates(self.compute, operations)

    def load_ms(self, size_bytes: float) -> float:
        """Time of loading one slab."""
        return self.load[0] + self.load[1] * size_bytes if size_bytes else 0.0


def complete_weights(weights: tuple[float, ...]) -> tuple[float, ...]:
    """Weights by :data:`COMPUTE` from those by :data:`NETWORK`, of a fit to steps without adapters; others as they are.

    A multiplication of factors or ControlNets then costs what one of linear layers does, and another segment nothing.
    """
    if len(weights) != len(NETWORK):
        return weights
    linear = weights[NETWORK.index("linear")]
    return (*weights, linear, 0.0, linear)


@lru_cache(maxsize=64)
def _rates(weights: tuple[float, ...], operations: NetworkOperations) -> Array:
    """See :meth:`StepCosts.rates`."""
    of_units: Array = np.einsum("f,bfa->ba", np.array(weights[1:]), operations.by_block)
    return of_units


# The blocks of rows as a planner of loads is told of them: what each mode takes, and what is loaded for it.


Flags = NDArray[np.bool_]
Counts = NDArray[np.int64]
MODES: Final = tuple(BlockMode)
CODES: Final = {mode: code for code, mode in enumerate(MODES)}
FULL, HIDDEN, KV = (CODES[mode] for mode in (BlockMode.FULL, BlockMode.HIDDEN, BlockMode.KV))
Modes = tuple[BlockMode, ...]
"""A mode for every block."""
SLABS: Final = 8
"""In how many slabs the planner counts the largest load of a block: enough to tell loads apart, few enough to plan."""


@dataclass(frozen=True, eq=False)
class RowBlocks:
    """One row's blocks, over one step or several: what each mode takes, and what has to be loaded for it first.

    Each column is (blocks,).
    """

    full_ms: Array
    hidden_ms: Array
    kv_ms: Array
    hidden_slabs: Array
    """Slabs of the outside tokens' input, whole numbers; 0 where it is on the device already."""
    kv_slabs: Array
    """Slabs of their keys and values; 0 where these are on the device already."""
    fresh: Flags
    """A step's first blocks, where the outside tokens' hidden state is always at hand."""
    hidden_kept: Flags
    kv_kept: Flags
    """Whether the template keeps a hidden state, and keys and values."""

    def __len__(self) -> int:
        return len(self.full_ms)


@dataclass(frozen=True)
class BatchRow:
    """One row of a batch at the planner; all rows have the same number of blocks."""

    blocks: RowBlocks
    template: Hashable
    """Rows of one template load each entry once together."""


@dataclass(frozen=True)
class LoadLink:
    """The path on which the loader moves slabs, one after the other, in the order of the blocks."""

    slab_ms: float
    busy_ms: float = 0.0
    """Time until it is free for this plan's first slab."""


class StepCacheReads(NamedTuple):
    """The entries that the blocks of one step take from the cache."""

    forms: Modes
    """`KV`, `HIDDEN`, which a block in full may need too, or `FULL` for nothing."""
    kv: Counts
    """(blocks,): 1 where a block takes keys and values, else 0."""
    hidden: Counts
    """As `kv`: where it takes a hidden state."""


@lru_cache(maxsize=1024)
def takes(modes: Modes) -> StepCacheReads:
    """Return what a step in these `modes` takes; no hidden state in its first block and behind a block in full."""
    forms, live = [], True
    for mode in modes:
        forms.append(BlockMode.KV if mode is BlockMode.KV else BlockMode.FULL if live else BlockMode.HIDDEN)
        live = mode is BlockMode.FULL
    kv, hidden = (
        np.array([form is one for form in forms], np.int64) for one in (BlockMode.KV, BlockMode.HIDDEN)
    )
    return StepCacheReads(tuple(forms), kv, hidden)


@dataclass(frozen=True, eq=False)
class BlockLoads:
    """Bytes that a row loads for each block, (blocks,) int64; 0 for an entry that is on the device."""

    hidden_bytes: Counts
    kv_bytes: Counts
    hidden_kept: Flags
    """(blocks,), as `kv_kept`: whether there is such an entry."""
    kv_kept: Flags

    @classmethod
    def equal(
        cls, blocks: int, hidden_bytes: int = 0, kv_bytes: int = 0, *, hidden_kept: bool = True
    ) -> BlockLoads:
        """Return those of so many equal blocks, which keep keys and values."""
        hidden, kv = (np.full(blocks, size, np.int64) for size in (hidden_bytes, kv_bytes))
        return cls(hidden, kv, np.full(blocks, hidden_kept), np.ones(blocks, bool))

    def then(self, later: BlockLoads) -> BlockLoads:
        """Return those of this step and of the next one."""
        return BlockLoads(
            np.concatenate((self.hidden_bytes, later.hidden_bytes)),
            np.concatenate((self.kv_bytes, later.kv_bytes)),
            np.concatenate((self.hidden_kept, later.hidden_kept)),
            np.concatenate((self.kv_kept, later.kv_kept)),
        )

    @property
    def largest_bytes(self) -> int:
        """The largest of all."""
        return int(max(self.hidden_bytes.max(initial=0), self.kv_bytes.max(initial=0)))


def slab_unit(loads: Iterable[BlockLoads]) -> float:
    """Bytes of a slab in a plan over these loads."""
    return max((load.largest_bytes for load in loads), default=0) / SLABS


def row_blocks(
    costs: StepCosts,
    operations: NetworkOperations,
    shapes: Sequence[SequenceShape],
    loads: BlockLoads,
    unit_bytes: float,
) -> RowBlocks:
    """A row's blocks for the planner; `loads` are those of one step or of several.

    Loads are rounded up to whole slabs, of `unit_bytes` each.
    """
    count, blocks = len(loads.kv_bytes), operations.blocks
    times = np.tile(_of_blocks(costs, operations, tuple(shapes)), count // blocks)
    hidden, kv = np.ceil(np.array((loads.hidden_bytes, loads.kv_bytes)) / (unit_bytes or 1.0))
    fresh = np.arange(count) % blocks == 0
    return RowBlocks(
        times[FULL], times[HIDDEN], times[KV], hidden, kv, fresh, loads.hidden_kept, loads.kv_kept
    )


@lru_cache(maxsize=1024)
def _of_blocks(costs: StepCosts, operations: NetworkOperations, shapes: tuple[SequenceShape, ...]) -> Array:
    """(modes, blocks) milliseconds that a row adds to each block in each of :data:`MODES`."""
    amounts = np.array([[shape.amounts(mode) for mode in MODES] for shape in shapes]).sum(0)
    added: Array = amounts @ costs.rates(operations).T
    return added
