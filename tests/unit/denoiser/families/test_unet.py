"""UNets over tiles: equal to diffusers' own forward of each picture, whatever the batch, the mask and the size."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name
from diffusers import DDIMScheduler
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from giornata.packed.packing import (
    BlockInputs,
    CachedTokens,
    Region,
    make_region,
    maps_to_tiles,
    tiles_to_maps,
)
from giornata.planning.operations import NetworkOperations, SequenceShape, step_work
from giornata.wire.values import BlockMode
from giornata_denoiser.families.unet.network import UnetFill, UnetInpaint, network_of
from giornata_denoiser.families.unet.structure import (
    TEXT_TOKENS,
    ConvolutionGeometry,
    Tiling,
    border_cells,
    cut,
)
from giornata_lab.bench.compute import tiny_unet
from giornata_lab.bench.compute.tiny_unet import Everything, RecordedUnetTokens, UnetPicture, drawn

MARGIN: Final = 4.0
"""Two correct float32 computations may group their sums differently; their largest errors differ by less."""


def float32_bound(reference: Tensor, exact: Tensor) -> float:
    """Largest error to accept of a float32 result: `MARGIN` times that of a float32 reference.

    Args:
        reference: the reference's result, computed in float32.
        exact: the same in float64; any shape, equal to that of `reference`.
    """
    assert (reference.dtype, exact.dtype) == (torch.float32, torch.float64)
    rounding = torch.finfo(torch.float32).eps * exact.abs().max()  # the reference may be lucky
    return MARGIN * float(torch.maximum((reference.double() - exact).abs().max(), rounding))


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
@pytest.mark.parametrize("grid", [(1, 3), (3, 1)])
def test_a_picture_one_tile_high_or_wide_is_recorded_and_taken_from(
    shape: str, fill: bool, grid: tuple[int, int]
) -> None:
    model, of = pair(shape, fill)
    row, place = tiny_unet.picture(of, grid), drawn(".#.")
    (out,) = predicted(of, [row], [place], [taking(of, recorded(of, [row])[0], place)])
    wanted = tiny_unet.alone(model, of, row)[place.computed]
    torch.testing.assert_close(out, wanted, atol=EXACT, rtol=0)


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


# Windows of tiles against slices of a padded map.


GRIDS = st.tuples(st.integers(1, 4), st.integers(1, 4))
CPU = torch.device("cpu")
READINGS = (
    *(ConvolutionGeometry(side) for side in (8, 4, 2, 1)),
    *(ConvolutionGeometry(side, 2) for side in (8, 4, 2)),
    *(ConvolutionGeometry(side, doubled=True) for side in (8, 4, 2)),
)


@given(st.lists(GRIDS, min_size=1, max_size=3), st.sampled_from([1, 2, 4, 8]), st.data())
def test_windows_are_those_of_padded_maps(
    grids: list[tuple[int, int]], side: int, data: st.DataObject
) -> None:
    stride = data.draw(st.sampled_from([1, 2] if side > 1 else [1]))
    reading = ConvolutionGeometry(side, stride, side > 1 and stride == 1 and data.draw(st.booleans()))
    regions = [
        make_region(
            torch.tensor(data.draw(st.lists(st.booleans(), min_size=h * w, max_size=h * w))).view(h, w)
        )
        for h, w in grids
    ]
    tiling = Tiling(tuple(grids), tuple(regions), CPU)
    windows = tiling.windows(reading)
    # Every cell has a value of its own; 0 is what lies beyond a picture.
    maps, first = [], 1
    for height, width in grids:
        count = height * width * side * side
        cells = torch.arange(first, first + count).view(height * side, width * side)
        if reading.doubled:  # 2x2 cells have one value
            cells = cells[::2, ::2].repeat_interleave(2, 0).repeat_interleave(2, 1)
        maps.append(cells)
        first += count
    own, around, wanted = [], [], []
    size = windows.index.shape[1]
    for each, grid, where, ring in zip(maps, grids, regions, windows.rings, strict=True):
        tiles = cut(each[None, :, :, None], grid)[0].flatten(1)
        padded = F.pad(each, (1, 1, 1, 1))
        computed = range(len(tiles)) if where is None else where.computed.tolist()
        own.append(tiles[list(computed)].flatten())
        if where is not None:
            assert ring is not None
            around.append(tiles[where.outside][:, border_cells(reading, CPU)].flatten()[ring])
        for tile in computed:
            y, x = (side * at for at in divmod(tile, grid[1]))
            wanted.append(padded[y : y + size, x : x + size])
    cells = torch.cat((*own, *around, torch.zeros(1, dtype=torch.int64)))
    assert torch.equal(cells[windows.index], torch.stack(wanted))
    outputs = F.unfold(torch.stack(wanted)[:, None].double(), 3, stride=stride).transpose(1, 2)
    assert torch.equal(cells[tiling.neighbours(reading)].view(-1, 9), outputs.reshape(-1, 9).long())


def test_a_ring_holds_no_cell_twice_and_none_that_is_not_read() -> None:
    """One tile in the middle of nine reads one cell of each corner's tile, and a line of the other four."""
    cells = torch.zeros(3, 3, dtype=torch.bool)
    cells[1, 1] = True
    where = make_region(cells)
    (ring,) = Tiling(((3, 3),), (where,), CPU).windows(ConvolutionGeometry(4)).rings
    assert ring is not None
    assert len(ring) == len(torch.unique(ring)) == 4 * 4 + 4


@given(GRIDS, st.integers(1, 4), st.integers(1, 3))
def test_maps_are_parted_into_the_tiles_that_they_were_joined_of(
    grid: tuple[int, int], side: int, channels: int
) -> None:
    tiles = torch.arange(2 * grid[0] * grid[1] * channels * side * side).view(2, -1, channels, side, side)
    maps = tiles_to_maps(tiles, grid)
    assert maps.shape == (2, channels, grid[0] * side, grid[1] * side)
    assert torch.equal(maps[1, 0, :side, :side], tiles[1, 0, 0])
    assert torch.equal(maps_to_tiles(maps, grid), tiles)
    by_cell = cut(maps.permute(0, 2, 3, 1), grid)
    assert torch.equal(by_cell, tiles.permute(0, 1, 3, 4, 2))


def test_as_few_cells_are_kept_as_are_read() -> None:
    """All at a tile's border; behind a stride of 2 the last row and column; of doubled cells one of each four."""
    kept = {reading: len(border_cells(reading, CPU)) for reading in READINGS}
    assert list(kept.values()) == [28, 12, 4, 1, 15, 7, 3, 12, 4, 1]


# UNet checkpoints: which are served, as what, and what their rows carry.


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"in_channels": 5}, "5 input channels; served are"),
        ({"time_cond_proj_dim": 8}, "time_cond_proj_dim 8; served is None"),
        ({"resnet_time_scale_shift": "scale_shift"}, "resnet_time_scale_shift"),
        ({"class_embed_type": "timestep"}, "class_embed_type"),
    ],
)
def test_unets_of_other_kinds_are_refused(config: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        tiny_unet.network("sd", **config)


def test_a_unet_with_more_levels_than_its_tiles_have_is_refused() -> None:
    config: dict[str, Any] = {
        "block_out_channels": (8, 8, 8, 8),
        "down_block_types": ("DownBlock2D",) * 4,
        "up_block_types": ("UpBlock2D",) * 4,
        "transformer_layers_per_block": 1,
        "attention_head_dim": 1,
    }
    with pytest.raises(ValueError, match="tiles of 4 latent pixels are too small for 4 levels"):
        tiny_unet.network("xl", **config)


def test_smaller_unets_are_served_over_the_same_tiles() -> None:
    """As distilled ones are: fewer levels, and nothing in the middle."""
    config: dict[str, Any] = {
        "block_out_channels": (16, 32),
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        "mid_block_type": None,
        "dtype": DOUBLE,
    }
    model, of = tiny_unet.unet("sd", **config), tiny_unet.network("sd", **config)
    row = pictures(of)[0]
    whole = tiny_unet.alone(model, of, row)
    (out,) = predicted(of, [row], [L_SHAPE], [taking(of, recorded(of, [row])[0], L_SHAPE)])
    torch.testing.assert_close(out, whole[L_SHAPE.computed], atol=EXACT, rtol=0)


@pytest.mark.parametrize(("shape", "fill"), KINDS)
def test_a_checkpoint_is_loaded_as_the_network_that_it_holds(shape: str, fill: bool, tmp_path: Path) -> None:
    model = tiny_unet.unet(shape, fill=fill)
    model.save_pretrained(tmp_path / "unet")
    scheduler: Any = DDIMScheduler
    scheduler(clip_sample=False).save_pretrained(tmp_path / "scheduler")
    of: Any = UnetInpaint.load(tmp_path, torch.float32, torch.device("cpu")).network
    assert (of.blends, of.side) == (not fill, 4 if shape == "xl" else 8)
    row = pictures(of)[0]
    (out,) = predicted(of, [row], [None])
    torch.testing.assert_close(out, tiny_unet.alone(model, of, row), atol=1e-4, rtol=0)


@pytest.mark.parametrize("fill", [False, True])
def test_an_empty_mask_shows_the_picture(fill: bool) -> None:
    _, of = pair("xl", fill)
    conditioning = dict(pictures(of)[0].conditioning)
    empty = of.unmasked(conditioning)
    assert empty.keys() == conditioning.keys()
    assert not empty["mask"].any()
    if fill:
        assert torch.equal(empty["masked_image_latents"], conditioning["image_latents"])
    assert of.blends is not fill
