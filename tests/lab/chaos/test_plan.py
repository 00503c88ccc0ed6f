"""The plan of faults, without any process."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from giornata_lab.rehearsals.chaos.faults import (
    ALL,
    LEAST,
    TARGETS,
    WIRED,
    Fault,
    FaultRound,
    Kind,
    draw,
)
from giornata_lab.rehearsals.chaos.load import AT_ONCE

seeds = st.integers(0, 2**32)
sizes = {"edits": st.integers(20, 2000), "faults": st.integers(1, 80)}


def faults_of(rounds: tuple[FaultRound, ...]) -> list[Fault]:
    return [fault for turn in rounds for fault in turn.faults]


@given(seeds, sizes["edits"], sizes["faults"])
def test_a_plan_has_as_many_faults_as_asked_for_while_there_is_load(
    seed: int, edits: int, faults: int
) -> None:
    rounds = draw(seed, edits=edits, faults=faults)
    assert len(faults_of(rounds)) == faults
    afters = [turn.after for turn in rounds]
    assert afters == sorted(afters)
    assert 0 <= afters[0] <= afters[-1] < edits


@given(seeds, sizes["edits"], sizes["faults"])
def test_the_same_seed_draws_the_same_plan(seed: int, edits: int, faults: int) -> None:
    assert draw(seed, edits=edits, faults=faults) == draw(seed, edits=edits, faults=faults)


@given(seeds)
def test_a_full_plan_does_everything_to_everybody(seed: int) -> None:
    faults = faults_of(draw(seed, edits=1000, faults=ALL))
    assert {(f.kind, f.target) for f in faults} == {(kind, target) for kind in Kind for target in TARGETS}
    assert {f.target for f in faults if f.everyone} == set(WIRED)


@given(seeds, sizes["faults"])
def test_faults_at_one_moment_are_of_different_targets_and_only_some_last(seed: int, faults: int) -> None:
    rounds = draw(seed, edits=1000, faults=faults)
    assert all(len({f.target for f in turn.faults}) == len(turn.faults) <= 2 for turn in rounds)
    assert all(LEAST <= turn.in_progress <= AT_ONCE for turn in rounds)
    assert all((f.lasts_s > 0) == (f.kind is Kind.FREEZE) for f in faults_of(rounds))
