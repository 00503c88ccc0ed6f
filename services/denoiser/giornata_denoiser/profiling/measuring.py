"""Measuring steps and loads: warmed up, repeated, in an order in which drift does not follow size."""

from __future__ import annotations

import inspect
import random
import statistics
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from giornata.control.networks import ControlNet, import_control_kind
from giornata.packed.low_rank import DOWN, UP, SequenceLoras, low_rank
from giornata.packed.packing import (
    BlockInputs,
    CachedTokens,
    Region,
    by_sequence,
    make_region,
    with_companions,
)
from giornata.planning.operations import NetworkOperations
from giornata.scheduling.batch import RowKey
from giornata.wire.adapters import ControlCard, ControlKind, ControlWork
from giornata.wire.controlnets import ControlBase
from giornata.wire.values import BlockMode
from giornata_denoiser.checkpoint import Checkpoint
from giornata_denoiser.choices import CacheForm
from giornata_denoiser.controls.residuals import ControlNetTarget, LocalControls, control_target
from giornata_denoiser.engine.batch_tensors import (
    assemble,
    computes_every_token,
    place_inputs,
    with_low_ranks,
    with_residuals,
)
from giornata_denoiser.engine.denoise_step import denoise_step
from giornata_denoiser.engine.loading import device_for
from giornata_denoiser.engine.recorders import EntryRecorder
from giornata_denoiser.engine.slabs import CacheSharder, Device, Slabs
from giornata_denoiser.families.network import ModelFamily, Network
from giornata_denoiser.profiling.mixtures import LEAST_SIDE, RowSize, StepShape, TokensBeside
from giornata_denoiser.rows.parts import Adapters, RowControl
from giornata_denoiser.rows.row import RecordingSpec, Row
from giornata_denoiser.rows.template import Entry
from giornata_denoiser.startup import RANK, practice_row

T = TypeVar("T")
ProgressBar = Callable[[Sequence[int]], Iterable[int]]
"""Passes on what it is given, one by one, and may show how far it is."""


STABLE: Final = 0.1
"""Times that differ from their median by at most this share agree with it."""
MORE_ROUNDS: Final = 6
"""At most so many rounds follow for what is not stable yet."""


def measure_medians(
    things: Sequence[T], measure: Callable[[T], float], *, rounds: int, seed: int, bar: ProgressBar = iter
) -> list[float]:
    """The median time of every thing, in ms; each round takes all of them in an order of its own.

    What is not stable by then, because most of its times do not agree with their median, is measured again.
    """
    chance = random.Random(seed)  # noqa: S311 - an order, not a secret
    times: list[list[float]] = [[] for _ in things]

    def take(order: Sequence[int]) -> None:
        for index in bar(order):
            times[index].append(measure(things[index]))

    take([index for _ in range(rounds) for index in chance.sample(range(len(things)), len(things))])
    for _ in range(MORE_ROUNDS):
        unstable = [index for index, of_one in enumerate(times) if not _agree(of_one)]
        if not unstable:
            break
        take(chance.sample(unstable, len(unstable)))
    return [statistics.median(of_one) for of_one in times]


def _agree(times: Sequence[float]) -> bool:
    """Return whether more than half of these times lie near their median."""
    median = statistics.median(times)
    return 2 * sum(abs(each - median) <= STABLE * median for each in times) > len(times)


class StepMeter:
    """Measures one thing at a time, with rows and templates whose sizes matter and whose values do not.

    Args:
        checkpoint: whose rows they are; a template's entry is recorded for every picture size.
        bits: of what is recorded.
        device: how loads get to the checkpoint's; by default it keeps nothing, so that every load moves all of it.
        clock: monotonic seconds; on a GPU its own events tell a step's time.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        bits: int,
        device: Device | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._checkpoint, self._family = checkpoint, checkpoint.family
        self._narrowing = CacheSharder(checkpoint.family)
        self._recording = RecordingSpec(frozenset(CacheForm), bits)
        self._device = device or device_for(checkpoint.family.device, budget_bytes=0)
        self._clock = clock
        self._entries: dict[tuple[int, int], Entry] = {}
        self._random = torch.Generator().manual_seed(0)
        self._loras = RandomLoras(checkpoint.family.network.layers)

    def computing(self, family: ModelFamily) -> StepMeter:
        """A meter of the same rows and templates, whose steps `family` computes, over a group or not."""
        made = copy(self)
        made._family, made._narrowing = family, CacheSharder(family)  # noqa: SLF001 - of its own class
        return made

    @cached_property
    def _control(self) -> RandomControlNet | None:
        return random_control(self._checkpoint.family.network, self._checkpoint.card.pixel_multiple)

    @cached_property
    def text_tokens(self) -> int:
        """Text tokens of the longest prompt that pass the blocks; 0 where they only are attended to."""
        return self._longest((LEAST_SIDE, LEAST_SIDE)).text_tokens

    @property
    def operations(self) -> NetworkOperations:
        """Return what the family's blocks compute."""
        return self._family.operations

    @property
    def lora_weights(self) -> float:
        """Weights in the factors of each set of LoRAs that rows are measured with."""
        return self._loras.weights

    @property
    def control_work(self) -> ControlWork | None:
        """What the ControlNet computes that rows are measured with; None where there are none for the network."""
        return None if self._control is None else self._control.work

    @property
    def companions(self) -> TokensBeside:
        """Tells from a picture's grid how many companions the family gives it."""
        return self._family.network.companions

    def prefix(self, grid: tuple[int, int]) -> int:
        """Prefix tokens of the longest prompt and of a picture's references."""
        return max(self._longest(grid).inputs.prefix, default=0)

    def _longest(self, grid: tuple[int, int]) -> Row:
        """A row of zeros with the longest prompt."""
        key, text_tokens = RowKey("profile", 0, 0), self._checkpoint.card.max_text_tokens
        return practice_row(self._checkpoint, key, grid, text_tokens, torch.zeros)

    def step_ms(self, mixture: StepShape) -> float:
        """One step of `mixture`, after another one that is not measured. Slabs are loaded before."""
        step = self._prepared(mixture)
        with torch.inference_mode():
            step()
            return self._timed(step)

    def step_bytes(self, mixture: StepShape) -> int:
        """Peak memory of a step, beyond what is kept from step to step."""
        step = self._prepared(mixture)
        with torch.inference_mode():
            step()
            return _peak_bytes(self._family.device, step)

    def load_ms(self, size: RowSize) -> float:
        """The median of the largest slabs, each until it has arrived; what goes wrong with a load is raised."""
        slabs = self._slabs(size, size.tokens)
        sizes = self._load_bytes(size)
        largest = [block for block, size_bytes in enumerate(sizes) if size_bytes == max(sizes)]
        # Asking for a slab loads it and lets the current stream wait for it: its events then tell when it is there.
        with torch.inference_mode():
            return statistics.median(
                self._timed(partial(slabs.ask, block, size.modes[0])) for block in largest
            )

    def load_bytes(self, size: RowSize) -> int:
        """Return what has to move for one of the largest slabs."""
        return max(self._load_bytes(size))

    def _load_bytes(self, size: RowSize) -> list[int]:
        slabs = self._slabs(size, size.tokens)
        return [slabs.load_bytes(block, size.modes[0]) for block in range(self._family.depth)]

    def _prepared(self, mixture: StepShape) -> Callable[[], object]:
        rows = [self.row(size, index) for index, size in enumerate(mixture.rows)]
        low_ranks = [self._loras.set_of(size.lora) for size in mixture.rows]
        plain = by_sequence([self._uses(size, row) for size, row in zip(mixture.rows, rows, strict=True)])
        uses = with_low_ranks(plain, rows, low_ranks)
        with torch.inference_mode():
            placed = [place_inputs(row, self._family, of) for row, of in zip(rows, low_ranks, strict=True)]
            assembly = assemble(self._family, rows, placed)
        if not any(row.adapters.controls for row in rows) or self._control is None:
            return lambda: denoise_step(self._family, assembly, rows, uses)
        controls, whole = self._control.controls(), computes_every_token(uses, rows)

        def step() -> None:
            added = controls.compute(rows, whole)
            denoise_step(self._family, assembly, rows, with_residuals(uses, rows, added))

        return step

    def row(self, size: RowSize, index: int) -> Row:
        """The `index`-th row of a batch, of noise."""
        key, grid = RowKey("profile", 0, index), (size.height, size.width)
        text = size.text or self._checkpoint.card.max_text_tokens
        row = practice_row(self._checkpoint, key, grid, text, self._noise, guided=size.guided)
        row = replace(row, region=self._region(size))
        return self._control.acting(row, self._noise) if size.controlled and self._control else row

    def _uses(self, size: RowSize, row: Row) -> tuple[BlockInputs, ...]:
        """Return what each sequence takes in its modes."""
        if row.region is None:
            return (BlockInputs(),) * len(row.inputs.prompts)
        return tuple(BlockInputs(CachedTokens(size.modes, self._slabs(size, own))) for own in row.own_tokens)

    def _slabs(self, size: RowSize, own: int) -> Slabs:
        """Slabs of a sequence that computes `own` tokens; nothing is loaded yet."""
        where = self._region(size)
        if where is None:
            raise ValueError(f"received {size}, which loads nothing")
        entry = self._narrowing.entry(self._entry(size)) or self._entry(size)
        return Slabs(entry, where, own, self._family, device=self._device)

    def _entry(self, size: RowSize) -> Entry:
        """Return what a template run over such a picture leaves, in both forms, in the host's memory."""
        grid, family = (size.height, size.width), self._checkpoint.family
        if grid not in self._entries:
            row = self.row(RowSize(*grid, size.text, (BlockMode.FULL,) * family.depth), 0)
            recorder = EntryRecorder(row.level, family.depth, self._recording)
            with torch.inference_mode():
                denoise_step(family, assemble(family, [row]), [row], [BlockInputs(recorder=recorder)])
            self._entries[grid] = recorder.entry()
        return self._entries[grid]

    def _region(self, size: RowSize) -> Region | None:
        """A box in the picture's upper left corner; None where all is computed."""
        height, width = size.box
        touched = torch.zeros(size.height, size.width, dtype=torch.bool)
        touched[:height, :width] = True
        found = make_region(touched)
        return None if found is None else with_companions(found, self.companions((size.height, size.width)))

    def _noise(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._random)

    def _timed(self, compute: Callable[[], object]) -> float:
        device = self._family.device
        if device.type != "cuda":
            began = self._clock()
            compute()
            return (self._clock() - began) * 1e3
        event: Any = torch.cuda.Event  # without types
        began_event, ended_event = event(enable_timing=True), event(enable_timing=True)
        torch.cuda.synchronize(device)
        began_event.record()
        compute()
        ended_event.record()
        torch.cuda.synchronize(device)
        return float(began_event.elapsed_time(ended_event))


def _peak_bytes(device: torch.device, compute: Callable[[], object]) -> int:
    """Most memory that `compute` holds at a time beyond what was there before.

    On a GPU as torch's allocator counts it. A processor's allocator keeps no count: there, the tensors alive between
    operations are added up, and what a kernel allocates for itself is not seen.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        compute()
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device)) - before
    with _LiveTensors() as live:
        compute()
    return int(live.peak)


class _LiveTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's is without types
    """Adds up the storages that operations make, from when they are made until they are freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's is without types
        self.peak = 0
        self._live = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = {id(one.untyped_storage()) for one in tree_iter((args, kwargs)) if isinstance(one, Tensor)}
        made = func(*args, **(kwargs or {}))
        for one in tree_iter(made):
            if isinstance(one, Tensor):
                self._take(one.untyped_storage(), given)
        return made

    def _take(self, storage: torch.UntypedStorage, given: set[int]) -> None:
        """Count `storage` unless it is counted already or came from outside, as a view's does."""
        if id(storage) in given or id(storage) in self._known:
            return
        self._known.add(id(storage))
        self._live += storage.nbytes()
        self.peak = max(self.peak, self._live)
        weakref.finalize(storage, self._drop, id(storage), storage.nbytes())

    def _drop(self, key: int, size_bytes: int) -> None:
        self._known.discard(key)
        self._live -= size_bytes


# A ControlNet of a transformer has some of its blocks. One of a UNet has the whole encoder, nearly half of
# the network: it would not fit beside a network that fills its device. All weights are therefore parts of
# one short tensor, which are read again and again.


NAME: Final = "random"
BLOCKS: Final = 8
"""One of so many blocks of a transformer is a block of its ControlNet, too: enough to be seen in a step's time."""
SHARE: Final = 20
"""The tensor holds one of so many weights of the network. What joins projections of Flux copies about as many: both
together stay below a tenth of the network."""
LEAST: Final = 2**25
"""It holds so many values at least: weights that a processor's cache can hold would be read faster than others."""
WEIGHT_SIZE: Final = 0.02
"""Standard deviation of weights."""
ALIGNED: Final = 64
"""A weight begins at a multiple of so many values, as one that is loaded does."""

Noise = Callable[..., Tensor]
"""Makes a tensor of a shape."""


@dataclass(frozen=True)
class RandomControlNet:
    """A ControlNet beside the `network`, made when it is first asked for, and kept as long as this is."""

    network: Network
    controlled: ControlNetTarget

    @cached_property
    def net(self) -> ControlNet:
        """The ControlNet, on the network's device and of its dtype."""
        base, network = self.controlled.base, self.network
        module, runner = import_control_kind(base.kind)
        with torch.device("meta"):
            made = module(**_options(network, base, module))
        layers = chain.from_iterable(layer.parameters() for layer in network.layers.values())
        _fill(made, sum(each.numel() for each in layers), network.device, network.dtype)
        card = ControlCard(name=NAME, digest=NAME, kind=base.kind, text_channels=base.text_channels)
        return runner(made.eval().requires_grad_(requires_grad=False), card)

    @cached_property
    def work(self) -> ControlWork:
        """Return what it computes in a step."""
        return self.net.work(self.controlled.base)

    def acting(self, row: Row, values: Noise) -> Row:
        """`row` with the ControlNet in all of its steps, and a control image of `values`."""
        base, (height, width) = self.controlled.base, row.grid
        pixels = (3, height * base.token_pixels, width * base.token_pixels)
        shape = pixels if base.kind is ControlKind.UNET else (height * width, base.latent_channels)
        use = RowControl(NAME, NAME, 1.0, 0, row.steps, work=self.work, image=values(*shape))
        return replace(row, adapters=Adapters(controls=(use,)))

    def controls(self) -> LocalControls:
        """Return what computes it in each step of rows, as a whole, and knows no row yet."""
        return LocalControls({NAME: self.net}, self.controlled, held_steps=1)


def random_control(network: Network, token_pixels: int) -> RandomControlNet | None:
    """One beside a `network` whose tokens have so many pixels of the picture a side; None where diffusers has none."""
    found = control_target(network, token_pixels)
    return None if found is None else RandomControlNet(network, found)


def _options(network: Any, base: ControlBase, module: Callable[..., nn.Module]) -> dict[str, Any]:
    """Arguments of a diffusers' `module` that fits."""
    if base.kind is ControlKind.UNET:
        scale = base.token_pixels // network.side
        config, own = network.unet.config, _unet(base, network.side, scale)
    else:
        config, own = network.transformer.config, _transformer(base)
    taken = inspect.signature(module).parameters
    return {name: value for name, value in config.items() if name in taken} | own


def _unet(base: ControlBase, side: int, scale: int) -> dict[str, Any]:
    """A token has `side` latent pixels a side, and each of these so many `latent` pixels of the picture."""
    return {
        "in_channels": base.latent_channels // side**2,
        "conditioning_embedding_out_channels": (16,) * scale.bit_length(),
    }


def _transformer(base: ControlBase) -> dict[str, Any]:
    """Fewer blocks than the network's; a mask that it sees is not the ControlNet's."""
    doubles = {"num_layers": _fewer(len(base.channels) - base.singles)}
    if base.kind is ControlKind.SD3:
        return doubles
    return {**doubles, "num_single_layers": _fewer(base.singles), "in_channels": base.latent_channels}


def _fewer(blocks: int) -> int:
    return min(blocks, max(1, blocks // BLOCKS))


def shared_values(sizes: Collection[int], network: int) -> int:
    """Values of the tensor that holds weights of such `sizes`, all of them or in turns; the `network` has so many."""
    return max(*sizes, min(sum(sizes), max(network // SHARE, LEAST)))


def _fill(net: nn.Module, network: int, device: torch.device, dtype: torch.dtype) -> None:
    """Give a `net` on the meta device weights: parts of one tensor, which follow one another.

    Where it ends they begin again. The `network` has so many weights.
    """
    sizes = [_aligned(each) for each in chain(net.parameters(), net.buffers())]
    chance = torch.Generator().manual_seed(0)
    drawn = torch.randn(shared_values(sizes, network), generator=chance).mul_(WEIGHT_SIZE)
    shared, start = drawn.to(device, dtype), 0
    for module in net.modules():
        own = chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False))
        for name, meta in list(own):
            start = start if start + meta.numel() <= len(shared) else 0
            part = shared[start : start + meta.numel()].view(meta.shape)
            setattr(module, name, nn.Parameter(part) if isinstance(meta, nn.Parameter) else part)
            start += _aligned(meta)


def _aligned(weight: Tensor) -> int:
    return -(-weight.numel() // ALIGNED) * ALIGNED


LORA_SIZE: Final = 1e-3
"""Standard deviation of factors: small beside a network's own weights."""


class RandomLoras:
    """Sets of one LoRA each, by number from 1, for the linear `layers` of a network, by path.

    Factors are of the layers' device and dtype. A set is made when it is first asked for, and kept.
    """

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        self._layers = {path: layer for path, layer in layers.items() if isinstance(layer, nn.Linear)}
        self._made: dict[int, SequenceLoras] = {}

    @cached_property
    def weights(self) -> float:
        """Weights in the factors of one set, as `SequenceShape.low_rank` counts them."""
        return float(sum(RANK * (layer.in_features + layer.out_features) for layer in self._layers.values()))

    def set_of(self, number: int) -> SequenceLoras | None:
        """The set of this number; None for 0, which is no set."""
        if number and number not in self._made:
            self._made[number] = low_rank(f"random {number}", [(self._tensors(number), 1.0)])
        return self._made.get(number)

    def _tensors(self, number: int) -> dict[str, Tensor]:
        chance = torch.Generator().manual_seed(number)
        return {
            path + end: (LORA_SIZE * torch.randn(*shape, generator=chance)).to(layer.weight)
            for path, layer in self._layers.items()
            for end, shape in ((DOWN, (RANK, layer.in_features)), (UP, (layer.out_features, RANK)))
        }
