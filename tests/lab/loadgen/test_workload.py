"""What the load generator asks for, and when."""

from __future__ import annotations

import statistics
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata_lab.loadgen import traces, workload
from giornata_lab.loadgen.traces import drawn, replayed
from giornata_lab.loadgen.workload import (
    MaskShape,
    Workload,
    arrival_times,
    draw,
    zipf,
)

PRODUCTION = Workload(
    workload.MASK_RATIOS["production"],
    workload.STEPS,
    workload.IMAGES,
    zipf(4, workload.ZIPF),
    MaskShape.BLOB,
)
FIXED = Workload((0.2, 0.2), {8: 1.0}, {2: 1.0}, {0: 1.0}, MaskShape.SQUARE)


@given(rate=st.floats(0.1, 50), cv=st.sampled_from([0.0, 0.5, 1.0, 2.0, 4.0]), seed=st.integers(0, 2**32))
def test_arrivals_have_their_rate_and_their_variation(rate: float, cv: float, seed: int) -> None:
    expected = 4000
    times = arrival_times(rate, expected / rate, seed, cv)
    assert len(times) == pytest.approx(expected, abs=6 * cv * expected**0.5 + 2)
    assert times == sorted(times)
    assert 0 <= times[0] <= times[-1] < expected / rate
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(cv, rel=0.35, abs=1e-6)


@pytest.mark.parametrize(("rate", "cv"), [(0.0, 1.0), (-1.0, 1.0), (1.0, -0.1)])
def test_no_rate_and_no_variation_below_nothing(rate: float, cv: float) -> None:
    with pytest.raises(ValueError, match="received"):
        arrival_times(rate, 1.0, 0, cv)


@pytest.mark.parametrize("seed", range(3))
def test_few_requests_still_have_productions_masks_steps_and_pictures(seed: int) -> None:
    found = draw([float(number) for number in range(60)], PRODUCTION, seed)
    assert statistics.mean(request.mask_ratio for request in found) == pytest.approx(0.112, abs=0.004)
    assert Counter(request.steps for request in found)[30] == pytest.approx(60 * 0.906 / 0.978, abs=2)
    assert Counter(request.n for request in found)[1] == pytest.approx(60 * 0.578, abs=2)
    assert [request.at_s for request in found] == [float(number) for number in range(60)]
    assert len({request.seed for request in found}) == 60


def test_what_a_trace_does_not_tell_is_drawn_and_what_it_tells_is_kept() -> None:
    lines = traces.read_trace("timestamp,n,template\n2.5,3,\n1,,7\n", ".csv")
    first, second = traces.complete(lines, FIXED, seed=0)
    assert (first.at_s, first.n, first.template) == (1.0, 2, 7)
    assert (second.at_s, second.n, second.template) == (2.5, 3, 0)
    assert first.mask_ratio == second.mask_ratio == 0.2


@pytest.mark.parametrize(
    ("text", "suffix", "told"),
    [
        ("timestamp,ratio\n1,0.2\n", ".csv", "line 2: ratio: .* accepted are timestamp, mask_ratio"),
        ("timestamp\n1\n-1\n", ".csv", "line 3: timestamp: .*greater than or equal to 0"),
        ("timestamp\n1,2\n", ".csv", "line 2"),
        ("timestamp\n1763800000\n", ".csv", "line 2: timestamp: .*less than"),
        ('{"timestamp": 1}\n{"timestamp": 2, "mask_ratio": 1.5}\n', ".jsonl", "line 2: mask_ratio"),
        ('{"timestamp": 1\n', ".jsonl", "line 1: no JSON"),
        ("[]\n", ".jsonl", "line 1: the line"),
        ("mask_ratio\n0.1\n", ".csv", "line 2: timestamp: Field required"),
        ("timestamp\n", ".csv", "one request or more"),
    ],
)
def test_a_trace_says_which_line_is_wrong(text: str, suffix: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        traces.read_trace(text, suffix)


def test_every_rate_is_a_load_that_goes_on_after_the_warm_up() -> None:
    slow, fast = drawn((2.0, 20.0), FIXED, cv=1.0, seconds=100.0, warmup_s=50.0, seed=0)
    assert (slow.rate, slow.warmup_s, slow.seconds) == (2.0, 50.0, 100.0)
    assert len(slow.requests) == pytest.approx(300, rel=0.2)
    assert len(fast.requests) == pytest.approx(3000, rel=0.1)
    assert max(request.at_s for request in fast.requests) < 150


def test_a_load_without_a_measured_request_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no request of 0\.001 requests a second is due within 1 s"):
        drawn((0.001,), FIXED, cv=1.0, seconds=1.0, warmup_s=0.0, seed=0)
    lines = traces.read_trace("timestamp\n1\n", ".csv")
    with pytest.raises(ValueError, match="no request of the trace"):
        replayed(lines, FIXED, speed=1.0, warmup_s=2.0, seed=0)
    assert replayed(lines, FIXED, speed=1.0, warmup_s=0.5, seed=0).seconds == 1.0
