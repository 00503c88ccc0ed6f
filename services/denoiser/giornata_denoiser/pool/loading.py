"""What a rank loads before it is ready: the model, what computes steps over it, and the groups' store."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from giornata.planning.costing import CostModel
from giornata.scheduling.degrees.pool import Devices
from giornata_denoiser.checkpoint import Checkpoint, open_checkpoint
from giornata_denoiser.engine.checks import Verdict
from giornata_denoiser.engine.computing import Computing
from giornata_denoiser.engine.loading import Loader
from giornata_denoiser.engine.rehearsal import rehearse
from giornata_denoiser.families.protocol import ModelFamily
from giornata_denoiser.pool.messages import Opening, Ready
from giornata_denoiser.pool.rank import Loaded
from giornata_denoiser.pool.steps import RankSteps
from giornata_denoiser.profiling.calibration import profile_of
from giornata_denoiser.tuning import free_bytes, memory_of, reusing_of


class Alone:
    """Families of a pool whose rows are each on one device; satisfies :class:`giornata_denoiser.pool.steps.Families`."""

    def __init__(self, family: ModelFamily) -> None:
        self._family = family

    def of(self, devices: Devices, epoch: str) -> ModelFamily:  # noqa: ARG002 - protocol
        """The model itself."""
        if len(devices) != 1:
            raise ValueError(f"received a step on devices {devices}; accepted is one device")
        return self._family

    def close(self, devices: Devices) -> None:
        """There is nothing to close."""


@contextmanager
def loaded(opening: Opening) -> Iterator[Loaded]:
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
    memory = memory_of(config, free_bytes(device))
    with Loader() as loader:
        reusing = reusing_of(config, device, memory, loader, model)

        def make(family: ModelFamily) -> Computing:
            # A step's latents go to the host at its end: its verdict is there as early.
            return Computing(
                family, time.perf_counter, checkpoint.preview_map, reusing=reusing, judge=Verdict
            )

        steps = RankSteps(opening.me, _families(opening, checkpoint), make)
        yield steps, Ready(profile=profile)


def _families(opening: Opening, checkpoint: Checkpoint) -> Alone:  # noqa: ARG001 - groups come
    return Alone(checkpoint.family)
