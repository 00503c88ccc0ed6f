"""Groups compute what one process computes: forwards, modes, families, engines and halves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import pytest
import torch

from giornata.packed.low_rank import low_rank
from giornata.packed.packing import BlockInputs, CachedTokens, with_companions
from giornata.packed.sharding import AllToAllGroup
from giornata.planning.cost_model import StepParallelism
from giornata.wire.values import BlockMode
from giornata_denoiser.choices import CacheForm
from giornata_denoiser.engine.batch_tensors import place_inputs
from giornata_denoiser.engine.engine import Engine
from giornata_denoiser.engine.recorders import EntryRecorder
from giornata_denoiser.engine.slabs import CacheSharder, Device, Slabs
from giornata_denoiser.engine.step_plan import ReuseOptions
from giornata_denoiser.families.flux import FluxInpaint, FluxKontext
from giornata_denoiser.families.network import ModelFamily
from giornata_denoiser.parallel import RankGroup, assign_members, halve_guidance, is_possible, shared
from giornata_denoiser.rows.parts import Adapters, RowLora
from giornata_denoiser.rows.row import RecordingSpec, Row
from giornata_denoiser.rows.template import Entry
from giornata_lab.bench.compute import tiny_flux
from giornata_lab.bench.compute.rows import changed
from giornata_lab.bench.compute.tiny_flux import Spec
from tests.fakes import tiny_driven
from tests.fakes.tiny_driven import FAMILIES
from tests.integration.denoiser.parallel.members import Member, Members
from tests.integration.denoiser.parallel.steps import (
    Latents,
    Made,
    Together,
    advanced,
    assert_close,
    values,
    walk,
)
from tests.present import present
from tests.unit.denoiser.engine.edits import FORMS, GRID, ROOMY, edit, template, where
from tests.unit.denoiser.engine.test_low_ranks import LoraSetStore
from tests.unit.denoiser.engine.test_masked import GivenResiduals, drawn, masked, step, uses_of
from tests.unit.denoiser.engine.test_unkept import Unkept
from tests.unit.denoiser.families import test_unet_engine as unets
from tests.unit.denoiser.families.test_driven import region_of

# Forwards of groups: equal to one process's, whichever devices compute which step.


def nothing(_: ModelFamily) -> Sequence[BlockInputs]:
    return ()


def unequal(*, fill: bool = False) -> Made:
    """Rows of different sizes, prompts and guidance."""
    of = tiny_flux.family(fill=fill)
    specs = [
        Spec("first", grid=(5, 7), text_tokens=3, steps=6, seed=1),
        Spec("guided", grid=(4, 4), text_tokens=6, steps=6, seed=2, true_cfg_scale=2.5, guidance_scale=2.0),
        Spec("small", grid=(1, 3), text_tokens=1, steps=6, seed=3),
    ]
    return of, [tiny_flux.row(of, spec) for spec in specs], nothing


def one_token() -> Made:
    """A picture and a prompt of one token each: some members have none."""
    of = tiny_flux.family()
    return of, [tiny_flux.row(of, Spec(grid=(1, 1), text_tokens=1, steps=3))], nothing


@pytest.mark.parametrize("fill", [False, True])
def test_degree_and_devices_change_between_steps(members: Members, fill: bool) -> None:
    walk(members, partial(unequal, fill=fill), [(0,), (0, 1), (0, 1, 2, 3), (2, 3), (1, 3, 0), (3,)])


def test_members_may_have_no_token(members: Members) -> None:
    walk(members, one_token, [(0, 1, 2, 3), (1, 2, 3), (0, 1)])


# What is taken, kept, added and changed by sequence: the same, whether one process computes a step or a
# group.


PLAN = [(0, 1), (0, 1, 2, 3), (1, 3, 0), (2,)]
KV, HIDDEN, FULL = BlockMode.KV, BlockMode.HIDDEN, BlockMode.FULL


def entry(of: ModelFamily, row: Row, bits: int) -> Entry:
    """What the row's next step in full leaves of its last sequence."""
    recorder = EntryRecorder(row.level, of.depth, RecordingSpec(frozenset(CacheForm), bits))
    row = replace(row, region=None)
    step(of, [row], [*(BlockInputs() for _ in row.inputs.prompts[1:]), BlockInputs(recorder=recorder)])
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
        row if row.region is None else replace(row, region=with_companions(row.region, row.inputs.companions))
        for row in rows
    ]
    modes = {2: (KV,) * 4, 3: (FULL, HIDDEN, KV, HIDDEN), 4: (HIDDEN, FULL, HIDDEN, KV)}
    entries = {index: entry(of, rows[index], bits) for index in modes}

    def uses(part: ModelFamily) -> Sequence[BlockInputs]:
        narrowing = CacheSharder(part)
        taken = {
            index: taking(part, rows[index], narrowing.entry(entries[index]), modes[index]) for index in modes
        }
        found = uses_of(rows, taken)
        found[0] = replace(found[0], residuals=GivenResiduals(drawn(rows[0].image_tokens, width=16 * heads)))
        found[4] = replace(
            found[4], residuals=GivenResiduals(drawn(rows[4].image_tokens, 1, width=16 * heads))
        )
        computed = len(rows[2].region.computed) if rows[2].region else 0
        found[2] = replace(
            found[2], residuals=GivenResiduals(drawn(computed, 2, width=16 * heads), whole=False)
        )
        return found

    return of, rows, uses


def taking(
    part: ModelFamily, row: Row, kept: Entry | None, modes: tuple[BlockMode, ...]
) -> list[BlockInputs]:
    """What each of the row's sequences uses."""
    return [
        BlockInputs(CachedTokens(modes, Slabs(present(kept), present(row.region), own, part)))
        for own in row.own_tokens
    ]


@pytest.mark.parametrize("bits", [0, 4])
def test_every_mixture_of_modes(members: Members, bits: int) -> None:
    walk(members, partial(mixed, 4, bits), PLAN)


def test_clean_pictures_beside_are_shared_too(members: Members) -> None:
    walk(members, partial(mixed, 4, 0, FluxKontext), PLAN[:2])


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


# Driven transformers shared by tokens: equal to one process, in full, in every mode, and with no token at
# all.


SHORT = [(0, 1), (3, 2)]


def driven_rows(name: str) -> Made:
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
        found = [BlockInputs()] * (len(rows) + sum(len(row.inputs.prompts) > 1 for row in rows))
        for index, modes in taken.items():
            entry, where = CacheSharder(part).entry(entries[index]), rows[index].region
            found[index] = BlockInputs(
                CachedTokens(modes, Slabs(present(entry), present(where), rows[index].own_tokens[0], part))
            )
        return found

    return of, rows, uses


def one_driven_token(name: str) -> Made:
    of = tiny_driven.family(name)
    return of, [tiny_driven.row(of, Spec(grid=(1, 1), text_tokens=1, steps=3))], lambda _: ()


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_every_mixture_of_modes_of_a_driven_transformer(members: Members, name: str) -> None:
    walk(members, partial(driven_rows, name), SHORT)


@pytest.mark.parametrize("name", ["qwen-image-edit-plus", "sd3"])
def test_members_of_a_driven_transformer_may_have_no_token(members: Members, name: str) -> None:
    walk(members, partial(one_driven_token, name), [(0, 1)])


# Engines of a group: what rows learn, keep and renew from step to step is each member's share of one
# process's.


LORA = RowLora("one", 1.0)


@dataclass(frozen=True)
class Case:
    """Rows that an engine takes."""

    forms: frozenset[CacheForm] = FORMS[0]
    bits: int = 0
    """Bits of corrections, and of what is renewed."""
    kept: bool = True
    """Whether slabs are gathered once and kept."""

    def __str__(self) -> str:
        return f"{' and '.join(sorted(self.forms))}, {self.bits} bits, {'kept' if self.kept else 'stored'}"


@cache
def rows_of(forms: frozenset[CacheForm]) -> tuple[Row, ...]:
    """In full, under a LoRA, taking from a template, and taking their own; guided or not, with padding or without."""
    of = tiny_flux.family()
    taken = template(of, forms, steps=6)
    full = tiny_flux.row(of, Spec("full", grid=(5, 3), steps=6, seed=1))
    adapted = tiny_flux.row(
        of, Spec("adapted", grid=GRID, text_tokens=4, steps=6, seed=2, true_cfg_scale=2.0)
    )
    spec = Spec("taking", grid=GRID, text_tokens=6, padding_tokens=3, steps=6, seed=3, true_cfg_scale=1.5)
    taking = changed(edit(of, taken, spec), keeps_padding=True)
    beside = edit(of, taken, Spec("beside", grid=GRID, steps=6, seed=4), where((1, 2, 3)))
    own = edit(of, None, replace(spec, job_id="own", seed=5), where((6,)))
    return (
        full,
        replace(adapted, adapters=Adapters((LORA,))),
        taking,
        replace(beside, adapters=Adapters((LORA,))),
        changed(own, renewed_every=3, keeps_padding=True),
    )


@cache
def shelf() -> LoraSetStore:
    """A random set of every layer."""
    generator, network = torch.Generator().manual_seed(0), tiny_flux.family().network
    tensors = {
        f"{path}.{part}": 0.1 * torch.randn(shape, generator=generator)
        for path, layer in network.layers.items()
        if isinstance(layer, torch.nn.Linear)
        for part, shape in (("down", (4, layer.in_features)), ("up", (layer.out_features, 4)))
    }
    return LoraSetStore({(LORA,): low_rank("one", [(tensors, 1.0)])})


def leg(of: ModelFamily, case: Case, latents: Latents | None, begin: int, steps: int) -> Latents:
    """The rows' latents after so many steps of an engine that is new to them."""
    rows: Sequence[Row] = rows_of(case.forms)
    if latents is not None:
        rows = [
            replace(row, latent=torch.from_numpy(latent), step=begin)
            for row, latent in zip(rows, latents, strict=True)
        ]
    reusing = ReuseOptions(correction_bits=case.bits, device=Device() if case.kept else Unkept())
    made = Engine(of, ROOMY, lambda: 0.0, reusing=reusing, low_ranks=shelf())
    made.batch.submit(rows)
    found: dict[str, Row] = {}
    for _ in range(steps):
        report = present(made.step())
        assert report.failed == ()
        found = {row.key.job_id: row for row in report.advanced}
    return values(found[row.key.job_id].latent for row in rows)


def leg_of(
    member: Member,
    case: Case,
    devices: tuple[int, ...],
    epoch: int,
    latents: Latents | None,
    begin: int,
    steps: int,
    together: Together = shared,
) -> Latents:
    return leg(together(tiny_flux.family(), member.group(devices, epoch)), case, latents, begin, steps)


@pytest.mark.parametrize(
    "case",
    [
        Case(forms=FORMS[1]),
        Case(bits=8),
        Case(forms=FORMS[1], kept=False),  # in bits, each share of hidden states has ranges of its own
        Case(bits=4, kept=False),
    ],
    ids=str,
)
def test_corrections_own_values_padding_and_loras(members: Members, case: Case) -> None:
    """A row that moves to other devices begins there in full, as in a process that is new to it."""
    wanted: Latents | None = None
    latents: Latents | None = None
    for begin, steps, devices in ((0, 4, (0, 1)), (4, 2, (1, 2, 3, 0))):
        wanted = leg(tiny_flux.family(), case, wanted, begin, steps)
        answers = members.run(devices, leg_of, case, devices, members.epoch, latents, begin, steps)
        for answer in answers:
            assert_close(answer, wanted)
        latents = answers[0]


def recording(member: Member, devices: tuple[int, ...], epoch: int) -> str:
    """What an engine of a group says of a template run."""
    of = shared(tiny_flux.family(), member.group(devices, epoch))
    row = tiny_flux.row(of, Spec(grid=GRID))
    made = Engine(of, ROOMY, lambda: 0.0)
    made.batch.submit([replace(row, records=RecordingSpec(FORMS[0], 0))])
    with pytest.raises(ValueError, match="one device records alone") as refused:
        made.step()
    return str(refused.value)


def test_a_template_run_is_refused(members: Members) -> None:
    for answer in members.run((0, 1), recording, (0, 1), members.epoch):
        assert "in a group" in answer


# Guidance halves: equal to one process, for transformers and UNets, and no sequence is computed twice.


PAIRS = [(0, 1), (3, 2), (1,), (1, 0)]


def pictures(*scales: float | None) -> Made:
    """Rows of a UNet."""
    of = unets.family(dtype=torch.float32)
    rows = [unets.row(of, f"{seed}", seed=seed, scale=scale) for seed, scale in enumerate(scales)]
    return of, rows, nothing


def by_halves(of: ModelFamily, group: AllToAllGroup) -> ModelFamily:
    return of if group.size == 1 else halve_guidance(of, group)


@pytest.mark.parametrize(
    "making",
    [
        unequal,
        partial(mixed, 4, 8),
        partial(pictures, 2.0, None, 3.0),
        partial(pictures, None, None),
        partial(pictures, None),
    ],
    ids=["flux", "modes", "guided and not", "none guided", "one for two"],
)
def test_halves_equal_one_process(members: Members, making: partial[Made]) -> None:
    walk(members, making, PAIRS, by_halves)


@pytest.mark.parametrize("case", [Case(), Case(bits=8, kept=False)], ids=str)
def test_halves_have_corrections_own_values_padding_and_loras(members: Members, case: Case) -> None:
    wanted = leg(tiny_flux.family(), case, None, 0, 5)
    answers: list[Latents] = members.run((0, 1), leg_of, case, (0, 1), members.epoch, None, 0, 5, by_halves)
    for answer in answers:
        assert_close(answer, wanted)


class Group:
    """A group of which nothing is asked."""

    name, rank = "g", 0

    def __init__(self, size: int) -> None:
        self.size = size

    def trade(self, flat: torch.Tensor, sent: object, received: object) -> torch.Tensor:
        raise AssertionError("nothing is computed")


def test_each_sequence_has_one_member_and_both_halves_of_a_row_have_two() -> None:
    of = tiny_flux.family()
    guided, other = (tiny_flux.row(of, Spec(grid=(4, 4), true_cfg_scale=scale)) for scale in (2.0, 1.0))
    large = tiny_flux.row(of, Spec(grid=(6, 6)))
    pair, single, big = (place_inputs(row, of).sequences for row in (guided, other, large))
    assert assign_members([pair[0], single[0], big[0], pair[1]]) == (0, 1, 0, 1)
    assert assign_members([single[0], single[0], big[0]]) == (1, 1, 0)
    assert assign_members([single[0]]) == (0,)


def test_what_a_group_cannot_compute_is_told() -> None:
    flux, unet = tiny_flux.family(), unets.family()
    assert [
        is_possible(flux, way)
        for way in (StepParallelism(4), StepParallelism(5), StepParallelism(2, halves=True))
    ] == [True, False, True]
    assert [
        is_possible(unet, way)
        for way in (StepParallelism(1), StepParallelism(2), StepParallelism(2, halves=True))
    ] == [True, False, True]
    with pytest.raises(
        TypeError, match="received 2 devices for UnetInpaint, accepted are 1, or 2 by guidance"
    ):
        shared(unet, Group(2))
    with pytest.raises(ValueError, match="received 5 devices, accepted are at most 4, one for each head"):
        shared(flux, Group(5))
    with pytest.raises(ValueError, match="received 4 devices, accepted are 2"):
        halve_guidance(flux, Group(4))
    assert shared(unet, Group(1)) is unet
    for taken in (shared(flux, Group(2)), halve_guidance(flux, Group(2))):
        for how in (shared, halve_guidance):
            with pytest.raises(ValueError, match="accepted are those of one process"):
                how(taken, Group(2))
