"""Guidance halves: equal to one process, for transformers and UNets, and no sequence is computed twice."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from giornata.packed.ulysses import AllToAllGroup
from giornata.planning.degrees import StepParallelism
from giornata_denoiser.engine.assembly import place
from giornata_denoiser.families.protocol import ModelFamily
from giornata_denoiser.parallel import halves
from giornata_denoiser.parallel.family import possible, shared, shares_tokens
from giornata_denoiser.parallel.halves import halved
from tests.fakes import tiny_flux
from tests.fakes.tiny_flux import Spec
from tests.integration.denoiser.parallel.members import Members
from tests.integration.denoiser.parallel.steps import Latents, Made, assert_close, walk
from tests.integration.denoiser.parallel.test_engine import Case, leg, leg_of
from tests.integration.denoiser.parallel.test_forward import nothing, unequal
from tests.integration.denoiser.parallel.test_reuse import mixed
from tests.unit.denoiser.families import test_unet_engine as unets

PLAN = [(0, 1), (3, 2), (1,), (1, 0)]


def pictures(*scales: float | None) -> Made:
    """Rows of a UNet."""
    of = unets.family(dtype=torch.float32)
    rows = [unets.row(of, f"{seed}", seed=seed, scale=scale) for seed, scale in enumerate(scales)]
    return of, rows, nothing


def by_halves(of: ModelFamily, group: AllToAllGroup) -> ModelFamily:
    return of if group.size == 1 else halved(of, group)


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
    walk(members, making, PLAN, by_halves)


@pytest.mark.parametrize("case", [Case(), Case(bits=8, kept=False)], ids=str)
def test_corrections_own_values_padding_and_loras(members: Members, case: Case) -> None:
    wanted = leg(tiny_flux.family(), case, None, 0, 5)
    answers: list[Latents] = members.run((0, 1), leg_of, case, (0, 1), None, 0, 5, by_halves)
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
    pair, single, big = (place(row, of).sequences for row in (guided, other, large))
    assert halves.members([pair[0], single[0], big[0], pair[1]]) == (0, 1, 0, 1)
    assert halves.members([single[0], single[0], big[0]]) == (1, 1, 0)
    assert halves.members([single[0]]) == (0,)


def test_what_a_group_cannot_compute_is_told() -> None:
    flux, unet = tiny_flux.family(), unets.family()
    assert shares_tokens(flux)
    assert not shares_tokens(unet)
    assert [
        possible(flux, way)
        for way in (StepParallelism(4), StepParallelism(5), StepParallelism(2, halves=True))
    ] == [True, False, True]
    assert [
        possible(unet, way)
        for way in (StepParallelism(1), StepParallelism(2), StepParallelism(2, halves=True))
    ] == [True, False, True]
    with pytest.raises(
        TypeError, match="received 2 devices for UnetInpaint, accepted are 1, or 2 by guidance"
    ):
        shared(unet, Group(2))
    with pytest.raises(ValueError, match="received 5 devices, accepted are at most 4, one for each head"):
        shared(flux, Group(5))
    with pytest.raises(ValueError, match="received 4 devices, accepted are 2"):
        halved(flux, Group(4))
    assert shared(unet, Group(1)) is unet
    for taken in (shared(flux, Group(2)), halved(flux, Group(2))):
        for how in (shared, halved):
            with pytest.raises(ValueError, match="accepted are those of one process"):
                how(taken, Group(2))
