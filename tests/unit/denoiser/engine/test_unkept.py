"""A device that keeps no slabs: blocks gather entries as they are stored, and rows come to the same pictures."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from giornata.packed.pages import KVPages
from giornata.packed.region import region
from giornata.scheduling.batch import RowKey
from giornata.wire.samplers import Sampler
from giornata.wire.values import BlockMode
from giornata_denoiser.blocks.device import Device
from giornata_denoiser.blocks.slabs import Slabs
from giornata_denoiser.choices import EXACT, CacheForm
from giornata_denoiser.engine.loading import Loader
from giornata_denoiser.engine.weighing import StepBudget, row_bytes, step_bytes
from giornata_denoiser.families.sampling.flow_matching import FlowMatching, shifted_by_size
from giornata_denoiser.rows.row import Row
from giornata_denoiser.rows.stored import StoredTensor
from giornata_denoiser.rows.template import CachedBlock, CachedTemplate, Entry
from tests.fakes import tiny_flux
from tests.fakes.tiny_flux import Spec
from tests.unit.denoiser.engine.edits import FORMS, GRID, edit, engine, finished, template, where

FLOAT32 = 1e-5


class Unkept(Device):
    keeps = False


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("forms", [FORMS[0], FORMS[1], FORMS[2]])
def test_pictures_are_those_of_kept_slabs(forms: frozenset[CacheForm], corrected: bool, ahead: bool) -> None:
    of = tiny_flux.family()
    taken = template(of, forms, steps=3)
    bits = EXACT if corrected else None
    rows = [
        edit(of, taken, Spec("a", grid=GRID, steps=6, seed=1)),
        edit(of, taken, Spec("b", grid=GRID, steps=4, seed=2, true_cfg_scale=2.0), where((1, 2, 3))),
        replace(edit(of, taken, Spec("c", grid=GRID, steps=5, seed=3)), region=None, template=None),
    ]
    ended = []
    for device in (Device(), Unkept()):
        with Loader() as loader:
            made = engine(of, device=device, correction_bits=bits, loader=loader if ahead else None)
            made.batch.submit(rows)
            ended.append(finished(made))
    for name in "abc":
        kept, unkept = (each[name].latent for each in ended)
        torch.testing.assert_close(unkept, kept, atol=FLOAT32, rtol=0)


def test_nothing_is_held_but_the_entry() -> None:
    of = tiny_flux.family()
    taken = template(of)
    for device, held in ((Unkept(), True), (Device(), False)):
        slabs = Slabs(taken.entries[0], where(), 3, of, device=device)
        found = slabs.keys_values(1)
        assert isinstance(found, KVPages) is held
        key = found.key.data if isinstance(found, KVPages) else found.key
        stored = taken.entries[0].blocks[1].key
        assert stored is not None
        assert (key.data_ptr() == stored.data.data_ptr()) is held
    sizes = Slabs(taken.entries[0], where(), 3, of, device=Unkept()).sizes(BlockMode.KV)
    assert sizes.sum() == taken.entries[0].size_bytes


TRACK = FlowMatching(tiny_flux.SCHEDULER, shifted_by_size).track(
    sampler=Sampler.EULER, steps=28, strength=1.0, cells=4096
)


def flux_row(job: str, template_of: CachedTemplate) -> Row:
    """An edit of a tenth of 1024x1024 pixels; its tensors have sizes and no values."""
    touched = torch.zeros(64, 64, dtype=torch.bool)
    touched.view(-1)[:410] = True

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    prompt = SimpleNamespace(joint_tokens=512, size_bytes=512 * 4096 * 2 + 768 * 2)
    return Row(
        RowKey(job, 1, 0),
        (64, 64),
        TRACK,
        0,
        empty(4096, 64),
        cast("Any", (prompt,)),
        1.0,
        dict.fromkeys(("noise", "image_latents", "mask"), empty(4096, 64)),
        region=region(touched),
        template=template_of,
    )


def flux_recording() -> CachedTemplate:
    """One level in 4 bits, of 57 blocks."""

    def stored() -> StoredTensor:
        data = torch.empty(4096, 1536, dtype=torch.uint8, device="meta")
        return StoredTensor(data, *(torch.empty(3072, device="meta") for _ in range(2)))

    return CachedTemplate(
        "t", (64, 64), (Entry(0.5, tuple(CachedBlock(stored(), stored()) for _ in range(57))),)
    )


def test_a_row_of_flux_takes_less_than_0_8_gb_of_a_gpu() -> None:
    network = SimpleNamespace(prepared_bytes=344 * 3072 * 2)
    of: Any = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16, network=network, specs=())
    shared = flux_recording()
    row = flux_row("a", shared)
    assert 0.6e9 < row_bytes(row, of, 4) <= 0.8e9
    host: Any = SimpleNamespace(device=torch.device("cpu"), dtype=torch.bfloat16, network=network, specs=())
    assert row_bytes(row, host, 4) > 3.8e9, "slabs in 16 bits"
    entry = shared.entries[0].size_bytes
    assert 0.71e9 < entry < 0.73e9
    beside = [flux_row("b", shared), flux_row("c", flux_recording())]
    budget = StepBudget(correction_bits=4)
    alone = step_bytes([row], budget, of)
    assert step_bytes([row, beside[0]], budget, of) - alone == row_bytes(row, of, 4)
    assert step_bytes([row, beside[1]], budget, of) - alone == row_bytes(row, of, 4) + entry
