"""The inputs of the plan of placement: the host tiers and workers that are alive, and the catalogue. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from giornata.residency.host_tiers import HostTiers
from giornata.residency.use_based import AdapterTier, ResidencySnapshot, TierKind
from giornata.wire.loras import HostTier, LoraRecord, LoraState
from giornata.wire.workers import ServiceState, Tier

REGISTERED_S: Final = 600.0
"""How long a LoRA that no host has counts as newly registered."""
ASSUMED_BYTES_PER_S: Final = 5e8
"""Rate of a host's link, before one was measured."""


@dataclass(frozen=True)
class LoraCatalogue:
    """The LoRAs that are ready, by the digest of their canonical file."""

    sizes: Mapping[str, int]
    pinned: frozenset[str]
    created_s: Mapping[str, int]
    """Unix time at which each was registered first."""

    @classmethod
    def of(cls, records: Iterable[LoraRecord]) -> LoraCatalogue:
        """The catalogue in records; several of one file are one."""
        sizes: dict[str, int] = {}
        created_s: dict[str, int] = {}
        pinned = set[str]()
        for record in records:
            if record.state is not LoraState.READY or record.canonical is None:
                continue
            file = record.canonical.file
            sizes[file.sha256] = file.size_bytes
            created_s[file.sha256] = min(record.created_s, created_s.get(file.sha256, record.created_s))
            if record.pinned:
                pinned.add(file.sha256)
        return cls(sizes, frozenset(pinned), created_s)


def observed(
    catalogue: LoraCatalogue,
    tiers: HostTiers,
    workers: Iterable[ServiceState],
    adapters: Callable[[str], Mapping[str, Tier]],
    unix_s: float,
) -> ResidencySnapshot:
    """The cluster now.

    Args:
        catalogue: the LoRAs that are ready.
        tiers: the host tiers.
        workers: telemetry of all workers.
        adapters: the fastest tier of each LoRA that a worker has, by digest.
        unix_s: Unix time.
    """
    hosts = [_host(name, told, tiers.held(name)) for name in tiers.names() if (told := tiers.told(name))]
    held = {digest for host in hosts for digest in host.held}
    registered = frozenset(
        digest
        for digest, created_s in catalogue.created_s.items()
        if digest not in held and unix_s - created_s < REGISTERED_S
    )
    devices = _devices(workers, adapters, catalogue.sizes)
    return ResidencySnapshot((*hosts, *devices), catalogue.sizes, catalogue.pinned, registered)


def _host(name: str, told: HostTier, held: Mapping[str, int]) -> AdapterTier:
    return AdapterTier(
        name,
        TierKind.HOST,
        name,
        told.budget_bytes,
        dict(held),
        bytes_per_s=told.bytes_per_s or ASSUMED_BYTES_PER_S,
    )


def _devices(
    workers: Iterable[ServiceState],
    adapters: Callable[[str], Mapping[str, Tier]],
    sizes: Mapping[str, int],
) -> Iterator[AdapterTier]:
    """Workers that tell how many bytes of LoRAs their memory holds."""
    for state in workers:
        worker = state.worker
        if worker is None or worker.adapters is None or not worker.adapters.memory_limit_bytes:
            continue
        here = adapters(state.instance)
        held = {
            digest: sizes[digest]
            for digest, tier in here.items()
            if tier in {Tier.DEVICE, Tier.MEMORY} and digest in sizes
        }
        yield AdapterTier(
            state.instance,
            TierKind.DEVICE,
            worker.lora_host or state.host,
            worker.adapters.memory_limit_bytes,
            held,
        )
