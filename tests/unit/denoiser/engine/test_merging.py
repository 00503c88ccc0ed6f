"""A set that all rows share, in the weights: the same pictures, and weights that come back bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from giornata.packed.low_rank import Factors, LowRank, low_rank
from giornata_denoiser.engine.engine import Engine
from giornata_denoiser.engine.merging import Merging, merge_work, merged_bytes, pays
from giornata_denoiser.engine.sources import ReuseOptions
from giornata_denoiser.families.protocol import ModelFamily
from giornata_denoiser.rows.adapters import Adapters, RowLora
from giornata_denoiser.rows.row import Row
from giornata_denoiser.rows.stored import EXACT
from tests.fakes import tiny_flux
from tests.fakes.tiny_flux import Spec
from tests.unit.denoiser.engine.edits import ROOMY
from tests.unit.denoiser.engine.test_low_ranks import EXACTLY, SETS, Shelf, finished, rows_of

FOUR_STEPS = tiny_flux.row(tiny_flux.family(), Spec("x", steps=4))


def family_and_shelf(dtype: torch.dtype) -> tuple[ModelFamily, Shelf]:
    of = tiny_flux.family(dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = {}
    for path, layer in of.network.layers.items():
        if isinstance(layer, nn.Linear) and "blocks" in path:
            for part, shape in (("down", (4, layer.in_features)), ("up", (layer.out_features, 4))):
                tensors[f"{path}.{part}"] = 0.1 * torch.randn(shape, generator=generator).to(dtype)
    made: dict[tuple[RowLora, ...], LowRank] = {}
    for each in SETS[1:]:
        made[each] = low_rank(str(each), [(tensors, float(len(each)))])
    return of, Shelf(made)


@pytest.fixture(scope="module")
def made() -> tuple[ModelFamily, Shelf]:
    return family_and_shelf(torch.float64)


def engine(of: ModelFamily, shelf: Shelf, merging: Merging) -> Engine:
    reusing = ReuseOptions(correction_bits=EXACT)
    return Engine(of, ROOMY, lambda: 0.0, reusing=reusing, low_ranks=shelf, merging=merging)


def weights(of: ModelFamily) -> dict[str, Tensor]:
    return {
        path: layer.weight.detach().clone()
        for path, layer in of.network.layers.items()
        if isinstance(layer, nn.Linear)
    }


def unchanged(of: ModelFamily, before: dict[str, Tensor]) -> bool:
    return all(torch.equal(before[path], now) for path, now in weights(of).items())


def test_rows_that_share_a_set_are_the_same_in_merged_weights(made: tuple[ModelFamily, Shelf]) -> None:
    """Rows in full, from a template, and renewing, guided or not."""
    of, shelf = made
    rows = [replace(row, adapters=Adapters(SETS[2])) for row in rows_of(of)]
    never, always = Merging(), Merging(of.network.layers, lambda *_: True)
    wanted, before = finished(engine(of, shelf, never), *rows), weights(of)
    of_merged = engine(of, shelf, always)
    found = finished(of_merged, *rows)
    assert always.merges == 1
    assert not unchanged(of, before)
    of_merged.rest()
    assert unchanged(of, before), "bit for bit"
    for name, row in wanted.items():
        torch.testing.assert_close(found[name].latent, row.latent, atol=EXACTLY, rtol=0)


def test_a_row_of_another_set_finds_the_weights_as_they_were(made: tuple[ModelFamily, Shelf]) -> None:
    of, shelf = made
    shared, other, plain = (
        replace(row, adapters=Adapters(SETS[n])) for n, row in zip((2, 1, 0), rows_of(of), strict=False)
    )
    merging, before = Merging(of.network.layers, lambda *_: True), weights(of)
    of_merged = engine(of, shelf, merging)
    of_merged.batch.submit([shared])
    of_merged.step()
    assert merging.beside(shelf.sets[SETS[2]]) is None
    of_merged.batch.submit([other, plain])
    of_merged.step()
    assert merging.beside(shelf.sets[SETS[2]]) is not None
    assert unchanged(of, before)
    done: dict[str, Row] = {}
    while (report := of_merged.step()) is not None:
        done |= {row.key.job_id: row for row in report.advanced if row.done}
    of_merged.rest()
    never = Merging()
    for row in (shared, other, plain):
        alone = finished(engine(of, shelf, never), row)[row.key.job_id]
        torch.testing.assert_close(done[row.key.job_id].latent, alone.latent, atol=EXACTLY, rtol=0)


def test_nothing_is_merged_while_a_row_of_another_set_waits(made: tuple[ModelFamily, Shelf]) -> None:
    of, shelf = made
    shared, other = (
        replace(row, adapters=Adapters(SETS[n])) for n, row in zip((2, 1), rows_of(of), strict=False)
    )
    merging = Merging(of.network.layers, lambda *_: True)
    of_merged = engine(of, shelf, merging)
    of_merged.batch.submit([shared])
    of_merged.batch.submit([other], ready=False)
    of_merged.step()
    assert merging.merges == 0


def test_half_precision_is_never_merged() -> None:
    of, shelf = family_and_shelf(torch.bfloat16)
    row = tiny_flux.row(of, Spec("x", steps=3))
    merging = Merging(of.network.layers, lambda *_: True)
    finished(engine(of, shelf, merging), replace(row, adapters=Adapters(SETS[1])))
    assert merging.merges == 0


def test_a_merge_without_memory_leaves_the_weights_and_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layers = {"a": nn.Linear(3, 2), "b": nn.Linear(3, 2)}
    factors = Factors(torch.ones(1, 3), torch.ones(2, 1))
    one = LowRank("one", {"a": factors, "b": factors})
    row = FOUR_STEPS
    merging = Merging(layers, lambda *_: True)
    before = [layer.weight.detach().clone() for layer in layers.values()]
    clone, left = Tensor.clone, [1]

    def little_memory(tensor: Tensor) -> Tensor:
        if not left:
            raise torch.OutOfMemoryError
        left.pop()
        return clone(tensor)

    with monkeypatch.context() as patched:
        patched.setattr(Tensor, "clone", little_memory)
        merging.settle([row], [one], steady=True)
    assert merging.beside(one) is one
    assert all(torch.equal(a, b.weight) for a, b in zip(before, layers.values(), strict=True))
    merging.settle([row], [one], steady=True)
    assert merging.merges == 0


@given(
    shapes=st.lists(st.tuples(*[st.integers(1, 6)] * 3), min_size=1, max_size=4),
    linear_ms=st.floats(1e-6, 1.0),
    byte_ms=st.floats(0, 1e-3),
)
def test_merging_pays_once_enough_products_are_spared(
    shapes: list[tuple[int, int, int]], linear_ms: float, byte_ms: float
) -> None:
    modules = {
        str(index): Factors(torch.ones(rank, width), torch.ones(out, rank))
        for index, (rank, width, out) in enumerate(shapes)
    }
    one, row = LowRank("one", modules), FOUR_STEPS
    merging = sum(rank * width * out for rank, width, out in shapes)
    token = sum(rank * (width + out) for rank, width, out in shapes)
    assert merge_work(one) == (merging, token)
    assert merged_bytes(one) == sum(4 * width * out for _, width, out in shapes)
    cost = merging * linear_ms + 3 * merged_bytes(one) * byte_ms
    for rows in ([row], [row, replace(row, step=3)]):
        spared = min(each.steps - each.step for each in rows) * sum(each.tokens for each in rows) * token
        assert pays(one, rows, linear_ms=linear_ms, byte_ms=byte_ms) == (spared * linear_ms > cost)
