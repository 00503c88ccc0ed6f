"""What edits leave to others: first templates and corrections."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch

from giornata.wire.requests import Reuse
from giornata.wire.workers import Tier
from giornata_denoiser.attempts.inputs import TemplateReuse
from giornata_denoiser.choices import CacheForm
from giornata_denoiser.engine.model_runner import StepReport
from giornata_denoiser.rows.row import RecordingSpec, Row
from giornata_denoiser.rows.template import CachedBlock, CachedTemplate, Correction, Entry, store
from giornata_denoiser.templates.store import EXPECTED, PINNED, CorrectionCache, FirstTemplates, TemplateStore
from giornata_lab.bench.compute import tiny_flux
from giornata_lab.bench.compute.rows import changed
from giornata_lab.bench.compute.tiny_flux import Spec
from tests.patience import HUNG_S
from tests.present import present
from tests.unit.denoiser.engine.edits import edit, where
from tests.unit.denoiser.engine.test_masked import OF
from tests.unit.denoiser.templates.desk import Desk, desk, template

# First templates: what edits leave is kept while it is expected, whole and finite, within a budget, for its
# tenant.


NOISE = edit(OF, None, Spec(grid=(4, 4))).inputs.conditioning["noise"]
SIZE = 3 * 2 * 16 * 4 + NOISE.nbytes
"""Bytes of what a row leaves."""


def done(name: str, *, job: str = "job", levels: int = 3, value: float = 1.0, bits: int = 0) -> Row:
    spec = RecordingSpec(frozenset({CacheForm.KV}), bits, name=name)
    row = changed(edit(OF, None, Spec(job, grid=(4, 4), steps=7)), renewed_every=3, records=spec)
    kept = CachedBlock(*(store(torch.full((16, 1 if bits == 0 else 2), value), bits) for _ in range(2)))
    entries = tuple(Entry(1.0 - i / 10, (kept,)) for i in range(levels))
    return replace(row, step=7, records=replace(spec, entries=entries))


def kept(budget: int, *rows: Row) -> FirstTemplates:
    made = FirstTemplates(budget)
    for row in rows:
        made.expect(present(row.records).name)
        made.keep(row)
    return made


def test_what_an_edit_left_shows_what_it_repainted() -> None:
    made = kept(SIZE, done("one"))
    found = present(made.find("one"))
    assert present(found.edited).digest == where().digest
    assert present(found.noise).shape == NOISE.shape
    assert (len(found.entries), made.kept, made.size_bytes) == (3, 1, SIZE)
    assert made.holds(found)
    assert made.find("two") is None


@pytest.mark.parametrize(
    "row", [done("one", levels=2), done("one", value=torch.nan), done("one", value=torch.inf, bits=4)]
)
def test_what_is_not_whole_or_not_finite_is_not_kept(row: Row) -> None:
    made = kept(SIZE * 10, row)
    assert (made.find("one"), made.kept) == (None, 0)


def test_a_removal_meanwhile_holds() -> None:
    made = kept(SIZE * 9, done("pic-left"), done("other-left"))
    made.expect("pic-more")
    made.remove_all("pic")
    made.keep(done("pic-more"))
    assert list(made) == ["other-left"]
    made.remove("other-left")
    assert made.size_bytes == 0


def test_edits_that_never_end_are_forgotten() -> None:
    made = FirstTemplates(SIZE * 9)
    for number in range(EXPECTED + 1):
        made.expect(str(number))
    for name in ("0", "1"):
        made.keep(done(name))
    assert list(made) == ["1"]


def test_each_has_a_name_of_its_own() -> None:
    """Corrections of one that had to go are not taken for the next one's."""
    one, two = (kept(SIZE, done("pic-left", job=job)).find("pic-left") for job in ("a", "b"))
    assert one is not None
    assert two is not None
    assert one.id != two.id
    assert one.id.startswith("pic-left")
    assert not kept(SIZE, done("pic-left", job="a")).holds(two)


def test_a_recording_goes_before_what_an_edit_left() -> None:
    made = TemplateStore(10**6, first_bytes=10**6)
    made.first.expect("pic-left")
    made.first.keep(done("pic-left"))
    found = present(made.find("pic-run", "pic-left"))
    assert made.has(found)
    assert made.resident() == {Tier.MEMORY: ("pic",)}
    assert made.find("pic-run") is None
    made.put(template("pic-run"))
    recording = present(made.find("pic-run", "pic-left"))
    assert recording.edited is None
    assert not made.has(found)
    assert made.first.size_bytes == 0
    counted = made.counted()
    assert (counted.hits_first, counted.misses, counted.hits_memory, counted.first) == (1, 1, 1, 1)


async def ended(made: Desk, how: TemplateReuse, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the engine tells it: the edit that was to leave something is done; until it has been looked at."""
    kept, keep = asyncio.Event(), made.store.first.keep
    loop = asyncio.get_running_loop()

    def told(row: Row) -> None:
        keep(row)
        loop.call_soon_threadsafe(kept.set)

    monkeypatch.setattr(made.store.first, "keep", told)
    made.lookup.learn([done(present(how.leaves).name)])
    await asyncio.wait_for(kept.wait(), HUNG_S)


async def test_the_first_edit_leaves_what_the_next_ones_take_until_a_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with desk(template_first_mb=1) as made:
        request = unregistered(made)
        first = await made.ask(request)
        assert first.recording is None
        await ended(made, first, monkeypatch)
        for _ in range(2):
            how = await made.ask(request)
            assert present(how.recording).edited is not None
            assert how.leaves is None
            assert made.engine.submitted == []
        assert (await made.ask(request)).recording is not None
        put, recorded = made.store.put, asyncio.Event()
        loop = asyncio.get_running_loop()

        def told(recording: CachedTemplate) -> None:
            put(recording)
            loop.call_soon_threadsafe(recorded.set)

        monkeypatch.setattr(made.store, "put", told)
        made.finish(await made.submitted(1))
        await asyncio.wait_for(recorded.wait(), HUNG_S)
        found = present((await made.ask(request)).recording)
        assert found.edited is None
        assert made.store.first.size_bytes == 0


async def test_a_second_edit_before_the_first_one_has_ended_has_it_recorded() -> None:
    async with desk(template_first_mb=1) as made:
        assert (await made.ask(unregistered(made))).leaves is not None
        assert (await made.ask(unregistered(made))).leaves is None
        await made.submitted(1)


@pytest.mark.parametrize(
    ("options", "parameters"),
    [
        ({"template_policy": "off"}, {}),
        ({"renew_steps": 0}, {}),
        ({}, {"reuse": Reuse.STRICT}),
        ({"template_memory_mb": 0}, {}),
    ],
)
async def test_some_edits_leave_nothing(options: dict[str, Any], parameters: dict[str, Any]) -> None:
    async with desk(**options) as made:
        job = made.request.job
        asked = job.parameters.model_copy(update=parameters)
        job = job.model_copy(update={"template_id": None, "parameters": asked})
        assert (await made.ask(made.request.model_copy(update={"job": job}))).leaves is None


async def test_a_registered_picture_is_recorded_and_needs_nothing_left() -> None:
    async with desk() as made:
        assert (await made.ask()).leaves is None
        await made.submitted(1)


async def test_another_tenant_finds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with desk(template_first_mb=1) as made:
        request = unregistered(made)
        first = await made.ask(request)
        await ended(made, first, monkeypatch)
        job = request.job.model_copy(update={"tenant": "somebody-else"})
        other = await made.ask(request.model_copy(update={"job": job}))
        assert other.recording is None
        assert present(other.leaves) != first.leaves


async def test_a_removed_picture_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    async with desk(template_first_mb=1) as made:
        request = unregistered(made)
        first = await made.ask(request)
        made.store.remove_all(first.leaves.name if first.leaves else "")
        await ended(made, first, monkeypatch)
        assert made.store.first.size_bytes == 0


async def test_template_runs_and_edits_are_told_apart() -> None:
    """What an edit leaves ends no run, and a run is not taken for an edit's."""
    async with desk(template_first_mb=1) as made:
        row = done("x")
        made.runs.advance(StepReport(0.0, 1.0, (row,)))
        run = replace(tiny_flux.row(OF, Spec()), records=row.records, step=4)
        made.lookup.learn([run])
        assert (run.background, row.background) == (True, False)
        assert made.store.first.size_bytes == 0


def unregistered(made: Desk) -> Any:
    job = made.request.job.model_copy(update={"template_id": None})
    return made.request.model_copy(update={"job": job})


# Corrections that are keeping: by recording, mask and sequences, within a budget, as long as the template
# is.


CORRECTION_BYTES = 8 * 10**3
"""Bytes of a sequence's correction."""


def taught(recording: str, tokens: tuple[int, ...] = (0, 5), *, sequences: int = 1) -> Row:
    row = edit(OF, template(recording), Spec(grid=(4, 4), true_cfg_scale=float(sequences)), where(tokens))
    deltas = {(0, "key"): store(torch.zeros(CORRECTION_BYTES // 8, 2), 0)}
    return changed(row, corrections=(Correction(deltas),) * len(row.inputs.prompts), taught=True)


def keeping(budget: int, *rows: Row) -> CorrectionCache:
    made = CorrectionCache(budget)
    for row in rows:
        assert made.claim(row)
        made.keep(row)
    return made


def found(made: CorrectionCache, row: Row) -> bool:
    known = made.find(present(row.reuse.template).id, present(row.region), len(row.inputs.prompts))
    return known is not None and known == row.reuse.corrections


def test_rows_find_what_fits_them_and_nothing_else() -> None:
    one, two = taught("one"), taught("one", sequences=2)
    made = keeping(10 * CORRECTION_BYTES, one, two)
    assert found(made, one)
    assert found(made, two)
    assert not found(made, taught("one", (0, 6)))
    assert not found(made, taught("two"))
    assert (made.served, made.size_bytes) == (2, 3 * CORRECTION_BYTES)


def test_the_first_one_stays_and_is_claimed_once() -> None:
    one = taught("one")
    made = keeping(10 * CORRECTION_BYTES, one)
    again = CorrectionCache(10 * CORRECTION_BYTES)
    assert not made.claim(taught("one"))
    assert found(made, one)
    assert [again.claim(one), again.claim(one)] == [True, False]
    assert not again.claim(changed(one, corrections=None))


def test_the_least_recently_used_go_first_and_what_never_fits_is_not_claimed() -> None:
    rows = [taught(name) for name in ("one", "two", "three")]
    made = keeping(2 * CORRECTION_BYTES, *rows[:2])
    assert found(made, rows[0])
    assert made.claim(rows[2])
    made.keep(rows[2])
    assert [found(made, row) for row in rows] == [True, False, True]
    assert made.size_bytes == 2 * CORRECTION_BYTES
    assert not CorrectionCache(CORRECTION_BYTES - 1).claim(rows[0])
    assert not CorrectionCache(0).claim(rows[0])


def test_what_belongs_to_a_removed_template_goes_and_does_not_come_back() -> None:
    one, late, other = taught("pic-one"), taught("pic-one", (0, 6)), taught("other-one")
    made = keeping(10 * CORRECTION_BYTES, one, other)
    assert made.claim(late)
    made.remove_all("pic")
    made.keep(late)
    assert [found(made, row) for row in (one, late, other)] == [False, False, True]
    assert made.size_bytes == CORRECTION_BYTES


def region_digest(*tokens: int) -> bytes:
    return where(tokens).digest


def test_a_mask_takes_what_was_learned_outside_of_it_and_of_the_nearest_other_one() -> None:
    near, far, guided = taught("one", (0, 5)), taught("one", (9, 10, 11, 12)), taught("one", sequences=2)
    for index, row in enumerate((near, far, guided)):
        rows = float(index) + torch.arange(len(present(row.region).outside)).unsqueeze(1).expand(-1, 2)
        corrections = tuple(Correction({(0, "key"): store(rows + 0.5, 0)}) for _ in row.inputs.prompts)
        object.__setattr__(row.reuse, "corrections", corrections)
    made = keeping(10 * CORRECTION_BYTES, far, near, guided)
    wanted = where((0, 6))
    assert made.nearest("two", wanted, 1) is None
    union = present(made.nearest("one", wanted, 1))
    assert union.digest == region_digest(0, 5, 6)
    before = made.size_bytes
    known = present(made.widened("one", union, 1))
    (delta,) = [each.deltas[0, "key"].data[:, 0] for each in known]
    tokens = present(near.region).outside.tolist()
    assert delta.tolist() == [0.5 + tokens.index(token) for token in union.outside.tolist()]
    assert made.widened("one", union, 1) is known, "it is copied once"
    assert made.size_bytes == before + known[0].size_bytes
    assert made.served == 2
    made.remove_all("one")
    assert made.widened("one", union, 1) is None


def test_masks_that_cover_the_picture_together_have_nothing_in_common() -> None:
    first, rest = tuple(range(8)), tuple(range(8, 16))
    assert keeping(10 * CORRECTION_BYTES, taught("one", first)).nearest("one", where(rest), 1) is None


def test_what_could_not_be_pinned_may_be_claimed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    one, made = taught("one"), CorrectionCache(10 * CORRECTION_BYTES, host=PINNED)

    def no_memory(_: Correction) -> Correction:
        raise RuntimeError("no memory to pin")

    monkeypatch.setattr(Correction, "pinned", no_memory)
    assert made.claim(one)
    with pytest.raises(RuntimeError, match="no memory"):
        made.keep(one)
    assert not found(made, one)
    assert made.claim(one)


def test_a_row_without_corrections_cannot_be_kept() -> None:
    with pytest.raises(ValueError, match="no corrections"):
        CorrectionCache(CORRECTION_BYTES).keep(changed(taught("one"), corrections=None))
