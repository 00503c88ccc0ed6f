"""Padding of prompts that is kept: some steps compute it, and those after them take what these made of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from giornata.packed import attention
from giornata.packed.attention import DenseKV, grouped
from giornata.packed.packing import BlockInputs, CachedTokens
from giornata.planning.operations import StepCosts
from giornata.scheduling.batch import RowKey
from giornata.tensors import PROMPT_MASK
from giornata.wire.values import BlockMode
from giornata_denoiser.attempts.inputs import TemplateReuse, with_reuse
from giornata_denoiser.choices import EXACT
from giornata_denoiser.engine import step_budget
from giornata_denoiser.engine.step_budget import row_bytes
from giornata_denoiser.families.network import ModelFamily, build_row
from giornata_denoiser.rows.row import Row
from giornata_denoiser.rows.template import CachedTemplate, Correction
from giornata_lab.bench.compute import tiny_flux
from giornata_lab.bench.compute.rows import changed
from giornata_lab.bench.compute.tiny_flux import Spec
from tests.examples import examples
from tests.present import present
from tests.unit.denoiser.engine.edits import (
    GRID,
    Oracle,
    edit,
    engine,
    finish_rows,
    template,
    where,
)
from tests.unit.denoiser.engine.test_masked import (
    BLOCKS,
    DOUBLE,
    FLOAT32,
    OF,
    Everything,
    Recorded,
    exact_family,
    masked,
    reusing,
    step,
    uses_of,
)
from tests.unit.denoiser.engine.test_renewing import Hiccup
from tests.unit.denoiser.engine.test_unkept import Unkept

EXACTLY = exact_family()
KV = (BlockMode.KV,) * BLOCKS
PADDED = Spec(grid=GRID, steps=7, text_tokens=6, padding_tokens=4)


class KeptText:
    """What was shown of a prompt's padding."""

    def __init__(self, of: Everything) -> None:
        self._of = of

    def keys_values(self, block: int) -> DenseKV:
        return DenseKV(*self._of.heads[block])


def shown(of: ModelFamily, row: Row) -> tuple[Tensor, list[Everything], list[Everything]]:
    """The row's latent after a full step, and what each sequence's picture and padding were in it."""
    pictures, texts = ([Everything() for _ in row.inputs.prompts] for _ in range(2))
    uses = [BlockInputs(recorder=a, padding_recorder=b) for a, b in zip(pictures, texts, strict=True)]
    (latent,) = step(of, [row], uses)
    return latent, pictures, texts


def freezing(uses: Sequence[BlockInputs], texts: Sequence[Everything]) -> list[BlockInputs]:
    return [replace(use, padding=KeptText(text)) for use, text in zip(uses, texts, strict=True)]


# One forward


MIXES = st.lists(
    st.tuples(
        st.integers(2, 6),  # text tokens
        st.integers(0, 4),  # padding, while there is text beside it
        st.booleans(),  # kept
        st.lists(st.sampled_from(BlockMode), min_size=BLOCKS, max_size=BLOCKS),
        st.sampled_from([1.0, 3.0]),
        st.booleans(),  # room
    ),
    min_size=1,
    max_size=4,
)


@pytest.mark.slow
@examples(times=1 / 3)  # each computes whole models
@given(MIXES, st.booleans())
def test_rows_with_and_without_kept_padding_share_a_forward(mixes: list[tuple[Any, ...]], fill: bool) -> None:
    of, rows, wanted, reuse = exact_family(fill=fill), [], [], {}
    for index, (text, padding, kept, modes, scale, room) in enumerate(mixes):
        spec = Spec(f"j{index}", 1, 0, GRID, text, min(padding, text - 1), true_cfg_scale=scale, seed=index)
        row = masked(of, spec, [index, 7, 11])
        whole, pictures, texts = shown(of, replace(row, region=None))
        uses = reusing(row, pictures, modes, room=room)
        reuse[index] = freezing(uses, texts) if kept and spec.padding_tokens else uses
        rows.append(row)
        wanted.append(whole)
    latents = step(of, rows, uses_of(rows, reuse))
    for row, latent, whole in zip(rows, latents, wanted, strict=True):
        inside = present(row.region).computed
        torch.testing.assert_close(latent[inside], whole[inside], atol=FLOAT32, rtol=0)


# Runs of the engine


def expected(of: ModelFamily, row: Row, teacher: Row | None = None) -> Tensor:
    """By a second implementation: what a step that computes the padding shows, the steps after it take.

    A row with a template is corrected by its own first step, or by that of a `teacher`.
    """
    begun, place, taken, texts = row.step, row.region, row.reuse.template, list[Everything]()
    pictures: list[Everything] = []
    first = None if teacher is None or taken is None else (taken.at(teacher.level), shown(of, teacher)[1])
    assert place is not None
    while not row.done:
        entry = None if taken is None else taken.at(row.level)
        learns = entry is not None and first is None
        if learns or (entry is None and (row.step == begun or row.step % row.reuse.renewed_every == 0)):
            latent, pictures, texts = shown(of, row)
            first = entry, pictures
            row = row.advanced(latent)
            continue
        sources: list[Any] = [Recorded(each, place) for each in pictures]
        if entry is not None and first is not None and first[0] is not None:
            sources = [Oracle(entry, place, (first[0], each)) for each in first[1]]
        uses = [BlockInputs(CachedTokens(KV, source)) for source in sources]
        if texts:
            uses = freezing(uses, texts)
        else:
            texts = [Everything() for _ in row.inputs.prompts]
            uses = [replace(use, padding_recorder=text) for use, text in zip(uses, texts, strict=True)]
        row = row.advanced(step(of, [row], uses)[0])
    return row.latent


def keeping(of: ModelFamily, taken: CachedTemplate | None, spec: Spec = PADDED) -> Row:
    return changed(edit(of, taken, spec), keeps_padding=True, renewed_every=0 if taken else 3)


def taught(teacher: Row) -> tuple[Correction, ...] | None:
    return finish_rows(EXACTLY, [teacher], correction_bits=EXACT)[teacher.key.job_id].reuse.corrections


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fill", "hit", "scale"), [(False, True, 1.0), (True, False, 1.0), (True, True, 2.0)]
)
def test_steps_take_what_an_earlier_one_made_of_the_padding(fill: bool, hit: bool, scale: float) -> None:
    """Beside a row that computes its padding in every step, and one that computes everything."""
    of = exact_family(fill=fill)
    taken = template(of)
    row = keeping(of, taken if hit else None, replace(PADDED, true_cfg_scale=scale))
    off = edit(of, taken, replace(PADDED, job_id="off", seed=3))
    others = [off, tiny_flux.row(of, replace(PADDED, job_id="whole", seed=4))]
    ended = finish_rows(of, [row, *others], correction_bits=EXACT)
    torch.testing.assert_close(ended["job"].latent, expected(of, row), atol=FLOAT32, rtol=0)
    for other in others:
        wanted = finish_rows(of, [other], correction_bits=EXACT)[other.key.job_id].latent
        torch.testing.assert_close(ended[other.key.job_id].latent, wanted, atol=FLOAT32, rtol=0)


@pytest.mark.parametrize("hit", [False, True])
def test_without_padding_it_is_as_if_nothing_were_kept(hit: bool) -> None:
    """With an encoding that does not tell, and with one that tells of none."""
    taken, untold = template(OF) if hit else None, replace(PADDED, padding_tokens=0)
    text, fields = tiny_flux.inputs(OF, untold)
    told = build_row(
        OF,
        RowKey("job", 1, 0),
        grid=GRID,
        track=OF.schedule.track(sampler=OF.schedule.default_sampler, steps=7, strength=1.0, cells=16),
        text={**text, PROMPT_MASK: torch.ones(6)},
        conditioning=fields,
        guidance_scale=3.5,
    )
    kept = keeping(OF, taken, untold)
    for row in (kept, changed(kept, prompts=told.inputs.prompts)):
        both = row, changed(row, keeps_padding=False)
        ended = [finish_rows(OF, [each])["job"].latent for each in both]
        torch.testing.assert_close(ended[0], ended[1], atol=0, rtol=0)


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_a_row_with_a_known_correction_computes_its_padding_once(scale: float) -> None:
    """Its first step computes the compute set and the whole text."""
    taken = template(EXACTLY)
    teacher = edit(EXACTLY, taken, replace(PADDED, job_id="teacher", true_cfg_scale=scale, seed=8))
    row = keeping(EXACTLY, taken, replace(PADDED, true_cfg_scale=scale))
    row = changed(row, corrections=taught(teacher))
    made = engine(EXACTLY, correction_bits=EXACT)
    made.batch.submit([row])
    reports = list(iter(made.step, None))
    samples = [report.sample for report in reports if report.sample is not None]
    both = 1 if scale == 1.0 else 2  # the negative prompt has two more tokens, one of them padding
    text = 6 if both == 1 else 14
    assert [sample.text_tokens for sample in samples] == [text] + [text - (4 if both == 1 else 9)] * 6
    assert {sample.image_tokens for sample in samples} == {4 * both}
    (ended,) = reports[-1].advanced
    torch.testing.assert_close(ended.latent, expected(EXACTLY, row, teacher), atol=FLOAT32, rtol=0)


@pytest.mark.parametrize("hit", [False, True])
def test_samples_and_plans_tell_what_is_computed(hit: bool) -> None:
    """A row whose padding was given back computes it again."""
    made = engine(OF)
    made.batch.submit([keeping(OF, template(OF) if hit else None)])
    text, tokens = [], []
    for number in range(7):
        if number == 5:
            made.rest()
        (now,) = made.plan()
        report = made.settle(made.computing.compute((now,)))
        assert report.sample is not None
        if number != 5:
            assert now.tokens == report.sample.image_tokens + report.sample.text_tokens
        text.append(report.sample.text_tokens)
        tokens.append(report.sample.attention_pairs)
    assert text == ([6, 2, 2, 2, 2, 6, 2] if hit else [6, 2, 2, 6, 2, 6, 6])
    assert tokens[1] == (2 + 4) * (6 + 16)
    assert tokens[0] == (6 + 16) * (6 + 16)


def test_padding_of_which_a_step_kept_a_part_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows know their correction, so that nothing else makes the step compute it."""
    taken = template(EXACTLY)
    teacher = edit(EXACTLY, taken, replace(PADDED, job_id="teacher", seed=8))
    known = taught(teacher)
    rows = [
        changed(keeping(EXACTLY, taken, replace(PADDED, job_id=name, seed=seed)), corrections=known)
        for seed, name in enumerate("ab")
    ]
    calls = count()

    def attend(*args: Any) -> Tensor:
        if next(calls) == 2:
            raise RuntimeError("in the third block of the first step")
        return grouped(*args)

    monkeypatch.setattr(attention, "choose_attention", lambda *_: attend)
    ended = finish_rows(tiny_flux.family(Hiccup(0, DOUBLE)), rows, correction_bits=EXACT)
    for row in rows:
        wanted = expected(EXACTLY, row, teacher)
        torch.testing.assert_close(ended[row.key.job_id].latent, wanted, atol=FLOAT32, rtol=0)


@pytest.mark.parametrize(("hit", "bits"), [(False, 8), (True, 4)])
def test_where_slabs_are_not_kept_it_is_kept_in_bits(hit: bool, bits: int) -> None:
    """The picture is near that of padding as it was: nearer with more bits."""
    taken = template(EXACTLY) if hit else None
    row = keeping(EXACTLY, taken)
    far = (
        (
            finish_rows(EXACTLY, [row], device=Unkept(), correction_bits=bits)["job"].latent
            - expected(EXACTLY, row)
        )
        .abs()
        .max()
    )
    assert FLOAT32 < far < (0.05 if bits == 8 else 0.8)


# What it takes, and which rows


@pytest.mark.parametrize(("scale", "bits"), [(1.0, 4), (2.0, None)])
def test_what_is_kept_is_weighed(scale: float, bits: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    row = keeping(OF, template(OF), replace(PADDED, true_cfg_scale=scale))
    off, parts, width = changed(row, keeps_padding=False), 2 * BLOCKS, 64
    monkeypatch.setattr(step_budget, "keeps_slabs", lambda _: bits is None)
    kept = [
        parts * width * 4 * n if bits is None else parts * (n * width // 2 + 2 * width * 4) for n in (4, 5)
    ]
    assert row_bytes(row, OF, bits) - row_bytes(off, OF, bits) == sum(kept[: len(row.inputs.prompts)])


def test_rows_keep_padding_where_they_reuse_and_are_to() -> None:
    costs = StepCosts((0.0, 0.0, 1.0, 0.0, 0.0, 0.0))
    for taken in (None, template(OF)):
        auto = TemplateReuse(1.0, taken, costs, 7, keeps_padding=True)
        row = tiny_flux.row(OF, PADDED)
        assert with_reuse(row, where(), auto, OF).padding == (4,)
        assert with_reuse(row, where(), replace(auto, keeps_padding=False), OF).padding == (0,)
        assert with_reuse(row, None, auto, OF).padding == (0,), "it computes everything"
        assert tiny_flux.row(OF, PADDED).padding == (0,)
