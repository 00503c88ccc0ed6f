"""What a row reuses: the compute set of its inspection, and a template that is worth it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from giornata.packed.region import region
from giornata.planning.costs import StepCosts
from giornata.wire.jobs import Job
from giornata.wire.requests import EditParameters, Reuse
from giornata.wire.values import CellMap
from giornata_denoiser.attempts import inputs, outcomes
from giornata_denoiser.attempts.inputs import reused, rows_of
from giornata_denoiser.choices import CacheForm
from giornata_denoiser.rows.adapters import Adapters, RowLora
from giornata_denoiser.rows.row import RecordingSpec
from giornata_denoiser.rows.stored import store
from giornata_denoiser.rows.template import CachedBlock, CachedTemplate, Entry, template_noise
from giornata_denoiser.templates import identity, lookup
from giornata_denoiser.templates.lookup import TemplateReuse
from tests.fakes import tiny_flux
from tests.fakes.profiles import WEIGHTS
from tests.fakes.tiny_flux import Spec
from tests.unit.denoiser.attempts.test_attempt import INSPECTION, JOB
from tests.unit.denoiser.templates.desk import CHECKPOINT, COSTS, FAMILY, WIDTH, desk


async def test_noise_levels_and_regions_are_made_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[tuple[str, threading.Thread]] = []

    def watched(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            threads.append((name, threading.current_thread()))
            return work(*args, **named)

        return call

    monkeypatch.setattr(lookup, "wanted", watched("wanted", identity.wanted))
    monkeypatch.setattr(inputs, "reused", watched("reused", inputs.reused))
    async with desk(template_policy="off") as made, made.lookup.held(made.request) as how:
        await rows_of(made.request, CHECKPOINT, made.blobs, how)
    assert [name for name, _ in threads] == ["wanted", "reused"]
    assert threading.main_thread() not in {thread for _, thread in threads}


def test_a_template_that_is_not_worth_it_is_told_apart_from_none() -> None:
    row = tiny_flux.row(FAMILY, Spec())
    cells = torch.zeros(row.grid, dtype=torch.bool)
    cells[0, 0] = True
    where = region(cells)
    kept = CachedBlock(*(store(torch.zeros(row.image_tokens, WIDTH), 8) for _ in range(2)))
    made = CachedTemplate("t", row.grid, (Entry(1.0, (kept,) * FAMILY.depth),))
    slow = StepCosts(WEIGHTS, (1e6, 1.0))
    uses = [
        outcomes.template_use(job_that_reuses(), reused(row, computed, how, FAMILY))
        for computed, how in (
            (where, TemplateReuse(1.0, made, COSTS)),
            (where, TemplateReuse(1.0, made, slow)),
            (None, TemplateReuse(1.0, made, COSTS)),
            (where, TemplateReuse(1.0, None, COSTS)),
            (None, TemplateReuse(1.0, None, COSTS)),
        )
    ]
    assert uses == ["hit", "skipped", "skipped", "miss", "miss"]


def test_an_edit_under_adapters_leaves_no_template() -> None:
    spec = RecordingSpec(frozenset({CacheForm.KV}), 8)
    how = TemplateReuse(1.0, None, COSTS, renew_steps=3, leaves=spec, room_bytes=1 << 30)
    plain = tiny_flux.row(FAMILY, Spec(grid=(4, 4), steps=7))
    cells = torch.zeros(plain.grid, dtype=torch.bool)
    cells[0, 0] = True
    for adapters, left in ((Adapters(), spec), (Adapters((RowLora("a"),)), None)):
        found = reused(replace(plain, adapters=adapters), region(cells), how, FAMILY)
        assert found.renewed_every
        assert found.records == left


@pytest.mark.parametrize(
    ("options", "reuse", "kept"),
    [
        ({"reuse_text": "padding"}, Reuse.AUTO, True),
        ({"reuse_text": "padding"}, Reuse.STRICT, False),
        ({"reuse_text": "off"}, Reuse.AUTO, False),
        ({}, Reuse.AUTO, False),
    ],
)
async def test_padding_is_kept_where_that_is_configured_and_nothing_else_is_asked(
    options: dict[str, Any], reuse: Reuse, kept: bool
) -> None:
    async with desk(template_policy="off", **options) as made:
        parameters = made.request.job.parameters.model_copy(update={"reuse": reuse})
        job = made.request.job.model_copy(update={"parameters": parameters})
        async with made.lookup.held(made.request.model_copy(update={"job": job})) as how:
            assert how is not None
            assert how.keeps_padding is kept


async def test_a_row_computes_the_compute_set_that_its_inspection_carries() -> None:
    """Outside of it the noise is that of the recording that it takes from, and its own without one."""
    cells = np.zeros((3, 4), bool)
    cells[1, 1:3] = True
    carried = CellMap(height=3, width=4, bits=np.packbits(cells).tobytes())
    inspection = INSPECTION.model_copy(update={"compute_set": {1: carried}})
    kept = CachedBlock(*(store(torch.zeros(12, WIDTH), 8) for _ in range(2)))
    made = CachedTemplate("t", (3, 4), (Entry(1.0, (kept,) * FAMILY.depth),))
    async with desk(template_policy="off") as at:
        request = at.request.model_copy(update={"inspection": inspection})
        (plain,) = await rows_of(request, CHECKPOINT, at.blobs, None)
        (hit,) = await rows_of(request, CHECKPOINT, at.blobs, TemplateReuse(1.0, made, COSTS))
        (miss,) = await rows_of(request, CHECKPOINT, at.blobs, TemplateReuse(1.0, None, COSTS))
        own = plain.conditioning["noise"]
        left = replace(made, noise=torch.full_like(own, 2.0))
        (after,) = await rows_of(request, CHECKPOINT, at.blobs, TemplateReuse(1.0, left, COSTS))
    assert plain.region is miss.region is None
    assert hit.region is not None
    assert hit.region.computed.tolist() == [5, 6]
    inside = torch.from_numpy(cells.flatten())
    for row, outside in ((hit, template_noise(*own.shape)), (after, left.noise), (miss, own)):
        noise = row.conditioning["noise"]
        assert outside is not None
        assert torch.equal(noise[~inside], outside[~inside])
        assert torch.equal(noise[inside], own[inside])
        assert torch.equal(row.latent, noise), "a row of full strength begins from its noise"


def job_that_reuses() -> Job:
    return JOB.model_copy(update={"parameters": EditParameters(prompt="x", reuse=Reuse.AUTO)})
