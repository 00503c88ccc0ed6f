"""What is taken, kept, added and changed by sequence: the same, whether one process computes a step or a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch

from giornata.packed.region import beside
from giornata.packed.uses import BlockInputs, CachedTokens
from giornata.wire.values import BlockMode
from giornata_denoiser.blocks.narrowing import CacheSharder
from giornata_denoiser.blocks.recording import EntryRecorder
from giornata_denoiser.blocks.slabs import Slabs
from giornata_denoiser.choices import CacheForm
from giornata_denoiser.families.flux.checkpoints import FluxInpaint, FluxKontext
from giornata_denoiser.families.protocol import ModelFamily
from giornata_denoiser.parallel.family import shared
from giornata_denoiser.parallel.groups import RankGroup
from giornata_denoiser.rows.row import RecordingSpec, Row
from giornata_denoiser.rows.template import Entry
from tests.fakes import tiny_flux
from tests.fakes.tiny_flux import Spec
from tests.integration.denoiser.parallel.members import Member, Members
from tests.integration.denoiser.parallel.steps import Made, advanced, walk
from tests.unit.denoiser.engine.test_masked import masked, step, uses_of
from tests.unit.denoiser.engine.test_residuals import Given, drawn

PLAN = [(0, 1), (0, 1, 2, 3), (2, 3), (1, 3, 0), (2,), (3, 0)]
KV, HIDDEN, FULL = BlockMode.KV, BlockMode.HIDDEN, BlockMode.FULL


def entry(of: ModelFamily, row: Row, bits: int) -> Entry:
    """What the row's next step in full leaves of its last sequence."""
    recorder = EntryRecorder(row.level, of.depth, RecordingSpec(frozenset(CacheForm), bits))
    row = replace(row, region=None)
    step(of, [row], [*(BlockInputs() for _ in row.prompts[1:]), BlockInputs(recorder=recorder)])
    return recorder.entry()


def mixed(heads: int, bits: int, network: type[FluxInpaint] = FluxInpaint) -> Made:
    """Rows in full, guided and not, and masked ones in all mixtures of modes, with ControlNets and without."""
    of = tiny_flux.family(network(tiny_flux.transformer(heads=heads)))
    rows = [
        tiny_flux.row(of, Spec("full", grid=(5, 7), text_tokens=3, steps=6, seed=1)),
        tiny_flux.row(of, Spec("guided", grid=(4, 4), text_tokens=6, steps=6, seed=2, true_cfg_scale=2.5)),
        masked(of, Spec("kv", grid=(6, 6), text_tokens=2, steps=6, seed=3), [14, 15, 20], halo=1),
        masked(of, Spec("one token", grid=(8, 4), steps=6, seed=4, true_cfg_scale=1.5), [1]),
        masked(of, Spec("mixed", grid=(3, 9), text_tokens=4, steps=6, seed=5), [5, 6], halo=1),
    ]
    rows = [
        row if row.region is None else replace(row, region=beside(row.region, row.companions)) for row in rows
    ]
    modes = {2: (KV,) * 4, 3: (FULL, HIDDEN, KV, HIDDEN), 4: (HIDDEN, FULL, HIDDEN, KV)}
    entries = {index: entry(of, rows[index], bits) for index in modes}

    def uses(part: ModelFamily) -> Sequence[BlockInputs]:
        narrowing = CacheSharder(part)
        taken = {
            index: taking(part, rows[index], narrowing.entry(entries[index]), modes[index]) for index in modes
        }
        found = uses_of(rows, taken)
        found[0] = replace(found[0], residuals=Given(drawn(rows[0].image_tokens, width=16 * heads)))
        found[4] = replace(found[4], residuals=Given(drawn(rows[4].image_tokens, 1, width=16 * heads)))
        computed = len(rows[2].region.computed) if rows[2].region else 0
        found[2] = replace(found[2], residuals=Given(drawn(computed, 2, width=16 * heads), whole=False))
        return found

    return of, rows, uses


def taking(
    part: ModelFamily, row: Row, kept: Entry | None, modes: tuple[BlockMode, ...]
) -> list[BlockInputs]:
    """What each of the row's sequences uses."""
    assert row.region is not None
    assert kept is not None
    return [BlockInputs(CachedTokens(modes, Slabs(kept, row.region, own, part))) for own in row.own_tokens]


@pytest.mark.parametrize("bits", [0, 8, 4])
def test_every_mixture_of_modes(members: Members, bits: int) -> None:
    walk(members, partial(mixed, 4, bits), PLAN)


def test_clean_pictures_beside_are_shared_too(members: Members) -> None:
    walk(members, partial(mixed, 4, 0, FluxKontext), PLAN[:4])


def test_heads_that_no_degree_divides(members: Members) -> None:
    walk(members, partial(mixed, 6, 0), [(0, 1, 2, 3), (1, 2, 3, 0), (0, 3)])


class Counted:
    """A group that counts what it trades."""

    def __init__(self, group: RankGroup) -> None:
        self._group, self.trades = group, 0
        self.name, self.rank, self.size = group.name, group.rank, group.size

    def trade(self, flat: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        self.trades += 1
        return self._group.trade(flat, sent, received)


def trades(member: Member, devices: tuple[int, ...], epoch: int) -> int:
    """How many trades one step makes."""
    of, rows, uses = mixed(4, 0)
    counted = Counted(member.group(devices, epoch))
    part = shared(of, counted)
    advanced(part, rows, uses(part))
    return counted.trades


def test_blocks_trade_twice_and_once_more_for_hidden_states(members: Members) -> None:
    """Those of all rows at once, and the output at the end."""
    with_hidden = len({0, 2} | {1, 3})  # blocks in which one of the rows takes hidden states
    assert members.run((0, 1), trades, (0, 1), members.epoch) == [2 * 4 + with_hidden + 1] * 2
