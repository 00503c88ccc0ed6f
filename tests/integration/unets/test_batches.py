"""Rows of UNets beside others, and resumed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from giornata.families import Family
from giornata.scheduling.batch import Capacity
from giornata.tensors import pack, unpack
from giornata.wire.samplers import Sampler
from giornata_denoiser.engine.engine import Engine
from giornata_denoiser.rows.snapshot import Snapshot
from giornata_prepost.images.geometry import Size
from tests.integration.unets.served import Asked, Served, denoised

Opened = Callable[[Family], Served]
CLOSE = 3e-5


@pytest.mark.parametrize("family", [Family.SD_INPAINT, Family.SDXL])
def test_rows_that_differ_in_everything_are_the_same_as_alone(family: Family, served: Opened) -> None:
    of = served(family)
    rows = [
        of.edit(Asked(sampler=Sampler.EULER_ANCESTRAL, strength=0.8, steps=5), "ancestral"),
        of.edit(Asked(sampler=Sampler.DPMPP_2M, size=Size(64, 128), negative_prompt=None), "multistep"),
        of.edit(Asked(guidance_scale=1.0, negative_prompt=None, prompt="a cat", steps=3, seed=9), "plain"),
    ]
    if family is Family.SDXL:
        rows.append(of.generation(Asked(sampler=Sampler.DPMPP_2M_SDE, size=Size(64, 64), steps=3), "made"))
    together = denoised(of, rows)
    for row in rows:
        alone = denoised(of, [row])[row.key.job_id]
        close = CLOSE * float(alone.abs().max())
        torch.testing.assert_close(together[row.key.job_id], alone, atol=close, rtol=0)


@pytest.mark.parametrize(
    ("family", "sampler", "generated"),
    [
        (Family.SD, Sampler.PNDM, False),
        (Family.SDXL, Sampler.EULER_ANCESTRAL, True),
        (Family.SDXL_INPAINT, Sampler.DPMPP_2M_SDE, False),
    ],
)
def test_a_row_resumes_in_the_middle_of_its_sampler(
    family: Family, sampler: Sampler, generated: bool, served: Opened
) -> None:
    of, asked = served(family), Asked(sampler=sampler, size=Size(64, 64), steps=5)
    made = of.generation if generated else of.edit
    row = made(asked, "row")
    engine = Engine(of.checkpoint.family, Capacity(rows=1, tokens=1), lambda: 0.0)
    engine.batch.submit([row])
    reports = [engine.step() for _ in range(3)]
    assert reports[-1] is not None
    left: Snapshot = reports[-1].advanced[0].export()
    resumed = made(asked, "row", Snapshot.of(3, unpack(pack(left.tensors))))
    assert (resumed.step, resumed.done) == (3, False)
    whole = denoised(of, [row])["row"]
    close = CLOSE * float(whole.abs().max())
    torch.testing.assert_close(denoised(of, [resumed])["row"], whole, atol=close, rtol=0)
