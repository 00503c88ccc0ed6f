"""What an edit reuses: regions, stored activations, templates and slabs, and when a template is worth it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from giornata.packed.packing import make_region, region_of, unite_regions, with_companions
from giornata.planning.operations import StepCosts
from giornata.wire.jobs import Job
from giornata.wire.requests import EditParameters, Reuse
from giornata.wire.values import CellMap
from giornata_denoiser.attempts import attempt, inputs
from giornata_denoiser.attempts.inputs import TemplateReuse, rows_of, with_reuse
from giornata_denoiser.choices import BITS, CacheForm
from giornata_denoiser.engine.recorders import EntryRecorder
from giornata_denoiser.engine.slabs import Slabs
from giornata_denoiser.rows.parts import Adapters, RowLora
from giornata_denoiser.rows.row import RecordingSpec
from giornata_denoiser.rows.template import (
    CachedBlock,
    CachedTemplate,
    Entry,
    StoredTensor,
    store,
    template_noise,
)
from giornata_denoiser.templates.runs import wanted_recording
from giornata_lab.bench.compute import tiny_flux
from giornata_lab.bench.compute.tiny_flux import Spec
from tests.fakes.profiles import WEIGHTS
from tests.present import present
from tests.unit.denoiser.attempts.test_attempt import INSPECTION, JOB
from tests.unit.denoiser.engine.test_masked import OF
from tests.unit.denoiser.templates.desk import CHECKPOINT, COSTS, WIDTH, desk

# Regions, stored activations, templates and slabs.


MASKS = st_numpy.arrays(bool, st_numpy.array_shapes(min_dims=2, max_dims=2, max_side=9))


@given(MASKS)
def test_a_region_is_the_compute_set_and_the_rest(cells: np.ndarray) -> None:
    """Also as an inspection carries it: packed, row-major, the most significant bit first."""
    height, width = cells.shape
    packed = CellMap(height=height, width=width, bits=np.packbits(cells).tobytes())
    for found in (make_region(torch.from_numpy(cells)), region_of(packed)):
        if not cells.any() or cells.all():
            assert found is None
        else:
            assert found is not None
            assert found.computed.tolist() == np.flatnonzero(cells).tolist()
            assert found.outside.tolist() == np.flatnonzero(~cells).tolist()


def test_equal_regions_have_equal_digests_and_others_do_not() -> None:
    cells = torch.eye(3, dtype=torch.bool)
    one, same, other = (
        present(make_region(cells)),
        present(make_region(cells.clone())),
        present(make_region(cells.roll(1))),
    )
    assert one.digest == same.digest != other.digest


@pytest.mark.parametrize("companions", [0, 2])
def test_what_lies_behind_the_picture_is_outside(companions: int) -> None:
    made = present(make_region(torch.eye(2, dtype=torch.bool)))
    found = with_companions(made, companions)
    assert found.computed.tolist() == [0, 3]
    assert found.outside.tolist() == [1, 2, *range(4, 4 + companions)]
    other = present(make_region(torch.tensor([[True, True], [False, False]])))
    union = present(unite_regions(found, with_companions(other, companions)))
    assert union.outside.tolist() == [2, *range(4, 4 + companions)]


def test_a_region_is_copied_to_a_device_once() -> None:
    made = present(make_region(torch.eye(2, dtype=torch.bool)))
    assert made.on(torch.device("cpu")) is made
    there = made.on(torch.device("meta"))
    assert (there.computed.device.type, there.digest) == ("meta", made.digest)
    assert made.on(torch.device("meta")) is there


@given(st.integers(0, 2**31), st.sampled_from(BITS), st.floats(0.0, 1e3), st.integers(1, 9))
def test_stored_values_are_off_by_half_a_level_at_most(
    seed: int, bits: int, spread: float, tokens: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(tokens, 6, generator=generator) * torch.tensor([1.0, 1.0, 1.0, 1.0, spread, 0.0])
    stored = store(values, bits)
    assert stored.bits == bits
    index = torch.randperm(tokens, generator=generator)[: (tokens + 1) // 2].sort().values
    out = torch.full((len(index), 6), torch.nan)
    stored.gather(index, out)
    reach = values.amax(0) - values.amin(0)
    allowed = reach / (2**bits - 1) / 2 + 1e-5 * values.abs().amax(0) if bits else torch.zeros(6)
    assert bool(((out - values[index]).abs() <= allowed + 1e-30).all())


@pytest.mark.parametrize(("bits", "bytes_per_value"), [(0, 2.0), (8, 1.0), (4, 0.5)])
def test_fewer_bits_are_fewer_bytes(bits: int, bytes_per_value: float) -> None:
    stored = store(torch.randn(100, 64, dtype=torch.bfloat16), bits)
    tables = 2 * 64 * 4 if bits else 0
    assert stored.size_bytes == 100 * 64 * bytes_per_value + tables


@pytest.mark.parametrize(("bits", "channels"), [(3, 8), (16, 8), (4, 7)])
def test_other_bits_are_refused(bits: int, channels: int) -> None:
    with pytest.raises(ValueError, match=f"received {bits} bits for {channels} channels"):
        store(torch.zeros(2, channels), bits)


def test_what_is_stored_is_a_copy() -> None:
    values = torch.ones(3, 4)
    stored = store(values, 0)
    values.zero_()
    assert bool((stored.data == 1).all())


def test_the_nearest_noise_level_serves_within_the_tolerance() -> None:
    template = CachedTemplate("t", (1, 1), tuple(Entry(level, ()) for level in (1.0, 0.6, 0.2)))
    assert [entry.level for s in (0.9, 0.79, 0.1) if (entry := template.at(s))] == [1.0, 0.6, 0.2]
    assert template.at(0.7, tolerance=0.05) is None
    assert CachedTemplate("t", (1, 1), ()).at(0.5) is None


@pytest.mark.parametrize("bits", BITS)
def test_slabs_are_the_recorded_tokens_behind_room_for_the_others(bits: int) -> None:
    recorder = EntryRecorder(0.5, 2, RecordingSpec(frozenset(CacheForm), bits))
    heads, hidden = torch.randn(2, 2, 6, 4, 3), torch.randn(2, 6, 12)
    for block in range(2):
        recorder.hidden(block, hidden[block])
        recorder.keys_values(block, heads[block, 0], heads[block, 1])
    where = present(make_region(torch.tensor([[True, False, False], [True, False, False]])))
    slabs = Slabs(recorder.entry(), where, own=5, family=OF)
    tolerance = {0: 0.0, 8: 0.03, 4: 0.4}[bits]
    outside = slabs.gathered(1)
    assert (outside.room, tuple(outside.key.shape)) == (5, (9, 4, 3))
    torch.testing.assert_close(outside.key[5:], heads[1, 0][where.outside], atol=tolerance, rtol=0)
    torch.testing.assert_close(outside.value[5:], heads[1, 1][where.outside], atol=tolerance, rtol=0)
    torch.testing.assert_close(slabs.hidden(0), hidden[0][where.outside], atol=tolerance, rtol=0)
    assert slabs.keys_values(1) is outside
    assert slabs.hidden(0) is slabs.hidden(0)


def test_what_was_not_recorded_is_not_made_up() -> None:
    recorder = EntryRecorder(0.5, 1, RecordingSpec(frozenset({CacheForm.HIDDEN}), 0))
    recorder.hidden(0, torch.zeros(2, 4))
    recorder.keys_values(0, torch.zeros(2, 4, 1), torch.zeros(2, 4, 1))
    where = present(make_region(torch.tensor([[True, False]])))
    slabs = Slabs(recorder.entry(), where, own=1, family=OF)
    assert slabs.hidden(0).shape == (1, 4)
    with pytest.raises(LookupError, match="does not hold"):
        slabs.keys_values(0)


# Stored activations of some channels: what is narrowed and then read equals what is read and then narrowed.


HALF = 6


@given(
    bits=st.sampled_from(BITS),
    bounds=st.lists(st.integers(0, HALF), min_size=2, max_size=4, unique=True).map(sorted),
    seed=st.integers(0, 1000),
)
def test_narrowing_equals_slicing_what_is_dequantised(bits: int, bounds: list[int], seed: int) -> None:
    """Ranges of an even number of channels, before, behind and across the middle of those that 4 bits pack."""
    whole = store(torch.randn(7, 2 * HALF, generator=torch.Generator().manual_seed(seed)), bits)
    spans = [slice(2 * start, 2 * stop) for start, stop in zip(bounds[::2], bounds[1::2], strict=False)]
    narrow = whole.narrowed(spans)
    index = torch.tensor([4, 0, 6])
    wanted = torch.cat([read(whole, index)[:, span] for span in spans], dim=1)
    assert narrow.bits == bits
    assert narrow.shape == (7, wanted.shape[1])
    torch.testing.assert_close(read(narrow, index), wanted, rtol=0, atol=0)
    torch.testing.assert_close(narrow.levels.rows(index).float(), wanted, rtol=0, atol=1e-6)


def read(stored: StoredTensor, index: torch.Tensor) -> torch.Tensor:
    out = torch.empty(len(index), stored.channels)
    stored.gather(index, out)
    return out


def test_an_odd_number_of_channels_has_no_4_bits() -> None:
    with pytest.raises(ValueError, match="received 3 channels in 4 bits; accepted are even numbers"):
        store(torch.randn(2, 8), 4).narrowed([slice(0, 3)])


@pytest.mark.parametrize("bits", BITS)
def test_no_token_at_all_is_stored(bits: int) -> None:
    stored = store(torch.empty(0, 4), bits)
    assert (stored.shape, stored.finite) == ((0, 4), True)


# What a row reuses: the compute set of its inspection, and a template that is worth it.


async def test_noise_levels_and_regions_are_made_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[tuple[str, threading.Thread]] = []

    def watched(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            threads.append((name, threading.current_thread()))
            return work(*args, **named)

        return call

    monkeypatch.setattr(inputs, "wanted_recording", watched("wanted", wanted_recording))
    monkeypatch.setattr(inputs, "with_reuse", watched("reused", inputs.with_reuse))
    async with desk(template_policy="off") as made, made.lookup.held(made.request) as how:
        await rows_of(made.request, CHECKPOINT, made.blobs, how)
    assert [name for name, _ in threads] == ["wanted", "reused"]
    assert threading.main_thread() not in {thread for _, thread in threads}


def test_a_template_that_is_not_worth_it_is_told_apart_from_none() -> None:
    row = tiny_flux.row(OF, Spec())
    cells = torch.zeros(row.grid, dtype=torch.bool)
    cells[0, 0] = True
    where = make_region(cells)
    kept = CachedBlock(*(store(torch.zeros(row.image_tokens, WIDTH), 8) for _ in range(2)))
    made = CachedTemplate("t", row.grid, (Entry(1.0, (kept,) * OF.depth),))
    slow = StepCosts(WEIGHTS, (1e6, 1.0))
    uses = [
        attempt.template_use(job_that_reuses(), with_reuse(row, computed, how, OF))
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
    plain = tiny_flux.row(OF, Spec(grid=(4, 4), steps=7))
    cells = torch.zeros(plain.grid, dtype=torch.bool)
    cells[0, 0] = True
    for adapters, left in ((Adapters(), spec), (Adapters((RowLora("a"),)), None)):
        found = with_reuse(replace(plain, adapters=adapters), make_region(cells), how, OF)
        assert found.reuse.renewed_every
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
            assert present(how).keeps_padding is kept


async def test_a_row_computes_the_compute_set_that_its_inspection_carries() -> None:
    """Outside of it the noise is that of the recording that it takes from, and its own without one."""
    cells = np.zeros((3, 4), bool)
    cells[1, 1:3] = True
    carried = CellMap(height=3, width=4, bits=np.packbits(cells).tobytes())
    inspection = INSPECTION.model_copy(update={"compute_set": {1: carried}})
    kept = CachedBlock(*(store(torch.zeros(12, WIDTH), 8) for _ in range(2)))
    made = CachedTemplate("t", (3, 4), (Entry(1.0, (kept,) * OF.depth),))
    async with desk(template_policy="off") as at:
        request = at.request.model_copy(update={"inspection": inspection})
        (plain,) = await rows_of(request, CHECKPOINT, at.blobs, None)
        (hit,) = await rows_of(request, CHECKPOINT, at.blobs, TemplateReuse(1.0, made, COSTS))
        (miss,) = await rows_of(request, CHECKPOINT, at.blobs, TemplateReuse(1.0, None, COSTS))
        own = plain.inputs.conditioning["noise"]
        left = replace(made, noise=torch.full_like(own, 2.0))
        (after,) = await rows_of(request, CHECKPOINT, at.blobs, TemplateReuse(1.0, left, COSTS))
    assert plain.region is miss.region is None
    assert attempt.template_use(job_that_reuses(), plain) == "skipped", "by its sampler"
    assert present(hit.region).computed.tolist() == [5, 6]
    inside = torch.from_numpy(cells.flatten())
    for row, outside in ((hit, template_noise(*own.shape)), (after, left.noise), (miss, own)):
        noise = row.inputs.conditioning["noise"]
        assert torch.equal(noise[~inside], present(outside)[~inside])
        assert torch.equal(noise[inside], own[inside])
        assert torch.equal(row.latent, noise), "a row of full strength begins from its noise"


def job_that_reuses() -> Job:
    return JOB.model_copy(update={"parameters": EditParameters(prompt="x", reuse=Reuse.AUTO)})
