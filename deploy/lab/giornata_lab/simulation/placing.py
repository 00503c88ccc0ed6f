"""Plans of placement in the simulator: the router's rules decide, simulated hosts and devices load. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from giornata.residency.use_based import AdapterTier, AdapterUsage, ResidencySnapshot, TierKind, Wanted
from giornata.scheduling.adapters import NeededLora
from giornata_lab.simulation.baselines import PLANNERS
from giornata_lab.simulation.residency import AdapterSetting, LoadReason, SimHost
from giornata_lab.simulation.worker import SimWorker

LARGEST: Final = 1 << 50
"""Bytes of a tier that is told without a limit."""


class SimAdapterPlacement:
    """What plans want, and who loads it.

    Args:
        name: of the plan; not `off`.
        seed: of its draws.
        setting: of tiers and links.
        hosts: in order; `setting.workers_a_host` workers in a row are on each.
        workers: by name, in order.
    """

    def __init__(
        self,
        name: str,
        seed: int,
        setting: AdapterSetting,
        hosts: list[SimHost],
        workers: Mapping[str, SimWorker],
    ) -> None:
        planner = PLANNERS[name]
        self.period_s = planner.period_s
        self._plan, self._uses = planner.make(seed), AdapterUsage(planner.half_life_s)
        self._setting, self._workers = setting, workers
        self._hosts = {f"h{number:04d}": host for number, host in enumerate(hosts)}
        names = list(self._hosts)
        self._host_of = {
            worker: names[number // setting.workers_a_host] for number, worker in enumerate(workers)
        }
        self._known: dict[str, NeededLora] = {}

    def see(self, adapters: tuple[NeededLora, ...], now: float) -> None:
        """A job that has arrived asks for these."""
        self._known.update({lora.digest: lora for lora in adapters})
        self._uses.see([lora.digest for lora in adapters], now)

    def run(self, now: float) -> None:
        """Plan, and begin the loads of what is wanted and absent, as far as it fits beside what rows use."""
        wanted: Wanted = self._plan(self._observed(), self._uses, now)
        for name, digests in wanted.items():
            loras = [self._known[digest] for digest in digests]
            if name in self._hosts:
                self._hosts[name].plan(loras, now)
            else:
                absent = [lora for lora in loras if lora.digest not in self._workers[name].loras.device]
                self._workers[name].loras.ahead(absent, now, LoadReason.PLAN)

    def _observed(self) -> ResidencySnapshot:
        sizes = {digest: lora.size_bytes for digest, lora in self._known.items()}
        return ResidencySnapshot((*self._host_places(), *self._device_places()), sizes)

    def _host_places(self) -> list[AdapterTier]:
        setting = self._setting
        return [
            AdapterTier(
                name,
                TierKind.HOST,
                name,
                min(LARGEST, host.memory.budget_bytes),
                {digest: host.memory.size_of(digest) or 0 for digest in host.memory},
                setting.store_bytes_per_s,
                setting.store_latency_s,
            )
            for name, host in self._hosts.items()
        ]

    def _device_places(self) -> list[AdapterTier]:
        setting = self._setting
        return [
            AdapterTier(
                name,
                TierKind.DEVICE,
                self._host_of[name],
                min(LARGEST, worker.loras.device.budget_bytes),
                {digest: worker.loras.device.size_of(digest) or 0 for digest in worker.loras.device},
                setting.link_bytes_per_s,
                setting.link_latency_s,
                worker.machine.speed,
            )
            for name, worker in self._workers.items()
        ]
