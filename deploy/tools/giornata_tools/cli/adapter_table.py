"""``giornata status --adapters``: where LoRAs are, by host and worker, and why they were loaded."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from giornata.wire.fleet import FleetView, InstanceView
from giornata_tools.tables import table

NONE = "-"
HOST_COUNTS = [
    "MB",
    "of",
    "missing",
    "hits",
    "demand",
    "ahead",
    "plan",
    "waited s",
    "evicted",
    "failed",
    "plans",
]
WORKER_COUNTS = ("MB", "hits", "evicted", "from store", "ahead", "plan", "waited s", "failed")


def adapter_table(fleet: FleetView) -> RenderableType:
    """A line per host tier, then a line per worker."""
    return Group(_hosts(fleet), Text(), _workers(fleet))


def _hosts(fleet: FleetView) -> RenderableType:
    lines = table("host", *HOST_COUNTS, numbers=HOST_COUNTS)
    for one in fleet.instances:
        if (tier := one.host_tier) is None:
            continue
        loads = tier.loads
        lines.add_row(
            tier.name,
            _mb(tier.used_bytes),
            _mb(tier.budget_bytes),
            *map(str, (tier.missing, tier.hits, loads.demand, loads.ahead, loads.plan)),
            f"{loads.waited_ms / 1e3:.1f}",
            *map(str, (tier.evicted, tier.failed)),
            f"{tier.plans}" + (f", {tier.plans_ignored} ignored" if tier.plans_ignored else ""),
        )
    return lines if lines.row_count else Text("No LoRA store fills a host tier.")


def _workers(fleet: FleetView) -> RenderableType:
    lines = table("worker", "host", "tier", *WORKER_COUNTS, numbers=WORKER_COUNTS)
    for one in fleet.instances:
        for row in _rows(one):
            lines.add_row(*row)
    return lines if lines.row_count else Text("No worker tells of LoRAs.")


def _rows(one: InstanceView) -> list[tuple[str, ...]]:
    """A worker's line of each tier; what belongs to the worker stands in the first."""
    if one.worker is None or (counts := one.worker.adapters) is None:
        return []
    asked = map(str, (counts.misses, counts.prefetched, counts.planned))
    loads = (*asked, f"{counts.waited_ms / 1e3:.1f}", str(counts.failed))
    tiers = (
        ("device", counts.device_bytes, counts.hits_device, counts.evicted_device),
        ("memory", counts.memory_bytes, counts.hits_memory, counts.evicted_memory),
        ("disk", counts.disk_bytes, counts.hits_disk, counts.evicted_disk),
    )
    rows = []
    for place, (tier, size_bytes, hits, evicted) in enumerate(tiers):
        name = (one.instance, one.worker.lora_host or NONE) if place == 0 else ("", "")
        told = loads if place == 0 else ("",) * len(loads)
        rows.append((*name, tier, _mb(size_bytes), str(hits), str(evicted), *told))
    return rows


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.0f}"
