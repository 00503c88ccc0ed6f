"""Groups of CUDA devices compute what the CPU computes, over NCCL, and a lost member is told of."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from giornata_denoiser.parallel import shared
from giornata_lab.bench.compute import tiny_flux
from giornata_lab.bench.compute.tiny_flux import Spec
from tests.integration.denoiser.parallel.members import CPU, Latents, Member, Members, advanced
from tests.lab.gpu.engines import FLOAT32, family

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

SPECS = [
    Spec("first", grid=(5, 7), text_tokens=3, steps=6, seed=1),
    Spec("guided", grid=(4, 4), text_tokens=6, steps=6, seed=2, true_cfg_scale=2.5),
    Spec("small", grid=(1, 3), text_tokens=1, steps=6, seed=3),
]


@pytest.fixture
def members() -> Iterator[Members]:
    made = Members(2, cuda=True)
    yield made
    made.close()


def step_on(device: torch.device, member: Member | None, devices: tuple[int, ...], epoch: int) -> Latents:
    """The rows' latents after their first step, by a group, or by this process alone."""
    of = family(device)
    part = of if member is None else shared(of, member.group(devices, epoch))
    rows = [tiny_flux.row(of, spec) for spec in SPECS]
    return [row.latent.cpu().numpy() for row in advanced(part, rows, ())]


def step_of(member: Member, devices: tuple[int, ...], epoch: int) -> Latents:
    return step_on(member.device, member, devices, epoch)


def test_two_devices_compute_what_the_cpu_computes(members: Members) -> None:
    with torch.inference_mode():
        wanted = step_on(CPU, None, (0,), 0)
    for epoch, devices in enumerate([(0,), (0, 1), (1,), (0, 1)]):
        for latents in members.run(devices, step_of, devices, epoch):
            for latent, other in zip(latents, wanted, strict=True):
                np.testing.assert_allclose(latent, other, rtol=0, atol=FLOAT32)


def test_a_new_process_takes_the_place_of_a_killed_one(members: Members) -> None:
    members.run((0, 1), step_of, (0, 1), 0)
    members.signal(1, signal.SIGKILL)
    members.run((0,), drop, (0, 1))
    members.start(1)
    members.run((0, 1), step_of, (0, 1), 1)


def drop(member: Member, devices: tuple[int, ...]) -> None:
    member.groups.drop(devices)
