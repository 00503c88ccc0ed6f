"""Block-causal families: a row's prefix is computed once, and counted where it is held."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from giornata.planning.operations import SequenceShape
from giornata.wire.values import BlockMode
from giornata_denoiser.engine.batch_tensors import place_inputs
from giornata_denoiser.engine.step_budget import StepBudget, row_bytes, step_bytes
from giornata_denoiser.families.driven.network import PreparedSequence
from giornata_denoiser.families.network import ModelFamily, build_row
from giornata_denoiser.rows.row import Row
from giornata_lab.bench.compute.rows import changed
from giornata_lab.bench.compute.tiny_flux import Spec
from tests.fakes import tiny_driven
from tests.unit.denoiser.engine.edits import engine, finished

EXACT = 1e-5
KLEIN, QWEN = "flux2-klein-kv", "qwen-image-2.1"
REFERENCES: Mapping[str, tuple[tuple[tuple[int, int], ...], ...]] = {
    KLEIN: (((3, 2), (2, 5)), (), ((6, 4),)),
    QWEN: ((), (), ()),
}
"""Grids of the references of each of `SPECS`, beside the edit's own picture."""
SPECS = (
    Spec("first", grid=(4, 4), text_tokens=5, steps=4, seed=1),
    Spec("second", grid=(2, 6), text_tokens=9, steps=3, seed=2),
    Spec("third", grid=(6, 2), text_tokens=33, steps=2, seed=3),
)


def rows_of(name: str) -> list[Row]:
    """Rows that differ in size, prompt, steps and references; nothing of them is kept."""
    of = tiny_driven.family(name)
    rows = [tiny_driven.row(of, spec, of_row) for spec, of_row in zip(SPECS, REFERENCES[name], strict=True)]
    return [
        changed(row, conditioning={**row.inputs.conditioning, "mask": torch.ones_like(row.latent)})
        for row in rows
    ]


def distance(mine: Tensor, theirs: Tensor) -> float:
    return float((mine - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize("name", REFERENCES)
def test_a_prefix_is_made_once_and_again_where_a_row_goes_on(name: str) -> None:
    of, row = tiny_driven.family(name), rows_of(name)[0]
    network: Any = of.network
    with mock.patch.object(network, "_prefilled", wraps=network._prefilled) as prefilled:
        made = engine(of)
        made.batch.submit([row])
        whole = finished(made)["first"]
        assert prefilled.call_count == 1
        assert made.plan() == ()
        assert not made.computing.placing.keys, "it leaves with its row"
        made.batch.submit([row])
        for _ in range(2):
            made.step()
        moved = made.batch.running[0].export()
        other = engine(of)
        other.batch.submit([_resumed(of, row, moved)])
        ended = finished(other)["first"]
        assert prefilled.call_count == 3
    assert distance(ended.latent, whole.latent) <= EXACT, "it travels in float32"


@pytest.mark.parametrize("name", REFERENCES)
def test_a_row_counts_its_prefix(name: str) -> None:
    """In memory as long as it runs, in pairs in each step, and as a sequence of its own in its first step."""
    of, row = tiny_driven.family(name), rows_of(name)[0]
    (prefix,) = row.inputs.prefix
    assert prefix == (5 if name == QWEN else 16 + 6 + 10)
    text = 0 if name == QWEN else 5
    assert row.shapes == (SequenceShape(text, 16, 16, prefix=prefix),)
    assert row.shapes[0].pairs(BlockMode.FULL) == (text + 16) * (prefix + text + 16)
    assert row.joining == (SequenceShape(0, prefix, prefix),)
    assert row.advanced(row.latent).joining == ()
    with torch.no_grad():
        kept = _prepared(place_inputs(row, of).sequences[0].prepared).prefix
    held = sum(each.key.nbytes + each.value.nbytes for each in kept)
    assert row_bytes(row, of, None) - row_bytes(changed(row, prefix=()), of, None) == held
    budget = StepBudget(activation_bytes=1000.0)
    many = changed(row, prefix=(10_000,))
    grown = step_bytes([many], budget, of) - row_bytes(many, of, None)
    assert grown == 1000.0 * 10_000, "a prefix larger than the step itself"


def test_work_of_a_first_step_has_the_prefix() -> None:
    of, row = tiny_driven.family(QWEN), rows_of(QWEN)[2]
    made = engine(of)
    made.batch.submit([row])
    samples = [report.sample for report in iter(made.step, None)]
    first, second = (sample for sample in samples if sample is not None)
    assert (first.image_tokens, second.image_tokens) == (12 + 33, 12)
    assert (first.sequences, second.sequences) == (2, 1)


def test_a_generation_of_klein_without_references_has_no_prefix() -> None:
    of, row = tiny_driven.family(KLEIN), rows_of(KLEIN)[1]
    assert of.network.references.grids(row.grid, (), generated=True) == ()
    assert of.network.prefix_tokens(row.inputs.prompts[0], ()) == 0
    assert row.inputs.beside == (row.grid,), "an edit has its own picture"


def _prepared(made: object) -> PreparedSequence:
    assert isinstance(made, PreparedSequence)
    return made


def _resumed(of: ModelFamily, row: Row, moved: Any) -> Row:
    """The row as another denoiser builds it."""
    prompt: Any = row.inputs.prompts[0]
    return build_row(
        of,
        row.key,
        grid=row.grid,
        track=row.track,
        text=prompt.tensors,
        conditioning=row.inputs.conditioning,
        guidance_scale=1.0,
        resume=moved,
        references=_references(row),
    )


def _references(row: Row) -> list[Tensor]:
    given = row.inputs.beside[1:]
    sizes = [height * width for height, width in given]
    parts = torch.split(row.inputs.conditioning["references"], sizes) if given else ()
    return [part.view(*grid, -1) for part, grid in zip(parts, given, strict=True)]
