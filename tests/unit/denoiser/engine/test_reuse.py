"""Regions, stored activations, templates and slabs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from giornata.packed.region import beside, region, region_of, united
from giornata.wire.values import CellMap
from giornata_denoiser.blocks.recording import EntryRecorder
from giornata_denoiser.blocks.slabs import Slabs
from giornata_denoiser.choices import BITS, CacheForm
from giornata_denoiser.rows.row import RecordingSpec
from giornata_denoiser.rows.stored import store
from giornata_denoiser.rows.template import CachedTemplate, Entry
from tests.fakes import tiny_flux

MASKS = st_numpy.arrays(bool, st_numpy.array_shapes(min_dims=2, max_dims=2, max_side=9))


@given(MASKS)
def test_a_region_is_the_compute_set_and_the_rest(cells: np.ndarray) -> None:
    """Also as an inspection carries it: packed, row-major, the most significant bit first."""
    height, width = cells.shape
    packed = CellMap(height=height, width=width, bits=np.packbits(cells).tobytes())
    for found in (region(torch.from_numpy(cells)), region_of(packed)):
        if not cells.any() or cells.all():
            assert found is None
        else:
            assert found is not None
            assert found.computed.tolist() == np.flatnonzero(cells).tolist()
            assert found.outside.tolist() == np.flatnonzero(~cells).tolist()


def test_equal_regions_have_equal_digests_and_others_do_not() -> None:
    cells = torch.eye(3, dtype=torch.bool)
    one, same, other = region(cells), region(cells.clone()), region(cells.roll(1))
    assert one is not None
    assert same is not None
    assert other is not None
    assert one.digest == same.digest != other.digest


@pytest.mark.parametrize("companions", [0, 2])
def test_what_lies_behind_the_picture_is_outside(companions: int) -> None:
    made = region(torch.eye(2, dtype=torch.bool))
    assert made is not None
    found = beside(made, companions)
    assert found.computed.tolist() == [0, 3]
    assert found.outside.tolist() == [1, 2, *range(4, 4 + companions)]
    other = region(torch.tensor([[True, True], [False, False]]))
    assert other is not None
    union = united(found, beside(other, companions))
    assert union is not None
    assert union.outside.tolist() == [2, *range(4, 4 + companions)]


def test_a_region_is_copied_to_a_device_once() -> None:
    made = region(torch.eye(2, dtype=torch.bool))
    assert made is not None
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
    where = region(torch.tensor([[True, False, False], [True, False, False]]))
    assert where is not None
    slabs = Slabs(recorder.entry(), where, own=5, family=tiny_flux.family())
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
    where = region(torch.tensor([[True, False]]))
    assert where is not None
    slabs = Slabs(recorder.entry(), where, own=1, family=tiny_flux.family())
    assert slabs.hidden(0).shape == (1, 4)
    with pytest.raises(LookupError, match="does not hold"):
        slabs.keys_values(0)
