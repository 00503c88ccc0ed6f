"""Few workers are looked at, and they are the same that a look at all of them would find."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata.planning.cost_model import StepCosts
from giornata.scheduling.adapters import NeededLora
from giornata.scheduling.demand import RowShape, StepTimeModel
from giornata.scheduling.worker_state import FEWER, WorkerIndex, WorkerOccupancy, WorkerTotals
from giornata.wire.workers import Tier
from giornata_lab.bench.systems.networks import PLAIN_4
from tests.unit.scheduling.test_placement import DEMAND, SHAPE, row, worker

PACE = StepTimeModel()
CAPACITY = 4
KEPT = 2 * FEWER
"""Workers that are looked at."""

moves = st.lists(
    st.tuples(
        st.integers(0, 25),
        st.sampled_from(["put", "drop", "give", "take"]),
        st.integers(0, CAPACITY),
        st.sets(st.sampled_from("tuv")),
        st.sets(st.sampled_from("lmn")),
    ),
    max_size=60,
)


def occupied(number: int, rows: int, templates: set[str], loras: Iterable[str] = ()) -> WorkerOccupancy:
    state = worker(
        f"d{number}",
        *[row(f"j{number}-{i}", 0, 1 + (number + i) % 5) for i in range(rows)],
        capacity=CAPACITY,
    )
    assert state.worker is not None
    shown = state.worker.model_copy(
        update={
            "resident": {Tier.MEMORY: tuple(sorted(templates))},
            "adapters_resident": {
                Tier.DISK: tuple(sorted(loras)),
                Tier.DEVICE: tuple(sorted(loras)) if number % 3 == 0 else (),
            },
        }
    )
    return WorkerOccupancy.of(state, shown, PACE, None)


def held(one: WorkerOccupancy) -> WorkerTotals:
    return one.sum_up(PACE, {})


@pytest.mark.parametrize(
    ("told", "shape", "reuses"),
    [
        ({"computed_tokens": 4, "padding_tokens": 6}, RowShape(9, 16, 4, 10, padding=6), True),
        (
            {"computed_tokens": 4, "padding_tokens": 6, "renewed_every": 3},
            RowShape(9, 16, 4, 10, padding=6),
            False,
        ),
        ({"prefix_tokens": 30}, RowShape(9, 16, 16, 10, prefix=30), False),
        (
            {"low_rank": 7.0, "control": 11.0},
            RowShape(9, 16, 16, 10, low_rank=7.0, segments=1.0, control=11.0),
            False,
        ),
    ],
    ids=["padding", "padding, renewed", "prefix", "adapters"],
)
def test_a_row_weighs_as_one_of_a_demand(told: dict[str, float], shape: RowShape, reuses: bool) -> None:
    costs = StepCosts((5.0, 0.1, 0.2, 0.001, 0.0, 0.0, 0.3, 2.0, 0.4))
    pace = StepTimeModel(costs, PLAIN_4, keeps_padding=True)
    state = worker("d", row("j", 0, 10).model_copy(update={"text_tokens": 9} | told))
    assert state.worker is not None
    weighed = WorkerOccupancy.of(state, state.worker, pace, None).sum_up(pace, {}).work_ms
    every = int(told.get("renewed_every", 0))
    assert weighed == pytest.approx(shape.load(pace, reuses=reuses, renewed_every=every).work_ms)


def holding(
    ordered: Sequence[WorkerOccupancy], workers: Collection[WorkerOccupancy], first: str, second: str
) -> list[str]:
    """With the first LoRA on the device, of these the ones with the second, too, or else those; then in any tier."""
    found = list[str]()
    for tiers in ({Tier.DEVICE}, set(Tier)):
        with_first = [one for one in workers if one.loras.get(first) in tiers]
        both = [one for one in with_first or workers if one.loras.get(second) in tiers]
        found += [one.name for one in ordered if one in (both or with_first)][: KEPT // FEWER]
    return found


@given(moves=moves, excluded=st.sets(st.integers(0, 25).map(lambda number: f"d{number}")))
def test_those_with_least_to_compute_among_all_and_among_holders(
    moves: list[tuple[int, str, int, set[str], set[str]]], excluded: set[str]
) -> None:
    roster, members = WorkerIndex(held), dict[str, WorkerOccupancy]()
    for number, move, rows, templates, loras in moves:
        name = f"d{number}"
        if move == "put":
            members[name] = occupied(number, rows, templates, loras)
            roster.put(members[name])
        elif move == "drop":
            members.pop(name, None)
            roster.drop(name)
        elif name in members:
            key = (f"x{rows}", 1)
            if move == "give":
                members[name].give(key, DEMAND, 0.0)
            else:
                members[name].take(key)
            roster.changed(name)
        others = (each for each in members.values() if each.name not in excluded)
        assert roster.has_room(DEMAND, excluded) is any(
            DEMAND.fits(held(each).rows, CAPACITY) for each in others
        )
        roster.least(1, excluded)
    able = [one for name, one in members.items() if name not in excluded]
    ordered = sorted(able, key=lambda one: (held(one).work_ms, one.name))
    assert [one.name for one in roster.all(excluded)] == [one.name for one in ordered]
    for template in (None, *"tuvw"):
        having = [one.name for one in ordered if template in one.places][:KEPT]
        near = [one.name for one in ordered][:KEPT]
        found = [one.name for one in roster.fitting(replace(DEMAND, template=template), KEPT, excluded)]
        assert found == list(dict.fromkeys(near + having))
    for first, second in (("l", "m"), ("m", "n"), ("l", "z"), ("z", "n")):
        asked = replace(DEMAND, adapters=(NeededLora(second, 1), NeededLora(first, 2)))
        having = holding(ordered, members.values(), first, second)
        found = [one.name for one in roster.fitting(asked, KEPT, excluded)]
        assert found == list(dict.fromkeys(near + having))
    everyone = sorted(members.values(), key=lambda one: (held(one).work_ms, one.name))
    for count in (1, 3, 100):
        sampled = roster.sample(count)
        places = [everyone.index(one) for one, _ in sampled]
        assert places == sorted(places)
        assert sum(number for _, number in sampled) == pytest.approx(len(everyone))
        assert len(sampled) >= min(count, len(everyone))
    for demand in (DEMAND, replace(DEMAND, shapes=(SHAPE,) * 3), replace(DEMAND, alone=True)):
        assert roster.has_room(demand, excluded) is any(demand.fits(held(o).rows, CAPACITY) for o in able)


def test_a_sample_stands_in_the_middle_of_those_that_it_stands_for() -> None:
    roster = WorkerIndex(held)
    for number in range(15):
        roster.put(occupied(number, 0, set()))
    ordered = roster.least(15)
    assert roster.sample(3) == [(ordered[place], 5.0) for place in (2, 7, 12)]


def test_a_forecast_sums_up_the_workers_that_it_looks_at_and_no_others() -> None:
    summed: list[str] = []

    def noted(one: WorkerOccupancy) -> WorkerTotals:
        summed.append(one.name)
        return held(one)

    roster = WorkerIndex(noted)
    for turn in range(2):
        for number in range(40):
            roster.put(occupied(number, (number + turn) % 5, set()))
        if not turn:
            roster.least(1)
            summed.clear()
    looked_at = [one for one, _ in roster.sample(8)]
    assert sorted(summed) == sorted(one.name for one in looked_at)
    assert len(looked_at) == 8
    assert all(one.totals is not None and one.totals.rows == held(one).rows for one in looked_at)
    assert roster.least(40)[0].name in {f"d{number}" for number in range(40) if not (number + 1) % 5}
