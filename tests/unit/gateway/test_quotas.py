"""What tenants may still do: pictures in progress and in a minute, each counted once, refused with an honest time."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata.wire.errors import ConcurrencyLimited, InvalidField, RateLimited
from giornata_gateway.admission import PicturesInProgress, Quotas
from giornata_gateway.rules.tenants import Tenant


class Clock:
    """Seconds, as the test says."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the gateway and of its buckets."""
    clock = Clock()
    monkeypatch.setattr("throttled.utils.now_mono_f", clock)
    return clock


def quotas_of(clock: Clock, refusals: list[tuple[str, str]] | None = None) -> Quotas:
    told = [] if refusals is None else refusals
    return Quotas(
        lambda pictures, at_a_time: 10 * pictures / at_a_time, lambda *refusal: told.append(refusal), clock
    )


def test_pictures_in_progress_are_counted_until_they_leave(clock: Clock) -> None:
    refusals: list[tuple[str, str]] = []
    quotas = quotas_of(clock, refusals)
    alice, bob = Tenant("alice", in_progress=4), Tenant("bob", in_progress=1)
    assert quotas.enter(alice, 3, "job_1", 60)
    with pytest.raises(ConcurrencyLimited, match="2 pictures while 3 are in progress") as caught:
        quotas.enter(alice, 2, "job_2", 60)
    assert caught.value.retry_after_s == pytest.approx(10 * 1 / 4)
    quotas.check(alice)
    assert quotas.enter(alice, 1, "job_3", 60)
    with pytest.raises(ConcurrencyLimited):
        quotas.check(alice)
    assert quotas.enter(bob, 1, "job_4", 60), "another tenant's pictures are not alice's"
    quotas.leave("job_1")
    quotas.leave("job_1")
    assert quotas.enter(alice, 3, "job_5", 60)
    assert refusals == [("alice", "concurrency_limit_exceeded")] * 2


def test_a_repeated_request_counts_once(clock: Clock) -> None:
    quotas = quotas_of(clock)
    alice = Tenant("alice", in_progress=1, per_minute=1)
    assert quotas.enter(alice, 1, "job_1", 60)
    assert not quotas.enter(alice, 1, "job_1", 60)


def test_a_job_whose_end_is_not_heard_counts_until_its_time_is_over(clock: Clock) -> None:
    quotas = quotas_of(clock)
    alice = Tenant("alice", in_progress=1)
    quotas.enter(alice, 1, "job_1", 60)
    clock.now_s += 59.9
    with pytest.raises(ConcurrencyLimited):
        quotas.check(alice)
    clock.now_s += 0.1
    assert quotas.enter(alice, 1, "job_2", 60)


def test_the_minute_says_to_the_moment_when_an_edit_fits_again(clock: Clock) -> None:
    refusals: list[tuple[str, str]] = []
    quotas = quotas_of(clock, refusals)
    alice = Tenant("alice", per_minute=6)
    for number in range(6):
        quotas.enter(alice, 1, f"job_{number}", 60)
    assert quotas.headers(alice) == {
        "RateLimit-Policy": '"pictures";q=6;w=60',
        "RateLimit": '"pictures";r=0;t=60',
    }
    with pytest.raises(RateLimited, match="6 pictures a minute, 0 of them now") as caught:
        quotas.enter(alice, 2, "job_6", 60)
    assert caught.value.retry_after_s == pytest.approx(20)
    with pytest.raises(RateLimited) as caught:
        quotas.check(alice)
    assert caught.value.retry_after_s == pytest.approx(10)
    clock.now_s += 19.9
    with pytest.raises(RateLimited):
        quotas.enter(alice, 2, "job_6", 60)
    quotas.check(alice)
    clock.now_s += 0.2
    assert quotas.enter(alice, 2, "job_6", 60)
    assert refusals == [("alice", "rate_limit_exceeded")] * 3


def test_who_is_refused_for_what_is_in_progress_has_spent_nothing(clock: Clock) -> None:
    quotas = quotas_of(clock)
    alice = Tenant("alice", in_progress=1, per_minute=2)
    quotas.enter(alice, 1, "job_1", 60)
    for _ in range(5):
        with pytest.raises(ConcurrencyLimited):
            quotas.enter(alice, 1, "job_2", 60)
    quotas.leave("job_1")
    assert quotas.enter(alice, 1, "job_2", 60)


@pytest.mark.parametrize("tenant", [Tenant("alice", in_progress=3), Tenant("alice", per_minute=3)])
def test_what_could_never_be_admitted_is_not_told_to_come_again(clock: Clock, tenant: Tenant) -> None:
    with pytest.raises(InvalidField, match="at most 3 pictures") as caught:
        quotas_of(clock).enter(tenant, 4, "job_1", 60)
    assert caught.value.field == "n"


def test_a_tenant_without_limits_is_told_none(clock: Clock) -> None:
    quotas = quotas_of(clock)
    for number in range(1000):
        quotas.enter(Tenant("alice"), 10, f"job_{number}", 60)
    assert quotas.headers(Tenant("alice")) == {}


def test_a_raised_limit_holds_at_once(clock: Clock) -> None:
    quotas = quotas_of(clock)
    quotas.enter(Tenant("alice", per_minute=1), 1, "job_1", 60)
    with pytest.raises(RateLimited):
        quotas.check(Tenant("alice", per_minute=1))
    quotas.check(Tenant("alice"))


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 4), st.floats(0, 30)), max_size=60))
def test_the_limit_holds_over_time(asked: list[tuple[str, int, float]]) -> None:
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("throttled.utils.now_mono_f", clock)
        quotas = quotas_of(clock)
        admitted = {"a": 0, "b": 0}
        for number, (name, pictures, pause_s) in enumerate(asked):
            clock.now_s += pause_s
            with contextlib.suppress(RateLimited):
                quotas.enter(Tenant(name, per_minute=6), pictures, f"job_{number}", 60)
                admitted[name] += pictures
        elapsed_s = clock.now_s - 1000
        assert max(admitted.values()) <= 6 + 6 * elapsed_s / 60 + 1e-6


@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.sampled_from("123"), st.integers(1, 9), st.floats(0, 5)),
        max_size=40,
    )
)
def test_the_sum_is_that_of_what_is_in_progress(events: list[tuple[str, str, int, float]]) -> None:
    counted, model = PicturesInProgress(), dict[str, tuple[str, int, float]]()
    now_s = 0.0
    for tenant, name, pictures, pause_s in events:
        now_s += pause_s
        model = {key: held for key, held in model.items() if held[2] > now_s}
        for each in "ab":
            assert counted.of(each, now_s) == sum(held[1] for held in model.values() if held[0] == each)
        assert all((key in counted) == (key in model) for key in "123")
        if name in model:
            counted.leave(name)
            del model[name]
        else:
            counted.enter(tenant, name, pictures, now_s + 6)
            model[name] = (tenant, pictures, now_s + 6)
