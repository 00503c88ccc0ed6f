"""Corrections that are kept: by recording, mask and sequences, within a budget, as long as the template is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from giornata_denoiser.rows.correction import Correction
from giornata_denoiser.rows.row import Row
from giornata_denoiser.rows.stored import store
from giornata_denoiser.templates.corrections import CorrectionCache
from giornata_denoiser.templates.host import PINNED
from tests.fakes import tiny_flux
from tests.fakes.tiny_flux import Spec
from tests.unit.denoiser.engine.edits import edit, where
from tests.unit.denoiser.templates.recordings import template

OF = tiny_flux.family()
SIZE = 8 * 10**3
"""Bytes of a sequence's correction."""


def taught(recording: str, tokens: tuple[int, ...] = (0, 5), *, sequences: int = 1) -> Row:
    row = edit(OF, template(recording), Spec(grid=(4, 4), true_cfg_scale=float(sequences)), where(tokens))
    deltas = {(0, "key"): store(torch.zeros(SIZE // 8, 2), 0)}
    return replace(row, corrections=(Correction(deltas),) * len(row.prompts), taught=True)


def kept(budget: int, *rows: Row) -> CorrectionCache:
    made = CorrectionCache(budget)
    for row in rows:
        assert made.claim(row)
        made.keep(row)
    return made


def found(made: CorrectionCache, row: Row) -> bool:
    assert row.template is not None
    assert row.region is not None
    known = made.find(row.template.id, row.region, len(row.prompts))
    return known is not None and known == row.corrections


def test_rows_find_what_fits_them_and_nothing_else() -> None:
    one, two = taught("one"), taught("one", sequences=2)
    made = kept(10 * SIZE, one, two)
    assert found(made, one)
    assert found(made, two)
    assert not found(made, taught("one", (0, 6)))
    assert not found(made, taught("two"))
    assert (made.served, made.size_bytes) == (2, 3 * SIZE)


def test_the_first_one_stays_and_is_claimed_once() -> None:
    one = taught("one")
    made = kept(10 * SIZE, one)
    again = CorrectionCache(10 * SIZE)
    assert not made.claim(taught("one"))
    assert found(made, one)
    assert [again.claim(one), again.claim(one)] == [True, False]
    assert not again.claim(replace(one, corrections=None))


def test_the_least_recently_used_go_first_and_what_never_fits_is_not_claimed() -> None:
    rows = [taught(name) for name in ("one", "two", "three")]
    made = kept(2 * SIZE, *rows[:2])
    assert found(made, rows[0])
    assert made.claim(rows[2])
    made.keep(rows[2])
    assert [found(made, row) for row in rows] == [True, False, True]
    assert made.size_bytes == 2 * SIZE
    assert not CorrectionCache(SIZE - 1).claim(rows[0])
    assert not CorrectionCache(0).claim(rows[0])


def test_what_belongs_to_a_removed_template_goes_and_does_not_come_back() -> None:
    one, late, other = taught("pic-one"), taught("pic-one", (0, 6)), taught("other-one")
    made = kept(10 * SIZE, one, other)
    assert made.claim(late)
    made.remove_all("pic")
    made.keep(late)
    assert [found(made, row) for row in (one, late, other)] == [False, False, True]
    assert made.size_bytes == SIZE


def region_digest(*tokens: int) -> bytes:
    return where(tokens).digest


def test_a_mask_takes_what_was_learned_outside_of_it_and_of_the_nearest_other_one() -> None:
    near, far, guided = taught("one", (0, 5)), taught("one", (9, 10, 11, 12)), taught("one", sequences=2)
    for index, row in enumerate((near, far, guided)):
        assert row.region is not None
        rows = float(index) + torch.arange(len(row.region.outside)).unsqueeze(1).expand(-1, 2)
        corrections = tuple(Correction({(0, "key"): store(rows + 0.5, 0)}) for _ in row.prompts)
        object.__setattr__(row, "corrections", corrections)
    made = kept(10 * SIZE, far, near, guided)
    wanted = where((0, 6))
    assert made.nearest("two", wanted, 1) is None
    union = made.nearest("one", wanted, 1)
    assert union is not None
    assert union.digest == region_digest(0, 5, 6)
    before = made.size_bytes
    known = made.widened("one", union, 1)
    assert known is not None
    assert near.region is not None
    (delta,) = [each.deltas[0, "key"].data[:, 0] for each in known]
    tokens = near.region.outside.tolist()
    assert delta.tolist() == [0.5 + tokens.index(token) for token in union.outside.tolist()]
    assert made.widened("one", union, 1) is known, "it is copied once"
    assert made.size_bytes == before + known[0].size_bytes
    assert made.served == 2
    made.remove_all("one")
    assert made.widened("one", union, 1) is None


def test_masks_that_cover_the_picture_together_have_nothing_in_common() -> None:
    first, rest = tuple(range(8)), tuple(range(8, 16))
    assert kept(10 * SIZE, taught("one", first)).nearest("one", where(rest), 1) is None


def test_what_could_not_be_pinned_may_be_claimed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    one, made = taught("one"), CorrectionCache(10 * SIZE, host=PINNED)

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
        CorrectionCache(SIZE).keep(replace(taught("one"), corrections=None))
