"""The fleet as telemetry tells it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata.fleet import SILENCE_S, Fleet, LastSeenTimes
from giornata.wire.errors import InvalidField, ModelNotFound
from giornata.wire.workers import ServiceName, ServiceState
from giornata_gateway.views.catalog import choose_card
from tests.fakes.fleet import CARD


def state(service: ServiceName, instance: str, **fields: object) -> ServiceState:
    base = ServiceState(
        service=service, instance=instance, host="h", version="0.1.0", ready=True, models=(CARD,)
    )
    return base.model_copy(update=fields)


def test_silence_is_death_and_is_told_once() -> None:
    fleet = Fleet()
    fleet.observe(state(ServiceName.DENOISER, "d1"), now=0)
    fleet.observe(state(ServiceName.DENOISER, "d2"), now=1)
    assert fleet.expire(SILENCE_S) == []
    assert [gone.instance for gone in fleet.expire(SILENCE_S + 0.5)] == ["d1"]
    assert fleet.expire(SILENCE_S + 0.5) == []
    assert fleet.get("d1") is None
    assert fleet.get("d2") is not None


def test_silence_counts_only_while_something_could_be_heard() -> None:
    heard = LastSeenTimes[str]()
    heard.hear("a", 0.0)
    heard.hear("b", 1.0)
    assert heard.silent(SILENCE_S) == []
    assert heard.silent(SILENCE_S + 0.5) == ["a"]
    heard.listen(5.0)
    assert heard.silent(5.0 + SILENCE_S) == []
    heard.hear("b", 6.0)
    assert heard.silent(5.1 + SILENCE_S) == ["a"]
    heard.forget("a")
    heard.forget("unknown")
    assert heard.silent(5.1 + SILENCE_S) == []


def test_only_ready_active_undrained_instances_take_work() -> None:
    fleet = Fleet()
    fleet.observe(state(ServiceName.ROUTER, "standby", active=False), 0)
    fleet.observe(state(ServiceName.DENOISER, "loading", ready=False), 0)
    fleet.observe(state(ServiceName.PREPOST, "leaving", draining=True), 0)
    wanted = (ServiceName.ROUTER, ServiceName.DENOISER, ServiceName.PREPOST)
    assert fleet.missing(wanted) == list(wanted)
    fleet.observe(state(ServiceName.ROUTER, "standby", active=True), 1)
    assert fleet.missing(wanted) == [ServiceName.DENOISER, ServiceName.PREPOST]


def test_a_model_is_served_only_where_both_halves_have_the_same_digest() -> None:
    fleet = Fleet()
    fleet.observe(state(ServiceName.DENOISER, "d1"), 0)
    assert fleet.cards() == {}
    fleet.observe(state(ServiceName.PREPOST, "p1", models=(CARD.model_copy(update={"digest": "other"}),)), 0)
    assert fleet.cards() == {}
    fleet.observe(state(ServiceName.PREPOST, "p2"), 0)
    assert fleet.cards() == {CARD.name: CARD}


def test_of_two_models_the_drained_one_is_not_served_and_the_other_goes_on() -> None:
    fleet, other = Fleet(), CARD.model_copy(update={"name": "other"})
    for card in (CARD, other):
        for service in (ServiceName.DENOISER, ServiceName.PREPOST):
            fleet.observe(state(service, f"{service}-{card.name}", models=(card,)), 0)
    with pytest.raises(InvalidField, match=f"other, {CARD.name}"):
        choose_card(fleet.cards(), None, ())
    drained = state(ServiceName.DENOISER, f"{ServiceName.DENOISER}-other", models=(other,), draining=True)
    fleet.observe(drained, 1)
    assert fleet.missing([ServiceName.DENOISER, ServiceName.PREPOST]) == []
    assert choose_card(fleet.cards(), None, ()) == choose_card(fleet.cards(), CARD.name, ()) == CARD
    with pytest.raises(ModelNotFound, match=f"Accepted: {CARD.name}"):
        choose_card(fleet.cards(), "other", ())


@given(
    st.lists(
        st.tuples(st.sampled_from(list(ServiceName)), st.integers(0, 9), st.booleans()),
        max_size=40,
    )
)
def test_all_are_in_order_however_they_come_and_go(moves: list[tuple[ServiceName, int, bool]]) -> None:
    fleet, live = Fleet(), dict[str, ServiceName]()
    for service, number, comes in moves:
        name = f"i{number}"
        if comes:
            fleet.observe(state(service, name), 0)
            live[name] = service
        else:
            fleet.forget(name)
            live.pop(name, None)
    assert [(s.service, s.instance) for s in fleet.all()] == sorted((s, name) for name, s in live.items())
