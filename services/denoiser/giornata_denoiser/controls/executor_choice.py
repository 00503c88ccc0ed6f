"""The choice of who computes a row's ControlNets: this process, or an instance of the ControlNet service. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from giornata.control.layout import Behind, sum_residuals
from giornata.control.networks import CPU
from giornata.wire.adapters import ControlKind
from giornata.wire.controlnets import ControlState
from giornata.wire.workers import ServiceState
from giornata_denoiser.choices import ControlNetExecutor

HOST_BYTES_MS: Final = 5e6
"""Bytes a millisecond between processes of one host; measured, see `docs/results/controlnets.md`."""
NETWORK_BYTES_MS: Final = 1e6
"""Between hosts, assumed."""
WORK: Final = 1e9
"""Multiplications of which an instance tells the time."""


class ResidualTiming(NamedTuple):
    """The moments at which a sum of residuals is made and read."""

    made: float
    """Share of the ControlNets' work up to it."""
    read: float
    """Share of the network's work before it."""


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
    """Size of the samples that an instance returns."""
    due: tuple[ResidualTiming, ...]
    """:func:`due` of its ControlNets."""


@dataclass(frozen=True)
class DenoiserProcess:
    """The process that asks."""

    host: str
    """As :attr:`giornata.wire.controlnets.ControlState.machine`."""
    device: str
    """:func:`giornata.control.networks.device_id`."""
    threads: int
    cores: tuple[int, ...]
    """:func:`giornata.runtime.usable_cores`."""


def able_instances(
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


def best_instance(states: Iterable[ServiceState], digests: Collection[str], host: str) -> ServiceState | None:
    """The instance to open a row at: of this host, with weights that are there already, with the least to do."""

    def rank(state: ServiceState) -> tuple[bool, int, float, int, str]:
        told = state.control
        if told is None:
            raise ValueError(f"{state.instance} is no ControlNet instance")
        lacking = len(set(digests) - set(told.resident))
        return told.machine != host, lacking, told.pending_ms, told.rows, state.instance

    return min(states, key=rank, default=None)


def residual_timing(kind: ControlKind, nets: Sequence[Behind]) -> tuple[ResidualTiming, ...]:
    """Return when the sums of what several ControlNets add are made and read; all of their blocks count as equal.

    A transformer reads a sum behind the first block that it is added to; a UNet reads all of them before its decoder,
    which is about half of it.
    """
    if kind is ControlKind.UNET:
        return (ResidualTiming(1.0, 0.5),)
    sums = sum_residuals(nets)
    made = [0] * len(nets)
    blocks = sum(1 + max((sample for sample in net if sample is not None), default=-1) for net in nets)
    found = []
    for parts, block in zip(sums.parts, sums.first, strict=True):
        for net, sample in parts:
            made[net] = max(made[net], sample + 1)
        found.append(ResidualTiming(sum(made) / blocks, (block + 1) / len(sums.behind)))
    return tuple(found)


def exposed_ms(row: RowWork, state: ServiceState, here: DenoiserProcess) -> float:
    """Predicted time for which a step waits for what an instance computes.

    The network computes meanwhile, unless both share a device, or too few cores: then the instance is not faster than
    this process either, whatever both have measured beside others. An instance that has computed nothing yet is taken
    to be as fast as this process.
    """
    told = state.control
    if told is None:
        raise ValueError(f"{state.instance} is no ControlNet instance")
    same = told.machine == here.host
    # One that has computed nothing yet is taken to be as fast as this process; else it would never be asked.
    computed = row.local_ms if told.work_ms is None else row.work / WORK * told.work_ms
    moved = row.moved_bytes / (HOST_BYTES_MS if same else NETWORK_BYTES_MS)
    if same and told.device == here.device and not _roomy(told, here):
        return told.pending_ms + max(computed, row.local_ms) + moved
    waits = (told.pending_ms + (computed + moved) * made - row.network_ms * read for made, read in row.due)
    return max(0.0, *waits)


def _roomy(told: ControlState, here: DenoiserProcess) -> bool:
    """Return whether a denoiser and an instance of one host that compute on processors have a core for each thread."""
    cores = {*here.cores, *told.cores}
    return here.device == CPU and here.threads + told.threads <= len(cores)


def choose_executor(
    row: RowWork,
    states: Iterable[ServiceState],
    digests: Collection[str],
    here: DenoiserProcess,
    executor: ControlNetExecutor,
) -> ServiceState | None:
    """The instance that is to compute a row's ControlNets; None: this process, if it can.

    `states` are :func:`able`.
    """
    found = best_instance(states, digests, here.host)
    has = row.local_ms < float("inf")
    if found is None or (executor is ControlNetExecutor.LOCAL and has):
        return None
    if executor is ControlNetExecutor.SERVICE or not has:
        return found
    return found if exposed_ms(row, found, here) < row.local_ms else None
