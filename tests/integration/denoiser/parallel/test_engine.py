"""Engines of a group: what rows learn, keep and renew from step to step is each member's share of one process's."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from giornata.packed.low_rank import low_rank
from giornata_denoiser.blocks.device import Device
from giornata_denoiser.choices import CacheForm
from giornata_denoiser.engine.engine import Engine
from giornata_denoiser.engine.sources import ReuseOptions
from giornata_denoiser.families.protocol import ModelFamily
from giornata_denoiser.parallel.family import shared
from giornata_denoiser.rows.adapters import Adapters, RowLora
from giornata_denoiser.rows.row import RecordingSpec, Row
from tests.fakes import tiny_flux
from tests.fakes.tiny_flux import Spec
from tests.integration.denoiser.parallel.members import Member, Members
from tests.integration.denoiser.parallel.steps import Latents, Together, assert_close, values
from tests.unit.denoiser.engine.edits import FORMS, GRID, ROOMY, edit, template, where
from tests.unit.denoiser.engine.test_low_ranks import Shelf
from tests.unit.denoiser.engine.test_unkept import Unkept

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


def rows_of(of: ModelFamily, case: Case) -> list[Row]:
    """In full, under a LoRA, taking from a template, and taking their own; guided or not, with padding or without."""
    taken = template(of, case.forms, steps=6)
    full = tiny_flux.row(of, Spec("full", grid=(5, 3), steps=6, seed=1))
    adapted = tiny_flux.row(
        of, Spec("adapted", grid=GRID, text_tokens=4, steps=6, seed=2, true_cfg_scale=2.0)
    )
    spec = Spec("taking", grid=GRID, text_tokens=6, padding_tokens=3, steps=6, seed=3, true_cfg_scale=1.5)
    taking = replace(edit(of, taken, spec), keeps_padding=True)
    beside = edit(of, taken, Spec("beside", grid=GRID, steps=6, seed=4), where((1, 2, 3)))
    own = edit(of, None, replace(spec, job_id="own", seed=5), where((6,)))
    return [
        full,
        replace(adapted, adapters=Adapters((LORA,))),
        taking,
        replace(beside, adapters=Adapters((LORA,))),
        replace(own, renewed_every=3, keeps_padding=True),
    ]


def shelf(of: ModelFamily) -> Shelf:
    """A random set of every layer."""
    generator, network = torch.Generator().manual_seed(0), of.network
    tensors = {
        f"{path}.{part}": 0.1 * torch.randn(shape, generator=generator)
        for path, layer in network.layers.items()
        if isinstance(layer, torch.nn.Linear)
        for part, shape in (("down", (4, layer.in_features)), ("up", (layer.out_features, 4)))
    }
    return Shelf({(LORA,): low_rank("one", [(tensors, 1.0)])})


def leg(of: ModelFamily, case: Case, latents: Latents | None, begin: int, steps: int) -> Latents:
    """The rows' latents after so many steps of an engine that is new to them."""
    whole = tiny_flux.family()
    rows = rows_of(whole, case)
    if latents is not None:
        rows = [
            replace(row, latent=torch.from_numpy(latent), step=begin)
            for row, latent in zip(rows, latents, strict=True)
        ]
    reusing = ReuseOptions(correction_bits=case.bits, device=Device() if case.kept else Unkept())
    made = Engine(of, ROOMY, lambda: 0.0, reusing=reusing, low_ranks=shelf(whole))
    made.batch.submit(rows)
    found: dict[str, Row] = {}
    for _ in range(steps):
        report = made.step()
        assert report is not None
        assert report.failed == ()
        found = {row.key.job_id: row for row in report.advanced}
    return values(found[row.key.job_id].latent for row in rows)


def leg_of(
    member: Member,
    case: Case,
    devices: tuple[int, ...],
    latents: Latents | None,
    begin: int,
    steps: int,
    together: Together = shared,
) -> Latents:
    return leg(together(tiny_flux.family(), member.group(devices)), case, latents, begin, steps)


@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(forms=FORMS[1]),
        Case(bits=8),
        Case(forms=FORMS[2], bits=8, kept=False),
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
        answers = members.run(devices, leg_of, case, devices, latents, begin, steps)
        for answer in answers:
            assert_close(answer, wanted)
        latents = answers[0]


def recording(member: Member, devices: tuple[int, ...]) -> str:
    """What an engine of a group says of a template run."""
    of = shared(tiny_flux.family(), member.group(devices))
    row = tiny_flux.row(of, Spec(grid=GRID))
    made = Engine(of, ROOMY, lambda: 0.0)
    made.batch.submit([replace(row, records=RecordingSpec(FORMS[0], 0))])
    with pytest.raises(ValueError, match="one device records alone") as refused:
        made.step()
    return str(refused.value)


def test_a_template_run_is_refused(members: Members) -> None:
    for answer in members.run((0, 1), recording, (0, 1)):
        assert "in a group" in answer
