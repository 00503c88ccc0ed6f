"""Who computes the ControlNets of a row: this process, or which instance of the ControlNet service. Pure."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from giornata.control.devices import CPU
from giornata.wire.adapters import ControlKind
from giornata.wire.workers import ServiceState

HOST_BYTES_MS: Final = 5e6
"""Bytes a millisecond between processes of one host; measured, see `docs/results.md`."""
NETWORK_BYTES_MS: Final = 1e6
"""Between hosts, assumed."""
WORK: Final = 1e9
"""Multiplications of which an instance tells the time."""


class Executor(StrEnum):
    """Who computes ControlNets."""

    AUTO = "auto"
    """Whoever is predicted to hold up the row's steps the least."""
    LOCAL = "local"
    """This process, where it has them all."""
    SERVICE = "service"
    """An instance of the ControlNet service, where one has them all."""


@dataclass(frozen=True)
class RowWork:
    """One step of a row, as far as it matters who computes its ControlNets."""

    network_ms: float
    """Predicted time of the network without them."""
    local_ms: float
    """Predicted time of them in this process; infinite where it does not have them."""
    work: float
    """Multiplications of them."""
    moved_bytes: int
    """Of the samples that an instance returns."""
    sums: int
    """Samples that are waited for, one after the other."""
    kind: ControlKind


@dataclass(frozen=True)
class Here:
    """The process that asks."""

    host: str
    """As :attr:`giornata.wire.controlnets.ControlState.machine`."""
    device: str
    """:func:`giornata.control.devices.device_id`."""
    threads: int
    cores: int = os.cpu_count() or 1


def able(
    states: Iterable[ServiceState], digests: Collection[str], excluded: Collection[str] = ()
) -> list[ServiceState]:
    """The instances that take another row with these ControlNets."""
    return [
        state
        for state in states
        if state.control is not None
        and state.instance not in excluded
        and state.control.rows < state.control.capacity_rows
        and {card.digest for card in state.controlnets}.issuperset(digests)
    ]


def best(states: Iterable[ServiceState], digests: Collection[str], host: str) -> ServiceState | None:
    """The instance to open a row at: of this host, with weights that are there already, with the least to do."""

    def rank(state: ServiceState) -> tuple[bool, int, float, int, str]:
        told = state.control
        if told is None:
            raise ValueError(f"{state.instance} is no ControlNet instance")
        lacking = len(set(digests) - set(told.resident))
        return told.machine != host, lacking, told.pending_ms, told.rows, state.instance

    return min(states, key=rank, default=None)


def exposed_ms(row: RowWork, state: ServiceState, here: Here) -> float:
    """Predicted time for which a step waits for what an instance computes.

    The network computes meanwhile, unless both share a device, or too few cores. A transformer waits for the first
    sample behind its first block; a UNet for all of them before its decoder, which is about half of it.
    """
    told = state.control
    if told is None:
        raise ValueError(f"{state.instance} is no ControlNet instance")
    same = told.machine == here.host
    # One that has computed nothing yet is taken to be as fast as this process; else it would never be asked.
    own_ms = row.local_ms if told.work_ms is None else row.work / WORK * told.work_ms
    computed = own_ms + told.pending_ms
    moved = row.moved_bytes / (HOST_BYTES_MS if same else NETWORK_BYTES_MS)
    roomy = here.device == CPU and here.threads + told.threads <= here.cores
    if same and told.device == here.device and not roomy:
        return computed + moved
    meanwhile = row.network_ms / 2 if row.kind is ControlKind.UNET else row.network_ms
    first = 0.0 if row.kind is ControlKind.UNET else (computed + moved) / max(1, row.sums)
    return max(first, computed + moved - meanwhile)


def chosen(
    row: RowWork, states: Iterable[ServiceState], digests: Collection[str], here: Here, executor: Executor
) -> ServiceState | None:
    """The instance that is to compute a row's ControlNets; None: this process, if it can.

    `states` are :func:`able`.
    """
    found = best(states, digests, here.host)
    has = row.local_ms < float("inf")
    if found is None or (executor is Executor.LOCAL and has):
        return None
    if executor is Executor.SERVICE or not has:
        return found
    return found if exposed_ms(row, found, here) < row.local_ms else None
