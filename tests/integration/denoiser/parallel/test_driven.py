"""Driven transformers shared by tokens: equal to one process, in full, in every mode, and with no token at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest

from giornata.packed.uses import BlockInputs, CachedTokens
from giornata.wire.values import BlockMode
from giornata_denoiser.blocks.narrowing import CacheSharder
from giornata_denoiser.blocks.recording import EntryRecorder
from giornata_denoiser.blocks.slabs import Slabs
from giornata_denoiser.choices import CacheForm
from giornata_denoiser.families.protocol import ModelFamily
from giornata_denoiser.rows.row import RecordingSpec
from tests.fakes import tiny_driven
from tests.fakes.tiny_driven import FAMILIES
from tests.fakes.tiny_flux import Spec
from tests.integration.denoiser.parallel.members import Members
from tests.integration.denoiser.parallel.steps import Made, walk
from tests.unit.denoiser.engine.test_masked import step
from tests.unit.denoiser.families.test_driven import region_of

PLAN = [(0, 1), (2, 3), (1,), (3, 0)]
KV, HIDDEN, FULL = BlockMode.KV, BlockMode.HIDDEN, BlockMode.FULL


def rows_of(name: str) -> Made:
    """In full, guided and not, and masked in mixtures of modes."""
    of = tiny_driven.family(name)
    specs = [
        Spec("full", grid=(3, 5), text_tokens=5, steps=5, seed=1),
        Spec("guided", grid=(4, 4), text_tokens=7, steps=5, seed=2, true_cfg_scale=2.0),
        Spec("kv", grid=(6, 4), text_tokens=9, steps=5, seed=3),
        Spec("mixed", grid=(4, 4), text_tokens=3, steps=5, seed=4),
    ]
    given = [(2, 3), (3, 1)] if name == "qwen-image-edit-plus" else []
    rows = [tiny_driven.row(of, spec, given) for spec in specs]
    taken = {2: (KV,) * of.depth, 3: ((HIDDEN, FULL, HIDDEN, KV) * of.depth)[: of.depth]}
    entries = {}
    for index in taken:
        recorder = EntryRecorder(rows[index].level, of.depth, RecordingSpec(frozenset(CacheForm), 0))
        step(of, [rows[index]], [BlockInputs(recorder=recorder)])
        entries[index] = recorder.entry()
        rows[index] = replace(rows[index], region=region_of(rows[index], (1, 2, 7)))

    def uses(part: ModelFamily) -> Sequence[BlockInputs]:
        found = [BlockInputs()] * (len(rows) + sum(len(row.prompts) > 1 for row in rows))
        for index, modes in taken.items():
            entry, where = CacheSharder(part).entry(entries[index]), rows[index].region
            assert entry is not None
            assert where is not None
            found[index] = BlockInputs(
                CachedTokens(modes, Slabs(entry, where, rows[index].own_tokens[0], part))
            )
        return found

    return of, rows, uses


def one_token(name: str) -> Made:
    of = tiny_driven.family(name)
    return of, [tiny_driven.row(of, Spec(grid=(1, 1), text_tokens=1, steps=3))], lambda _: ()


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_every_mixture_of_modes(members: Members, name: str) -> None:
    walk(members, partial(rows_of, name), PLAN)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_members_may_have_no_token(members: Members, name: str) -> None:
    walk(members, partial(one_token, name), [(0, 1)])
