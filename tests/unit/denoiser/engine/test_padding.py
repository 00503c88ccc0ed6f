"""What is kept of rows: padding of prompts, and entries without slabs; and which rows share a step."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from giornata.packed import attention
from giornata.packed.attention import DenseKV, KVPages, grouped
from giornata.packed.packing import BlockInputs, CachedTokens
from giornata.planning.operations import StepCosts
from giornata.scheduling.batch import RowKey
from giornata.tensors import PROMPT_MASK
from giornata.wire.values import BlockMode
from giornata_denoiser.attempts.inputs import TemplateReuse, with_reuse
from giornata_denoiser.choices import EXACT, CacheForm
from giornata_denoiser.engine import step_budget
from giornata_denoiser.engine.batch_tensors import place_inputs
from giornata_denoiser.engine.loading import Loader
from giornata_denoiser.engine.slabs import Device, Slabs
from giornata_denoiser.engine.step_budget import (
    StepBudget,
    correction_bytes,
    row_bytes,
    slab_bytes,
    step_bytes,
)
from giornata_denoiser.families.network import ModelFamily, build_row
from giornata_denoiser.rows.row import RecordingSpec, Row
from giornata_denoiser.rows.template import CachedTemplate, Correction
from giornata_lab.bench.compute import tiny_flux
from giornata_lab.bench.compute.rows import changed
from giornata_lab.bench.compute.tiny_flux import Spec
from tests.examples import examples
from tests.present import present
from tests.unit.denoiser.engine.edits import (
    FORMS,
    GRID,
    Oracle,
    edit,
    engine,
    finish_rows,
    template,
    where,
)
from tests.unit.denoiser.engine.test_corrections import Hiccup
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

# A device that keeps no slabs: blocks gather entries as they are stored, and rows come to the same
# pictures.


class Unkept(Device):
    keeps = False


@pytest.mark.parametrize(
    ("forms", "corrected", "ahead"),
    [(FORMS[0], True, True), (FORMS[0], False, False), (FORMS[1], True, False)],
)
def test_pictures_are_those_of_kept_slabs(forms: frozenset[CacheForm], corrected: bool, ahead: bool) -> None:
    taken = template(OF, forms, steps=3)
    bits = EXACT if corrected else None
    rows = [
        edit(OF, taken, Spec("a", grid=GRID, steps=6, seed=1)),
        edit(OF, taken, Spec("b", grid=GRID, steps=4, seed=2, true_cfg_scale=2.0), where((1, 2, 3))),
        changed(edit(OF, taken, Spec("c", grid=GRID, steps=5, seed=3)), region=None, template=None),
    ]
    ended = []
    for device in (Device(), Unkept()):
        with Loader() as loader:
            ended.append(
                finish_rows(OF, rows, device=device, correction_bits=bits, loader=loader if ahead else None)
            )
    for name in "abc":
        kept, unkept = (each[name].latent for each in ended)
        torch.testing.assert_close(unkept, kept, atol=FLOAT32, rtol=0)


def test_nothing_is_held_but_the_entry() -> None:
    taken = template(OF)
    for device, held in ((Unkept(), True), (Device(), False)):
        slabs = Slabs(taken.entries[0], where(), 3, OF, device=device)
        found = slabs.keys_values(1)
        assert isinstance(found, KVPages) is held
        key = found.key.data if isinstance(found, KVPages) else found.key
        stored = present(taken.entries[0].blocks[1].key)
        assert (key.data_ptr() == stored.data.data_ptr()) is held
    sizes = Slabs(taken.entries[0], where(), 3, OF, device=Unkept()).sizes(BlockMode.KV)
    assert sizes.sum() == taken.entries[0].size_bytes


# Which rows share a step: by memory, time and number.


ADMISSIONS = 250


def rows_of_any_weight(of: ModelFamily, taken: CachedTemplate) -> Iterator[Row]:
    draw = random.Random(0)  # noqa: S311 - no secrets
    for number in range(ADMISSIONS):
        spec = Spec(f"r{number}", grid=GRID, steps=draw.randint(1, 3), true_cfg_scale=draw.choice([1.0, 2.0]))
        tokens = draw.sample(range(16), draw.randint(1, 15))
        yield edit(of, taken if draw.random() < 0.7 else None, spec, where(tokens))


@pytest.mark.slow
def test_memory_stays_within_its_budget_over_hundreds_of_admissions() -> None:
    taken = template(OF)
    rows = list(rows_of_any_weight(OF, taken))
    held = StepBudget(activation_bytes=1000.0, correction_bits=8)
    most = 4 * max(step_bytes([row], held, OF) for row in rows)
    made = engine(OF, budget=replace(held, memory_bytes=most))
    made.batch.submit(rows)
    fullest, admitted = 0, set()
    while joined := made.plan():
        admitted |= {row.key for row in joined}
        assert step_bytes(joined, held, OF) <= most
        fullest = max(fullest, len(joined))
        made.batch.settle(
            [row.advanced(row.latent) for row in joined], [r.key for r in joined if r.step + 1 >= r.steps]
        )
    assert len(admitted) == ADMISSIONS
    assert fullest > 4


def test_what_is_counted_is_what_is_held() -> None:
    row = edit(OF, template(OF), Spec("edit", grid=GRID, steps=6, true_cfg_scale=2.0, text_tokens=7))
    slabs = (
        [Slabs(row.reuse.template.entries[0], row.region, own, OF) for own in row.own_tokens]
        if row.reuse.template and row.region
        else []
    )
    held = [slab.gathered(block) for slab in slabs for block in range(BLOCKS)]
    assert slab_bytes(row, 4) == sum(each.key.nbytes + each.value.nbytes for each in held) > 0
    for bits in (EXACT, 8, 4):
        made = engine(OF, correction_bits=bits)
        made.batch.submit([row])
        report = present(made.step())
        (taught,) = report.advanced
        learned = sum(each.size_bytes for each in taught.reuse.corrections or ())
        assert correction_bytes(taught, 4, bits) == correction_bytes(row, 4, bits) == learned > 0
    assert correction_bytes(row, 4, None) == 0
    run = replace(tiny_flux.row(OF, Spec("run", grid=GRID, steps=3)), records=RecordingSpec(FORMS[0], EXACT))
    recorded = template(OF, steps=3).size_bytes
    assert row_bytes(run, OF, 8) - row_bytes(replace(run, records=None), OF, 8) == recorded


def test_activations_are_those_of_equal_sequences_while_rows_stay_equally_long() -> None:
    budget, taken = StepBudget(activation_bytes=2000.0, even_bytes=1000.0), template(OF)

    def each(*rows: Row) -> int:
        added = step_bytes(rows, budget, OF) - step_bytes(rows, StepBudget(), OF)
        return round(added / sum(row.tokens for row in rows))

    whole, other = (tiny_flux.row(OF, Spec(name, grid=GRID, steps=3)) for name in ("a", "b"))
    assert each(whole) == each(whole, other) == each(whole, replace(other, step=1)) == 1000
    assert each(whole, tiny_flux.row(OF, Spec("c", grid=GRID, text_tokens=7))) == 2000
    assert each(changed(whole, companions=1)) == 2000, "they may be modulated apart"
    first, second, larger = (
        edit(OF, taken, Spec(name, grid=GRID, steps=3), where(tokens))
        for name, tokens in (("a", [1, 2]), ("b", [5, 6]), ("c", [1, 2, 3]))
    )
    assert each(first, second) == 1000
    assert each(first, replace(second, degree=1, step=1)) == 2000, "one computes all, one its region"
    assert each(first, whole) == each(first, larger) == 2000, "they will"
    assert step_bytes([whole], replace(budget, even_bytes=None), OF) > step_bytes([whole], budget, OF)


def test_what_is_prepared_of_a_row_is_counted() -> None:
    short, long = (tiny_flux.row(OF, Spec(steps=steps, true_cfg_scale=2.0)) for steps in (3, 7))
    held = [
        sum(cast("Tensor", sequence.prepared).nbytes for sequence in place_inputs(row, OF).sequences)
        for row in (short, long)
    ]
    assert row_bytes(long, OF, None) - row_bytes(short, OF, None) == held[1] - held[0] > 0
    assert held[0] == 2 * 3 * OF.network.prepared_bytes


def test_what_is_loaded_ahead_counts_once_for_all_rows() -> None:
    taken = template(OF)
    rows = [edit(OF, taken, Spec(f"r{i}", grid=GRID)) for i in range(3)]
    alone, entry = step_bytes(rows, StepBudget(), OF), sum(slab_bytes(row, 4) for row in rows)
    assert step_bytes(rows, StepBudget(ahead_bytes=100), OF) - alone == 100
    assert step_bytes(rows, StepBudget(ahead_bytes=1e12), OF) - alone == entry


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
