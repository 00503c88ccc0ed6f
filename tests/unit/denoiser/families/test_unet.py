"""UNets over tiles: equal to diffusers' own forward of each picture, whatever the batch, the mask and the size."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from giornata.packed.compute_set import BlockInputs, CachedTokens, Region
from giornata.planning.operations import NetworkOperations, SequenceShape, step_work
from giornata.wire.values import BlockMode
from giornata_denoiser.families.unet.network import UnetFill, UnetInpaint, network_of
from giornata_denoiser.families.unet.structure import TEXT_TOKENS
from giornata_lab.bench.compute import tiny_unet
from giornata_lab.bench.compute.tiny_unet import Everything, RecordedUnetTokens, UnetPicture, drawn
from tests.precision import float32_bound

DOUBLE = torch.float64
EXACT = 1e-9
"""In float64; a wrong border, statistic or key is off by a hundredth and more."""
KINDS = [("sd", True), ("xl", False)]
"""Shapes, and whether they are to fill."""
L_SHAPE = drawn("#....", "#....", "###..", ".....")
STRIP = drawn("#...", "##..", ".##.", "..##", "...#")
HOLE = drawn(".....", ".###.", ".#.#.", ".###.")
CORNERS = drawn("#...#", ".....", ".....", "#...#")


@cache
def pair(shape: str, fill: bool, dtype: torch.dtype = DOUBLE) -> tuple[Any, UnetInpaint | UnetFill]:
    """diffusers' module, and a network over equal weights."""
    model = tiny_unet.unet(shape, fill=fill, dtype=dtype)
    return model, network_of(deepcopy(model))


def pictures(of: UnetInpaint | UnetFill) -> list[UnetPicture]:
    """They differ in size, prompt, prompt length, timestep and step."""
    return [
        tiny_unet.picture(of, (4, 5), words=5, times=(981, 401), seed=1),
        tiny_unet.picture(of, (5, 4), words=9, times=(701, 203), step=1, seed=2),
        tiny_unet.picture(of, (4, 5), words=3, times=(55,), seed=3),
        tiny_unet.picture(of, (4, 5), words=7, times=(661, 1), step=1, seed=4),
    ]


@torch.inference_mode()
def predicted(
    of: UnetInpaint | UnetFill,
    rows: Sequence[UnetPicture],
    where: Sequence[Region | None],
    uses: Sequence[BlockInputs] = (),
) -> tuple[Tensor, ...]:
    """(computed, channels) of each."""
    batch = of.assemble([tiny_unet.inputs(of, row, place) for row, place in zip(rows, where, strict=True)])
    latents = torch.cat([row.latent for row in rows])
    out = of.predict(
        batch, latents, [row.conditioning for row in rows], [row.step for row in rows], uses=uses
    )
    lengths = [
        len(row.latent) if place is None else len(place.computed)
        for row, place in zip(rows, where, strict=True)
    ]
    return torch.split(out, lengths)


def recorded(of: UnetInpaint | UnetFill, rows: Sequence[UnetPicture]) -> list[Everything]:
    """What a forward in full shows of each."""
    recorders = [Everything() for _ in rows]
    predicted(of, rows, [None] * len(rows), [BlockInputs(recorder=recorder) for recorder in recorders])
    return recorders


def taking(of: UnetInpaint | UnetFill, kept: Everything, place: Region, *, room: bool = True) -> BlockInputs:
    return BlockInputs(
        CachedTokens((BlockMode.KV,) * len(of.blocks), RecordedUnetTokens(kept, place, room=room))
    )


@pytest.mark.parametrize(
    ("shape", "fill", "where"),
    [("sd", True, [L_SHAPE, STRIP, None, HOLE]), ("xl", False, [HOLE, None, CORNERS, L_SHAPE])],
)
def test_masked_rows_beside_a_full_one_equal_diffusers_on_their_tiles(
    shape: str, fill: bool, where: list[Region | None]
) -> None:
    model, of = pair(shape, fill)
    rows = pictures(of)
    uses = [
        BlockInputs() if place is None else taking(of, kept, place)
        for kept, place in zip(recorded(of, rows), where, strict=True)
    ]
    found = predicted(of, rows, where, uses)
    for row, place, out in zip(rows, where, found, strict=True):
        whole = tiny_unet.alone(model, of, row)
        wanted = whole if place is None else whole[place.computed]
        torch.testing.assert_close(out, wanted, atol=EXACT, rtol=0)
    (alone,) = predicted(of, rows[:1], where[:1], uses[:1])
    torch.testing.assert_close(found[0], alone, atol=EXACT, rtol=0)


@pytest.mark.parametrize(("shape", "fill"), KINDS)
def test_float32_errs_no_more_than_diffusers(shape: str, fill: bool) -> None:
    (exact_model, exact_of), (model, of) = pair(shape, fill), pair(shape, fill, torch.float32)
    row, exact_row = pictures(of)[0], pictures(exact_of)[0]
    exact = tiny_unet.alone(exact_model, exact_of, exact_row)[L_SHAPE.computed]
    bound = float32_bound(tiny_unet.alone(model, of, row)[L_SHAPE.computed], exact)
    (out,) = predicted(of, [row], [L_SHAPE], [taking(of, recorded(of, [row])[0], L_SHAPE)])
    assert (out.double() - exact).abs().max() <= bound


def test_masked_rows_record_their_own_tiles() -> None:
    _, of = pair(*KINDS[1])
    row = pictures(of)[0]
    (whole,) = recorded(of, [row])
    own = Everything()
    use = BlockInputs(taking(of, whole, HOLE).taken, own)
    predicted(of, [row], [HOLE], [use])
    assert own.parts.keys() == whole.parts.keys()
    assert own.heads.keys() == whole.heads.keys()
    for place, part in own.parts.items():
        torch.testing.assert_close(part, whole.parts[place][HOLE.computed], atol=EXACT, rtol=0)
    for block, heads in own.heads.items():
        for part, of_all in zip(heads, whole.heads[block], strict=True):
            torch.testing.assert_close(part, of_all[HOLE.computed], atol=EXACT, rtol=0)


def test_a_row_that_is_not_finite_leaves_the_others_as_they_are() -> None:
    _, of = pair(*KINDS[1])
    rows = pictures(of)
    uses = [
        taking(of, kept, place) for kept, place in zip(recorded(of, rows[:2]), (L_SHAPE, STRIP), strict=True)
    ]
    right = predicted(of, rows[:2], [L_SHAPE, STRIP], uses)[1]
    rows[0].latent.fill_(torch.nan)
    broken, other = predicted(of, rows[:2], [L_SHAPE, STRIP], uses)
    assert broken.isnan().all()
    torch.testing.assert_close(other, right, atol=EXACT, rtol=0)


@pytest.mark.parametrize(("shape", "fill"), KINDS)
def test_a_recording_holds_what_the_specs_say(shape: str, fill: bool) -> None:
    _, of = pair(shape, fill)
    (kept,) = recorded(of, pictures(of)[:1])
    for block, spec in enumerate(of.blocks):
        parts = {part: tensor.shape[1] for (at, part), tensor in kept.parts.items() if at == block}
        if block in kept.heads:
            key, value = kept.heads[block]
            parts |= {"key": key[0].numel(), "value": value[0].numel()}
            assert key.shape[1] == spec.heads
        assert parts == dict(spec.parts)


@pytest.mark.parametrize(("shape", "fill"), KINDS)
def test_the_specs_count_what_a_forward_multiplies(shape: str, fill: bool) -> None:
    """All but what is prepared once: the timestep's layers, and keys and values of the text."""
    model, of = pair(shape, fill)
    row = tiny_unet.picture(of, (3, 4), words=TEXT_TOKENS)
    with FlopCounterMode(display=False) as counted, sdpa_kernel(SDPBackend.MATH):
        tiny_unet.alone(model, of, row)
    with FlopCounterMode(
        display=False
    ) as beside:  # the counter does not know the processor's fused attention
        tiny_unet.alone(model, of, row)
    prompt = tiny_unet.inputs(of, row).prompt
    with FlopCounterMode(display=False) as beforehand, torch.inference_mode():
        of.prepare(prompt, row.times[:1], row.conditioning, ())
    operations, tiles = NetworkOperations(of.blocks), len(row.latent)
    work = step_work(operations, [SequenceShape(0, tiles, tiles)], [(BlockMode.FULL,) * operations.blocks])
    convolution = beside.get_flop_counts()["Global"][torch.ops.aten.convolution]
    linear = beside.get_total_flops() - convolution - beforehand.get_total_flops()
    # Stable Diffusion 1 projects with convolutions of single cells, which are counted as linear.
    single = 0.0 if shape == "xl" else 2 * work.linear - linear
    assert 0 <= single < work.linear
    assert 2 * work.linear == pytest.approx(linear + single)
    assert 2 * work.convolution == pytest.approx(convolution - single)
    assert 2 * work.attention == pytest.approx(counted.get_total_flops() - beside.get_total_flops())


def test_what_is_prepared_is_as_large_as_it_says() -> None:
    _, of = pair(*KINDS[1])
    row = tiny_unet.picture(of, (3, 4), words=9, times=(900, 500, 100))
    sequence = tiny_unet.inputs(of, row)
    prepared: Any = sequence.prepared
    assert prepared.modulation.nbytes == 3 * of.prepared_bytes
    text = sum(part.nbytes for both in prepared.text for part in both)
    assert sequence.prompt.size_bytes == text + sum(tensor.nbytes for tensor in row.text.values())
    assert sequence.prompt.joint_tokens == 0


def test_blocks_are_taken_together_or_not_at_all() -> None:
    _, of = pair(*KINDS[1])
    row = pictures(of)[0]
    (kept,) = recorded(of, [row])
    source = RecordedUnetTokens(kept, L_SHAPE)
    modes = (BlockMode.FULL,) * len(of.blocks)
    (full,) = predicted(of, [row], [L_SHAPE], [BlockInputs(CachedTokens(modes, source))])
    (whole,) = predicted(of, [row], [None])
    torch.testing.assert_close(full, whole[L_SHAPE.computed], atol=EXACT, rtol=0)
    with pytest.raises(ValueError, match="all of its blocks from a template or none"):
        predicted(
            of,
            [row],
            [L_SHAPE],
            [BlockInputs(CachedTokens((BlockMode.FULL, *(BlockMode.KV,) * (len(modes) - 1)), source))],
        )
