"""Families whose networks a group of processes computes, and the halves of guidance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from giornata.packed.block_inputs import BlockInputs
from giornata.packed.packing import UNTRACED, LaneTracer
from giornata.packed.sharding import AllToAllGroup, Shard
from giornata.planning.cost_model import StepParallelism
from giornata_denoiser.families.protocol import ModelFamily, Network, SequenceInputs, ShardableNetwork

# Families whose networks a group computes; everything around the network runs on every member alike.


def shares_tokens(family: ModelFamily) -> bool:
    """Return whether several processes may compute a batch of the family by shares of its tokens."""
    return isinstance(family.network, ShardableNetwork)


def widest_group(family: ModelFamily) -> int:
    """The most processes that may share a batch's tokens: 1 where the network cannot be shared so."""
    if not isinstance(family.network, ShardableNetwork):
        return 1
    return min(spec.heads // family.network.sites(block) for block, spec in enumerate(family.specs))


def is_possible(family: ModelFamily, way: StepParallelism) -> bool:
    """Return whether batches of the family can be computed in this way; every network can by guidance halves."""
    return way.halves or way.degree <= widest_group(family)


def alone(family: ModelFamily) -> None:
    """Nothing, where one process computes the family's batches.

    Raises:
        ValueError: a group computes them already.
    """
    if family.group:
        raise ValueError(f"received a family of the group {family.group}, accepted are those of one process")


def shared(family: ModelFamily, group: AllToAllGroup) -> ModelFamily:
    """The same family, its network's `predict` computed by the group; itself for a group of one.

    Every member calls it alike, with the whole batch and all latents, and gets the whole output.

    Raises:
        TypeError: the network cannot be shared by tokens.
        ValueError: it has fewer heads than the group has members, or a group computes it already.
    """
    if group.size == 1:
        return family
    alone(family)
    network = family.network
    if not isinstance(network, ShardableNetwork):
        kind = type(network).__name__
        raise TypeError(f"received {group.size} devices for {kind}, accepted are 1, or 2 by guidance halves")
    heads = widest_group(family)
    if heads < group.size:
        raise ValueError(f"received {group.size} devices, accepted are at most {heads}, one for each head")
    share = Shard(group.rank, group.size)
    return replace(family, network=network.shared(group), share=share, group=group.name)


# Guidance halves: of two processes one computes what has the prompt, the other what has the negative
# prompt.
#
# Source: latent parallelism of classifier-free guidance, Katz (section 7). Outputs are exchanged once a
# step; nothing else is, so that it serves every network.


SIZE: Final = 2


def halve_guidance(family: ModelFamily, group: AllToAllGroup) -> ModelFamily:
    """The same family, its network's `predict` computed by two processes, each some of the sequences.

    Every member calls it alike, with the whole batch and all latents, and gets the whole output. What a sequence takes
    is read, and what it shows is shown, only where it is computed: see :func:`members`.

    Raises:
        ValueError: the group is not one of two, or another computes the family already.
    """
    alone(family)
    if group.size != SIZE:
        raise ValueError(
            f"received {group.size} devices, accepted are {SIZE}: one for each half of the guidance"
        )
    network: Any = GuidanceParallelNetwork(family.network, group)
    return replace(family, network=network, group=f"{group.name} by halves")


def assign_members(sequences: Sequence[SequenceInputs]) -> tuple[int, ...]:
    """Return which of the two members computes each of a batch's sequences.

    Both sequences of a row under guidance are computed at once. A row without guidance that has a region always has
    the same member, where it keeps what it takes later. Others go to the member with fewer tokens by then.
    """
    place: dict[int, int] = {}
    loads = [0] * SIZE
    for index, sequence in enumerate(sequences):
        settled = sequence.half
        if settled is None and sequence.region is not None:
            settled = sequence.region.digest[0] % SIZE
        if settled is not None:
            place[index] = settled
            loads[settled] += _computed(sequence)
    free = [index for index in range(len(sequences)) if index not in place]
    for index in sorted(free, key=lambda one: -_computed(sequences[one])):
        place[index] = loads.index(min(loads))
        loads[place[index]] += _computed(sequences[index])
    return tuple(place[index] for index in range(len(sequences)))


@dataclass(frozen=True, eq=False)
class GuidanceParallelBatch:
    """A batch, of which this member computes some sequences."""

    own: object
    """The batch of these alone; None where there are none."""
    member: tuple[int, ...]
    """The member that computes each sequence."""
    tokens: list[int]
    """Tokens of each sequence's picture."""
    computed: list[int]
    """Tokens that are answered for, of each sequence."""


class GuidanceParallelNetwork:
    """A network of two processes; all but :meth:`assemble` and :meth:`predict` is as the `network` has it."""

    def __init__(self, network: Network, group: AllToAllGroup) -> None:
        self._network, self._group = network, group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)

    def assemble(self, sequences: Sequence[SequenceInputs]) -> GuidanceParallelBatch:
        """See :meth:`giornata_denoiser.families.protocol.Network.assemble`."""
        member = assign_members(sequences)
        own = self._own(member, sequences)
        return GuidanceParallelBatch(
            self._network.assemble(own) if own else None,
            member,
            [height * width for height, width in (sequence.grid for sequence in sequences)],
            [_computed(sequence) for sequence in sequences],
        )

    def predict(
        self,
        batch: object,
        latents: Tensor,
        conditioning: Sequence[Mapping[str, Tensor]],
        steps: Sequence[int],
        *,
        uses: Sequence[BlockInputs] = (),
        trace: LaneTracer = UNTRACED,
    ) -> Tensor:
        """See :meth:`giornata_denoiser.families.protocol.Network.predict`; the output is all sequences'."""
        if not isinstance(batch, GuidanceParallelBatch):
            raise TypeError(f"expected a batch of two members, received {type(batch).__name__}")
        output = latents.new_empty(0, latents.shape[1])
        if batch.own is not None:
            output = self._network.predict(
                batch.own,
                torch.cat(self._own(batch.member, torch.split(latents, batch.tokens))),
                self._own(batch.member, conditioning),
                self._own(batch.member, steps),
                uses=self._own(batch.member, uses) if uses else (),
                trace=trace,
            )
        return self._exchanged(batch, output)

    def _exchanged(self, batch: GuidanceParallelBatch, output: Tensor) -> Tensor:
        """(computed_tokens, channels) of all sequences, from those of this member's."""
        channels, flat = output.shape[1], output.flatten()
        order = sorted(range(len(batch.member)), key=batch.member.__getitem__)
        lengths = [batch.computed[index] for index in order]
        received = [0] * SIZE
        for member, length in zip(batch.member, batch.computed, strict=True):
            received[member] += length * channels
        got = self._group.trade(flat.repeat(SIZE), [len(flat)] * SIZE, received).view(sum(lengths), channels)
        parts = dict(zip(order, torch.split(got, lengths), strict=True))
        return torch.cat([parts[index] for index in range(len(order))])

    def _own(self, member: Sequence[int], of: Sequence[Any]) -> list[Any]:
        """This member's, of what is by sequence."""
        return [each for place, each in zip(member, of, strict=True) if place == self._group.rank]


def _computed(sequence: SequenceInputs) -> int:
    """Tokens of its picture that are answered for."""
    if sequence.region is not None:
        return len(sequence.region.computed)
    height, width = sequence.grid
    return height * width
