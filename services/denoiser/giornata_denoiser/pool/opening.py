"""Starting a pool as a denoiser is configured."""

from __future__ import annotations

import os
from typing import Final

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch exports no type

from giornata.scheduling.degrees.pool import Devices
from giornata.scheduling.degrees.subsets import family
from giornata_denoiser.config import DenoiserConfig
from giornata_denoiser.devices import check_present
from giornata_denoiser.pool.messages import Opening
from giornata_denoiser.pool.patience import Patience
from giornata_denoiser.pool.processes import Process, RankProcess
from giornata_denoiser.pool.ranks import Ranks

LOOPBACK: Final = "127.0.0.1"
GROUP_S: Final = 30.0
"""How long members of a group wait for each other; a stalled one is ended long before."""
LEFT_OUT: Final = ("nats_url", "nats_password_file", "blobs_url", "handover_folder", "devices")
"""Of the service's configuration, what a rank has no use for."""


def start_ranks(config: DenoiserConfig, patience: Patience | None = None) -> Ranks:
    """Start a rank for each device. They load the model; :meth:`Ranks.loaded` waits for that.

    The calling thread has to outlive them: the kernel ends them with it.

    Raises:
        Failed: this machine lacks a device.
    """
    devices = config.device_names
    check_present(devices)
    store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)

    def start(me: int) -> RankProcess:
        return Process(opening_of(config, me, store.port))

    return Ranks(devices, start, patience, keeps=store)


def opening_of(config: DenoiserConfig, me: int, port: int) -> Opening:
    """What the rank of a place is told first; `port` is that of the store which the leader hosts."""
    devices = config.device_names
    fields = DenoiserConfig.model_fields
    without = {name: fields[name].get_default(call_default_factory=True) for name in LEFT_OUT}
    own = config.model_copy(update={**without, "device": devices[me]})
    threads = None
    if devices[me] == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        threads = max(1, (os.cpu_count() or 1) // len(devices))
    return Opening(own, me, (LOOPBACK, port), GROUP_S, threads)


def groups_of(devices: int) -> tuple[Devices, ...]:
    """The groups that steps of a pool may have, small ones first."""
    return tuple(sorted((group for group in family(devices) if len(group) > 1), key=len))
