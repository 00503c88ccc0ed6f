"""Groups of processes, each with a device, that exchange tensors: made by their members alone, without a world group.

A process that is started later finds the others by the store, so that it can stand in for one that is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo, Store

if TYPE_CHECKING:
    from collections.abc import Iterator

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

        An epoch is a number that grows whenever a process has been replaced; a closed group takes a new one.

        Raises:
            ValueError: this process is not among the devices, or a device comes twice.
            GroupLost: another member has not come within the timeout.
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
