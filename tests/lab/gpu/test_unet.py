"""UNets over tiles compute on a device what they compute on the CPU."""

from __future__ import annotations

import pytest
import torch

from giornata_denoiser.families.network import ModelFamily
from giornata_denoiser.families.sampling import FlowMatching, shifted_by_size
from giornata_denoiser.families.unet.network import network_of
from giornata_lab.bench.compute import tiny_flux, tiny_unet
from tests.lab.gpu.engines import FLOAT32, finished, latents
from tests.unit.denoiser.families.test_unet_engine import edit, row, template

CPU = torch.device("cpu")


def family(device: torch.device, dtype: torch.dtype = torch.float32) -> ModelFamily:
    """With the same weights everywhere."""
    network = network_of(tiny_unet.unet("xl").to(device, dtype))
    return ModelFamily(network.text, FlowMatching(tiny_flux.SCHEDULER, shifted_by_size), network)


@pytest.mark.parametrize("bits", [None, 0])
def test_rows_over_tiles_are_those_of_the_cpu(device: torch.device, bits: int | None) -> None:
    """Beside one in full, corrected or not; what the template keeps is exact, so that nothing rounds apart."""
    found = []
    for where in (CPU, device):
        of = family(where)
        taken = template(of)
        rows = [edit(of, "a", taken, seed=1, scale=2.0), edit(of, "b", taken, seed=2), row(of, "c", seed=3)]
        found.append(latents(finished(of, rows, correction_bits=bits)))
    for name in "abc":
        torch.testing.assert_close(found[1][name], found[0][name], atol=FLOAT32, rtol=0)


def test_half_precision_stays_near_single(device: torch.device) -> None:
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        of = family(device, dtype)
        rows = [edit(of, name, template(of, bits=8), seed=seed) for seed, name in enumerate("ab")]
        found.append(latents(finished(of, rows, correction_bits=8)))
    for name in "ab":
        assert (found[1][name] - found[0][name]).abs().mean() < 0.05
        assert (found[0][name] - found[0]["a" if name == "b" else "b"]).abs().mean() > 0.5
