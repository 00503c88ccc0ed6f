"""What a rank loads before it is ready: the model, what computes steps over it, and the groups' store."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Final

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch exports no type

from giornata.planning.costing import CostModel
from giornata.scheduling.degrees.pool import Devices
from giornata_denoiser.checkpoint import open_checkpoint
from giornata_denoiser.engine.checks import FiniteCheck
from giornata_denoiser.engine.computing import ModelRunner
from giornata_denoiser.engine.loading import Loader
from giornata_denoiser.engine.rehearsal import rehearse
from giornata_denoiser.families.protocol import ModelFamily
from giornata_denoiser.parallel.family import shared
from giornata_denoiser.parallel.groups import RankGroups
from giornata_denoiser.parallel.halves import halved
from giornata_denoiser.pool.messages import RankReady, RankSetup
from giornata_denoiser.pool.rank import Loaded
from giornata_denoiser.pool.steps import RankSteps
from giornata_denoiser.profiling.calibration import profile_of
from giornata_denoiser.tuning import memory_on, reusing_of

GROUP_BYTES: Final = 700 << 20
"""GPU memory of a group: 544 to 688 MB a communicator of NCCL have been seen on an A100 (nccl#964)."""
STORE_S: Final = 60.0
"""How long a rank waits for the store that its leader hosts already."""


class GroupFamilies:
    """The family over each group of a rank's; satisfies :class:`giornata_denoiser.pool.steps.Families`."""

    def __init__(self, family: ModelFamily, groups: RankGroups) -> None:
        self._family, self._groups = family, groups

    def meet(self, devices: Devices, epoch: int) -> None:
        """See the protocol; raises GroupLost where a member does not come."""
        self._groups.of(devices, epoch)

    def of(self, devices: Devices, epoch: int, *, halves: bool) -> ModelFamily:
        """See the protocol; raises GroupLost where a member does not come."""
        if len(devices) == 1:
            return self._family
        return (halved if halves else shared)(self._family, self._groups.of(devices, epoch))

    def check(self, devices: Devices, epoch: int) -> None:
        """See the protocol; raises GroupLost."""
        if len(devices) > 1:
            self._groups.of(devices, epoch).check()

    def abort(self, devices: Devices, epoch: int) -> None:
        """See the protocol."""
        self._groups.abort(devices, epoch)

    def close(self, devices: Devices) -> None:
        """See the protocol."""
        self._groups.drop(devices)


@contextmanager
def loaded(opening: RankSetup) -> Iterator[Loaded]:
    """Load the model and compute a picture; what steps load ends with the context.

    Raises:
        Failed: the model cannot be loaded, or cannot compute.
    """
    config = opening.config
    checkpoint = open_checkpoint(config)
    rehearse(checkpoint)
    profile = profile_of(config, checkpoint)
    model = CostModel.of(profile)
    device = checkpoint.family.device
    memory = memory_on(config, checkpoint, opening.groups * GROUP_BYTES)
    with Loader() as loader:
        reusing = reusing_of(config, device, memory, loader, model)

        def make(family: ModelFamily) -> ModelRunner:
            # A step's latents go to the host at its end: its verdict is there as early.
            return ModelRunner(
                family, time.perf_counter, checkpoint.preview_map, reusing=reusing, judge=FiniteCheck
            )

        store = TCPStore(*opening.store, is_master=False, timeout=timedelta(seconds=STORE_S))
        groups = RankGroups(store, opening.me, device, opening.group_s)
        try:
            yield (
                RankSteps(opening.me, GroupFamilies(checkpoint.family, groups), make),
                RankReady(profile=profile),
            )
        finally:
            groups.close()
