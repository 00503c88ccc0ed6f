"""Shares of a batch: a partition of its tokens, balanced, and the same tokens again in whichever order they travel."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from giornata.packed.packing import PackedBatch, Region, make_layout, make_region
from giornata.packed.sharding import AllToAllGroup, Shard, ShardedBatch, rotate_ranks, spread_evenly
from tests.present import present

SIZES = st.integers(1, 8)


class Shape(NamedTuple):
    """A sequence."""

    text: int
    cells: list[bool]
    """Whether each cell of its picture is computed."""


SHAPES = st.lists(
    st.builds(Shape, st.integers(0, 9), st.lists(st.booleans(), min_size=1, max_size=40)),
    min_size=1,
    max_size=5,
)


def batch(shapes: list[Shape]) -> PackedBatch:
    """Sequences whose rotary embedding numbers their tokens in joint order."""
    made = make_layout([shape.text for shape in shapes], [len(shape.cells) for shape in shapes])
    numbers = torch.arange(sum(made.joint.lengths)).float().unsqueeze(1)
    return PackedBatch(made, (numbers, numbers), tuple(make_region(torch.tensor([s.cells])) for s in shapes))


class Seat(NamedTuple):
    """A place in a group whose members trade nothing."""

    rank: int
    size: int
    name: str = ""
    trade: Any = None


def parts(of: PackedBatch, size: int) -> list[ShardedBatch]:
    """By rank."""
    seats: list[AllToAllGroup] = [Seat(rank, size) for rank in range(size)]
    return [ShardedBatch(seat, of) for seat in seats]


@given(count=st.integers(0, 100), size=SIZES, turn=st.integers(0, 1000))
def test_a_spread_is_a_balanced_partition(count: int, size: int, turn: int) -> None:
    order = rotate_ranks(size, turn)
    spans = spread_evenly(count, order)
    assert [index for part in spans for index in range(part.start, part.stop)] == list(range(count))
    lengths = [part.stop - part.start for part in spans]
    assert max(lengths) - min(lengths) <= 1
    assert lengths[order[0]] == max(lengths)


@given(shapes=SHAPES, size=SIZES)
def test_ranks_have_every_token_once_and_equally_many(shapes: list[Shape], size: int) -> None:
    whole = batch(shapes)
    owns = parts(whole, size)
    found = torch.cat([own.sequences.rotary[0][:, 0] for own in owns])
    assert found.sort().values.tolist() == list(range(sum(whole.layout.joint.lengths)))
    for sequence, where in enumerate(whole.regions):
        own_batches = [own.sequences for own in owns]
        counts = [[part.layout.text.lengths[sequence] for part in own_batches]]
        regions = [part.regions[sequence] for part in own_batches]
        if where is None:
            assert regions == [None] * size
            counts.append([part.layout.image.lengths[sequence] for part in own_batches])
        else:
            some = [each for each in regions if each is not None]
            counts += [[len(each.computed) for each in some], [len(each.outside) for each in some]]
        if len(shapes) == 1:
            assert all(max(each) - min(each) <= 1 for each in counts)
    if not any(whole.regions):
        totals = [sum(own.sequences.layout.joint.lengths) for own in owns]
        assert max(totals) - min(totals) <= 1, "over all sequences, too"


@given(shapes=SHAPES, size=SIZES, data=st.data())
def test_an_order_gathers_the_tokens_of_one_process_and_back(
    shapes: list[Shape], size: int, data: st.DataObject
) -> None:
    """`live` of every share, one behind the other, in the order of one process."""
    full = batch(shapes)
    whole = full.live(tuple(data.draw(st.booleans()) for _ in shapes))
    shares = parts(full, size)
    owns = [share.sequences.live(whole.whole) for share in shares]
    order = shares[0].live(whole.whole)
    by_rank = torch.cat([own.rotary[0] for own in owns])
    assert order.counts == tuple(len(own.rotary[0]) for own in owns)
    torch.testing.assert_close(by_rank[order.by_sequence], whole.rotary[0])
    torch.testing.assert_close(whole.rotary[0][order.by_rank], by_rank)
    assert order.segments.lengths == whole.layout.joint.lengths
    images = shares[0].live(whole.whole, text=False)
    by_rank = torch.cat([own.layout.split(own.rotary[0])[1] for own in owns])
    torch.testing.assert_close(by_rank[images.by_sequence], whole.layout.split(whole.rotary[0])[1])


@given(shapes=SHAPES, size=SIZES)
def test_outside_tokens_come_in_the_order_of_one_process(shapes: list[Shape], size: int) -> None:
    whole = batch(shapes)
    of = tuple(index for index, where in enumerate(whole.regions) if where is not None)
    if not of:
        return
    shares = parts(whole, size)
    order = shares[0].beyond(of)
    by_rank = torch.cat([share.sequences.beyond(of).rotary[0] for share in shares])
    wanted = whole.beyond(of)
    torch.testing.assert_close(by_rank[order.by_sequence], wanted.rotary[0])
    assert order.segments.lengths == wanted.segments.lengths


@given(cells=st.lists(st.booleans(), min_size=2, max_size=40), size=SIZES)
def test_a_portion_of_a_region_follows_from_it_alone(cells: list[bool], size: int) -> None:
    """It is the same beside any other sequences: what one step keeps of it fits the next."""
    where = make_region(torch.tensor([cells]))
    if where is None:
        return
    for rank in range(size):
        portion = Shard(rank, size).portion(where)
        assert_region(portion.region, portion.tokens, where)
        for others in ([], [Shape(3, [True] * 5)]):
            whole = batch([*others, Shape(2, cells)])
            own = ShardedBatch(Seat(rank, size), whole)
            found = present(own.sequences.regions[-1])
            assert found.computed.tolist() == portion.region.computed.tolist()
            assert own.pictures[-1].tokens.tolist() == portion.tokens.tolist()


def assert_region(own: Region, tokens: torch.Tensor, where: Region) -> None:
    assert set(tokens[own.computed].tolist()) <= set(where.computed.tolist())
    assert set(tokens[own.outside].tolist()) <= set(where.outside.tolist())
    assert len(own.computed) + len(own.outside) == len(tokens)


@pytest.mark.parametrize(("heads", "sites"), [(4, 1), (6, 1), (8, 2)])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_channels_of_all_ranks_are_all_channels(heads: int, sites: int, size: int) -> None:
    found = [span for rank in range(size) for span in Shard(rank, size).channels(heads * 16, heads, sites)]
    channels = [channel for span in found for channel in range(span.start, span.stop)]
    assert sorted(channels) == list(range(heads * 16))
    own = Shard(0, size).channels(heads * 16, heads, sites)
    assert [span.start for span in own] == [site * (heads // sites) * 16 for site in range(sites)]
