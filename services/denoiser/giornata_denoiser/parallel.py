"""Groups of processes, each with a device, that compute batches together: by tokens, or by guidance halves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from giornata.packed.packing import UNTRACED, BlockInputs, LaneTracer
from giornata.packed.sharding import AllToAllGroup, Shard
from giornata.planning.cost_model import StepParallelism
from giornata_denoiser.families.network import ModelFamily, Network, SequenceInputs, reference_tokens

# Families whose networks a group computes; everything around the network runs on every member alike.


def widest_group(family: ModelFamily) -> int:
    """The most processes that may share a batch's tokens: 1 where the network cannot be shared so."""
    if not family.network.shardable:
        return 1
    return min(spec.heads // family.sites(block) for block, spec in enumerate(family.specs))


def is_possible(family: ModelFamily, way: StepParallelism) -> bool:
    """Return whether batches of the family can be computed in this way; every network can by guidance halves."""
    return way.halves or way.degree <= widest_group(family)


def _check_alone(family: ModelFamily) -> None:
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
    _check_alone(family)
    if not family.network.shardable:
        kind = type(family.network).__name__
        raise TypeError(f"received {group.size} devices for {kind}, accepted are 1, or 2 by guidance halves")
    heads = widest_group(family)
    if heads < group.size:
        raise ValueError(f"received {group.size} devices, accepted are at most {heads}, one for each head")
    share = Shard(group.rank, group.size)
    return replace(family, network=family.network.shared(group), share=share, group=group.name)


# Guidance halves: of two processes one computes what has the prompt, the other what has the negative prompt.
#
# Source: latent parallelism of classifier-free guidance, Katz (section 7). Outputs are exchanged once a step; nothing
# else is, so that it serves every network.


SIZE: Final = 2


def halve_guidance(family: ModelFamily, group: AllToAllGroup) -> ModelFamily:
    """The same family, its network's `predict` computed by two processes, each some of the sequences.

    Every member calls it alike, with the whole batch and all latents, and gets the whole output. What a sequence takes
    is read, and what it shows is shown, only where it is computed: see :func:`assign_members`.

    Raises:
        ValueError: the group is not one of two, or another computes the family already.
    """
    _check_alone(family)
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
    free = []
    for index, sequence in enumerate(sequences):
        settled = sequence.half
        if settled is None and sequence.region is not None:
            settled = sequence.region.digest[0] % SIZE
        if settled is None:
            free.append(index)
        else:
            place[index] = settled
            loads[settled] += _computed(sequence)
    for index in sorted(free, key=lambda one: -_computed(sequences[one])):
        place[index] = loads.index(min(loads))
        loads[place[index]] += _computed(sequences[index])
    return tuple(place[index] for index in range(len(sequences)))


@dataclass(frozen=True, eq=False)
class GuidanceParallelBatch:
    """A batch, of which this member computes some sequences."""

    own: Any
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
        """See :meth:`giornata_denoiser.families.network.Network.assemble`."""
        member = assign_members(sequences)
        own = self._own(member, sequences)
        return GuidanceParallelBatch(
            self._network.assemble(own) if own else None,
            member,
            [reference_tokens([sequence.grid]) for sequence in sequences],
            [_computed(sequence) for sequence in sequences],
        )

    def predict(
        self,
        batch: GuidanceParallelBatch,
        latents: Tensor,
        conditioning: Sequence[Mapping[str, Tensor]],
        steps: Sequence[int],
        *,
        uses: Sequence[BlockInputs] = (),
        trace: LaneTracer = UNTRACED,
    ) -> Tensor:
        """See :meth:`giornata_denoiser.families.network.Network.predict`; the output is all sequences'."""
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
    return reference_tokens([sequence.grid]) if sequence.region is None else len(sequence.region.computed)


# Groups are made by their members alone, without a world group: a process that is started later finds the others by the
# store, so that it can stand in for one that is lost.


LOOPBACK: Final = "127.0.0.1"
"""All devices of a pool are in one machine."""


class GroupLost(ConnectionError):
    """A member of a group has ended, has left it or does not answer: what it was computing is lost."""

    def __init__(self, devices: Sequence[int], cause: object) -> None:
        super().__init__(f"the group of devices {list(devices)} is lost: {cause}")
        self.devices = tuple(devices)


class RankGroup:
    """Processes that compute one batch, in order; satisfies :class:`giornata.packed.sharding.AllToAllGroup`.

    `devices` number the members, `me` is the calling process's. Members make it at one time, under a `name` that no
    other group of the store has. One thread of a process uses it.

    Raises:
        ValueError: `me` is not among the devices, or a device comes twice.
        GroupLost: another member has not come within the timeout.
    """

    def __init__(  # noqa: PLR0917 - all that a group is
        self,
        store: Store,
        name: str,
        devices: tuple[int, ...],
        me: int,
        device: torch.device,
        timeout: timedelta,
    ) -> None:
        if me not in devices or len(set(devices)) < len(devices):
            raise ValueError(f"received {list(devices)}, accepted are different devices, {me} among them")
        self.devices, self.rank, self.size = devices, devices.index(me), len(devices)
        self.name, self._device = name, device
        self._aborted = False
        self._members: Any = None
        if self.size > 1:
            with self._losing():
                self._members = _made(PrefixStore(name, store), self.rank, self.size, device, timeout)

    def trade(self, flat: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """See :meth:`giornata.packed.sharding.AllToAllGroup.trade`; tensors are contiguous, and on the group's device.

        On a CUDA device the current stream waits, not the host.

        Raises:
            GroupLost: a member has ended or closed the group. On a CUDA device no member notices that by itself: the
                process that does has all members close the group.
        """
        if self.size == 1:
            return flat
        parts, each = flat.view(torch.uint8), flat.element_size()  # bytes: gloo does not know every dtype
        got = parts.new_empty(sum(received) * each)
        with self._losing():
            self._check()
            sizes = ([count * each for count in counts] for counts in (received, sent))
            self._members.alltoall_base(got, parts, *sizes).wait()
        return got.view(flat.dtype)

    def check(self) -> None:
        """Raise GroupLost where the group was aborted meanwhile: on a CUDA device what was traded is then nothing."""
        with self._losing():
            self._check()

    def abort(self) -> None:
        """Have what this process trades fail, now on a CUDA device: NCCL's waits end for no lost member. Any thread.

        gloo's waits cannot be ended so, and end with the lost member's connection.
        """
        self._aborted, members = True, self._members
        if members is not None and self._device.type == "cuda":
            members.abort()

    def _check(self) -> None:
        if self._aborted or (self.size > 1 and self._members is None):
            raise RuntimeError("it was aborted" if self._aborted else "it was closed")

    def close(self) -> None:
        """Leave the group: the other members' trades raise, those that they wait for now and all later ones."""
        members, self._members = self._members, None
        if members is not None and self._device.type == "cuda" and not self._aborted:
            members.abort()
        del members  # gloo closes its connections when nothing holds the group any more

    @contextmanager
    def _losing(self) -> Iterator[None]:
        """Close the group where it fails, so that all of its members fail at once."""
        try:
            yield
        except RuntimeError as error:  # as all errors of torch.distributed are
            self.close()
            raise GroupLost(self.devices, error) from error


class RankGroups:
    """The groups of one process, `me`, whose model is on `device`; `store` is the one that all processes share."""

    def __init__(self, store: Store, me: int, device: torch.device, timeout_s: float) -> None:
        self._store, self._me, self._device = store, me, device
        self._timeout = timedelta(seconds=timeout_s)
        self._groups: dict[tuple[int, ...], tuple[int, RankGroup]] = {}

    def of(self, devices: tuple[int, ...], epoch: int) -> RankGroup:
        """The group of these devices: the one of this epoch if it is kept, else a new one, which all members make.

        An epoch is a number that grows whenever a process has been replaced; a closed group takes a new one. Raises as
        :class:`RankGroup`.
        """
        kept = self._groups.get(devices)
        if kept is not None and kept[0] == epoch:
            return kept[1]
        self.drop(devices)
        name = f"{epoch}/{'-'.join(map(str, devices))}"
        made = RankGroup(self._store, name, devices, self._me, self._device, self._timeout)
        self._groups[devices] = epoch, made
        return made

    def warm(self, groups: Iterable[tuple[int, ...]], epoch: int) -> None:
        """Make those of `groups` that this process belongs to, and trade a little in each; raises as :meth:`of`.

        All processes name all groups, in one order: a member waits for the others of a group before it makes the next.
        """
        for devices in groups:
            if self._me in devices:
                group = self.of(devices, epoch)
                each = [1] * group.size
                group.trade(torch.zeros(group.size, device=self._device), each, each)

    def abort(self, devices: tuple[int, ...], epoch: int) -> None:
        """Abort the group of these devices if it is of this epoch; see :meth:`RankGroup.abort`. Any thread."""
        kept = self._groups.get(devices)
        if kept is not None and kept[0] == epoch:
            kept[1].abort()

    def drop(self, devices: tuple[int, ...]) -> None:
        """Close the group of these devices, if there is one."""
        kept = self._groups.pop(devices, None)
        if kept is not None:
            kept[1].close()

    def close(self) -> None:
        """Close all groups."""
        for devices in tuple(self._groups):
            self.drop(devices)


def _made(store: Store, rank: int, size: int, device: torch.device, timeout: timedelta) -> Any:
    """A process group of torch that belongs to no world: NCCL's on a CUDA device, gloo's elsewhere."""
    if device.type == "cuda":
        from torch.distributed import ProcessGroupNCCL  # noqa: PLC0415 - torch's CUDA builds bring it, others do not

        options = ProcessGroupNCCL.Options()
        options._timeout = timeout  # noqa: SLF001 - as torch.distributed sets it
        return ProcessGroupNCCL(store, rank, size, options)
    of_gloo: Any = ProcessGroupGloo
    options = of_gloo._Options()  # noqa: SLF001 - as torch.distributed makes them
    options._devices = [of_gloo.create_device(hostname=LOOPBACK)]  # noqa: SLF001 - likewise
    options._timeout = timeout  # noqa: SLF001 - likewise
    return of_gloo(store, rank, size, options)
