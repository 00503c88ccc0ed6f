"""What the plan of placement is made from."""

from __future__ import annotations

from giornata.residency.host_tiers import HostTiers
from giornata.residency.use_based import TierKind
from giornata.wire.loras import CanonicalLora, HostTier, LoraRecord, LoraState, StoredFile, TierChange
from giornata.wire.workers import (
    AdapterCounters,
    RankPhase,
    RankState,
    ServiceName,
    ServiceState,
    Tier,
    WorkerState,
)
from giornata_router.lora_placement import REGISTERED_S, LoraCatalogue, observed

NOW_S = 10_000.0


def record(
    digest: str, size: int, *, created_s: int = 0, pinned: bool = False, tenant: str = "t"
) -> LoraRecord:
    return LoraRecord(
        lora_id=f"lora_{digest}",
        tenant=tenant,
        created_s=created_s,
        state=LoraState.READY,
        pinned=pinned,
        canonical=CanonicalLora(
            file=StoredFile(sha256=digest, size_bytes=size), model_digest="d", rank=1, modules=1
        ),
    )


def worker(name: str, limit: int = 100, *, ranks: int = 0, host: str | None = None) -> ServiceState:
    shown = WorkerState(
        capacity_rows=1,
        capacity_tokens=1,
        adapters=AdapterCounters(memory_limit_bytes=limit),
        lora_host=host,
        ranks=(RankState(device="cpu", phase=RankPhase.READY),) * ranks,
    )
    return ServiceState(
        service=ServiceName.DENOISER, instance=name, host="machine", version="1", ready=True, worker=shown
    )


def tiers() -> HostTiers:
    known = HostTiers()
    change = TierChange(number=1, sha256="a", size_bytes=5)
    known.observe(
        "i",
        HostTier(
            name="h", epoch=1, number=1, changes=(change,), budget_bytes=50, used_bytes=5, bytes_per_s=7.0
        ),
    )
    return known


def test_the_catalogue_is_what_is_ready_by_its_file() -> None:
    failed = record("c", 3).model_copy(update={"state": LoraState.FAILED})
    catalogue = LoraCatalogue.of(
        [
            record("a", 5, created_s=9),
            record("a", 5, created_s=4, pinned=True, tenant="u"),
            record("b", 6),
            failed,
        ]
    )
    assert catalogue == LoraCatalogue({"a": 5, "b": 6}, frozenset({"a"}), {"a": 4, "b": 0})


def test_hosts_and_memories_of_workers_are_places() -> None:
    catalogue = LoraCatalogue.of([record("a", 5), record("b", 6)])
    here = {"a": Tier.DEVICE, "b": Tier.DISK, "unknown": Tier.MEMORY}
    workers = [worker("w", host="h"), worker("old", 0), worker("pool", ranks=2)]
    host, device, pool = observed(catalogue, tiers(), workers, lambda _: here, NOW_S).places
    assert (host.name, host.kind, host.budget_bytes, host.held) == ("h", TierKind.HOST, 50, {"a": 5})
    assert host.bytes_per_s == 7.0
    assert (device.name, device.kind, device.host) == ("w", TierKind.DEVICE, "h")
    assert (pool.name, pool.kind) == ("pool", TierKind.DEVICE), "its leader holds them for its ranks"
    assert device.held == {"a": 5}


def test_what_no_host_has_is_registered_for_a_while() -> None:
    recent = int(NOW_S - REGISTERED_S / 2)
    catalogue = LoraCatalogue.of(
        [record("a", 5, created_s=recent), record("b", 6, created_s=recent), record("c", 7, created_s=1)]
    )
    assert observed(catalogue, tiers(), (), lambda _: {}, NOW_S).registered == {"b"}
