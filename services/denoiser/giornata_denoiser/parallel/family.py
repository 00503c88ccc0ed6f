"""Families whose networks a group computes; everything around the network runs on every member alike."""

from __future__ import annotations

from dataclasses import replace

from giornata.packed.shares import Shard
from giornata.packed.ulysses import AllToAllGroup
from giornata.planning.degrees import StepParallelism
from giornata_denoiser.families.protocol import ModelFamily, ShardableNetwork


def shares_tokens(family: ModelFamily) -> bool:
    """Whether several processes may compute a batch of the family by shares of its tokens."""
    return isinstance(family.network, ShardableNetwork)


def widest(family: ModelFamily) -> int:
    """The most processes that may share a batch's tokens: 1 where the network cannot be shared so."""
    if not isinstance(family.network, ShardableNetwork):
        return 1
    return min(spec.heads // family.network.sites(block) for block, spec in enumerate(family.specs))


def possible(family: ModelFamily, way: StepParallelism) -> bool:
    """Whether batches of the family can be computed in this way; every network can by guidance halves."""
    return way.halves or way.degree <= widest(family)


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
    heads = widest(family)
    if heads < group.size:
        raise ValueError(f"received {group.size} devices, accepted are at most {heads}, one for each head")
    share = Shard(group.rank, group.size)
    return replace(family, network=network.shared(group), share=share, group=group.name)
