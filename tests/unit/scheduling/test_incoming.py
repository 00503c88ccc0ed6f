"""When LoRAs that a worker was told to load arrive, and time that grows with an amount."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata.scheduling.adapters import (
    KEPT,
    LANES,
    OVERDUE,
    STAYING,
    TOLD_S,
    LoraLoadTimes,
    NeededLora,
    PendingAdapterLoads,
    UnitTime,
)
from giornata.wire.workers import Tier

MB = 1_000_000
ARRIVALS = LoraLoadTimes()
SIZES = st.lists(st.integers(1, 900), min_size=1, max_size=8)


def loras(megabytes: list[int]) -> list[NeededLora]:
    return [NeededLora(str(number), size * MB) for number, size in enumerate(megabytes)]


def seconds(lora: NeededLora) -> float:
    return ARRIVALS.ms(lora.size_bytes, None) / 1e3


@given(st.lists(SIZES, min_size=1, max_size=5), st.integers(1, 4), st.floats(0, 3))
def test_each_job_loads_in_the_lane_that_is_free_first_one_after_the_other(
    jobs: list[list[int]], lanes: int, passed_s: float
) -> None:
    incoming, free = PendingAdapterLoads(lanes), [0.0] * lanes
    for job, megabytes in enumerate(jobs):
        known = [lora._replace(digest=f"{job} {lora.digest}") for lora in loras(megabytes)]
        incoming.bring(known, {}, ARRIVALS, 0.0)
        free.sort()
        for lora in known:
            free[0] += seconds(lora)
            left_ms = incoming.left_ms(lora.digest, passed_s)
            assert left_ms == pytest.approx(max(0.0, free[0] - passed_s) * 1e3)
    assert incoming.queue_ms(passed_s) == pytest.approx(max(0.0, min(free) - passed_s) * 1e3)


@pytest.mark.parametrize("tier", list(Tier))
def test_what_is_on_the_device_or_on_its_way_is_not_loaded_again(tier: Tier) -> None:
    (lora,) = loras([100])
    incoming = PendingAdapterLoads(LANES)
    incoming.bring([lora], {lora.digest: tier}, ARRIVALS, 0.0)
    coming = incoming.left_ms(lora.digest, 0.0)
    if tier is Tier.DEVICE:
        assert coming is None
        return
    assert coming == pytest.approx(ARRIVALS.ms(lora.size_bytes, tier))
    incoming.bring([lora], {lora.digest: tier}, ARRIVALS, 0.0)
    assert incoming.left_ms(lora.digest, 0.0) == coming


@given(SIZES, st.floats(0, 1), st.integers(1, 3))
def test_loads_that_telemetry_tells_to_be_over_let_later_ones_begin(
    megabytes: list[int], share: float, lanes: int
) -> None:
    """The first one arrives sooner than expected: no later one is expected later than before."""
    told, known = PendingAdapterLoads(lanes), loras(megabytes)
    for lora in known:
        told.bring([lora], {}, ARRIVALS, 0.0)
    now = share * seconds(known[0])
    before = {lora.digest: told.left_ms(lora.digest, now) for lora in known}
    told.settle({known[0].digest: Tier.DEVICE}, now)
    assert told.left_ms(known[0].digest, now) is None
    for lora in known[1:]:
        left, earlier = told.left_ms(lora.digest, now), before[lora.digest]
        assert left is not None
        assert earlier is not None
        assert left <= earlier + 1e-6
    if len(known) < lanes + 1:
        assert told.queue_ms(now) == 0


def test_what_stays_in_memory_is_on_its_way_no_more() -> None:
    """The device has no room for it, as long as nobody waits for it."""
    (lora,) = loras([100])
    incoming = PendingAdapterLoads(LANES)
    incoming.bring([lora], {lora.digest: Tier.MEMORY}, ARRIVALS, 0.0)
    takes_s = ARRIVALS.ms(lora.size_bytes, Tier.MEMORY) / 1e3
    incoming.settle({lora.digest: Tier.MEMORY}, STAYING * takes_s * 0.99)
    assert incoming.left_ms(lora.digest, STAYING * takes_s) == 0
    incoming.settle({lora.digest: Tier.MEMORY}, STAYING * takes_s * 1.01)
    assert incoming.left_ms(lora.digest, STAYING * takes_s) is None


def test_a_load_that_takes_far_too_long_is_counted_no_more() -> None:
    (lora,) = loras([100])
    incoming = PendingAdapterLoads(LANES)
    incoming.bring([lora], {}, ARRIVALS, 0.0)
    late_s = OVERDUE * seconds(lora) + TOLD_S
    incoming.settle({}, late_s * 0.99)
    assert incoming.left_ms(lora.digest, late_s) == 0
    incoming.settle({}, late_s * 1.01)
    assert incoming.left_ms(lora.digest, late_s) is None


def test_a_copy_goes_its_own_way() -> None:
    one, other = loras([100, 200])
    incoming = PendingAdapterLoads(LANES)
    incoming.bring([one], {}, ARRIVALS, 0.0)
    copied = incoming.copy()
    copied.bring([other], {}, ARRIVALS, 0.0)
    assert incoming.left_ms(other.digest, 0.0) is None
    assert incoming.queue_ms(0.0) == 0 < copied.queue_ms(0.0)


AMOUNTS = st.floats(1, 1e6)
TIMES = st.floats(0.001, 1e6)


def test_nothing_is_known_before_anything_was_observed() -> None:
    assert UnitTime().ms(100) == 0.0


@given(st.lists(st.tuples(AMOUNTS, TIMES), min_size=1, max_size=20), AMOUNTS)
def test_a_rate_lies_between_those_observed_and_is_linear(
    seen: list[tuple[float, float]], asked: float
) -> None:
    rate = UnitTime()
    for amount, ms in seen:
        rate.observe(amount, ms)
    ratios = [ms / amount for amount, ms in seen]
    assert min(ratios) * (1 - 1e-9) <= rate.ms(asked) / asked <= max(ratios) * (1 + 1e-9)
    assert rate.ms(2 * asked) == pytest.approx(2 * rate.ms(asked))


def test_what_changed_is_known_soon() -> None:
    rate = UnitTime()
    for _ in range(100):
        rate.observe(10, 10)
    for _ in range(22):  # a tenth of what was known is left
        rate.observe(10, 100)
    assert KEPT**22 < 0.1
    assert rate.ms(1) > 9
