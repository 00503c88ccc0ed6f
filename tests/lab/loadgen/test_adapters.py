"""Which LoRAs requests ask for, crowds, and traces that tell adapters."""

from __future__ import annotations

import statistics
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata_lab.loadgen import traces
from giornata_lab.loadgen import workload as facts
from giornata_lab.loadgen.workload import (
    LATEST,
    AdapterSizes,
    AdapterWorkload,
    ArrivalBursts,
    MaskShape,
    Workload,
    crowded_times,
)

ONE = {1: 1.0}


@given(
    count=st.integers(1, 6),
    repetition=st.sampled_from([0.0, 0.5, 1.0]),
    drift_s=st.sampled_from([0.0, 3.0]),
    seed=st.integers(0, 1000),
)
def test_requests_ask_for_as_many_as_there_are_each_once(
    count: int, repetition: float, drift_s: float, seed: int
) -> None:
    workload = AdapterWorkload({0: 1.0, 2: 1.0, 3: 1.0}, count, 1.0, repetition, drift_s)
    times = [float(number) for number in range(30)]
    found = workload.draw(times, seed)
    assert found == workload.draw(times, seed)
    known = {workload.name(number) for number in range(count)}
    for names in found:
        assert len(names) in {0, min(2, count), min(3, count)}
        assert len(set(names)) == len(names)
        assert set(names) <= known


def test_popularity_is_zipfs_and_a_fifth_of_the_ranks_changes() -> None:
    steady = AdapterWorkload(ONE, 50, 1.0)
    used = Counter(name for (name,) in steady.draw([0.0] * 20_000, seed=1))
    total = sum(1 / rank for rank in range(1, 51))
    assert [used[f"lora{n}"] / 20_000 for n in (0, 1, 4)] == pytest.approx(
        [1 / total, 1 / 2 / total, 1 / 5 / total], abs=0.02
    )
    drifting = AdapterWorkload(ONE, 50, 1.0, drift_s=10.0)
    times = [5.0] * 20_000 + [15.0] * 20_000
    names = [name for (name,) in drifting.draw(times, seed=1)]
    before, after = Counter(names[:20_000]), Counter(names[20_000:])
    moved = sum(abs(before[name] - after[name]) > 0.25 * before[name] + 60 for name in before | after)
    assert 1 <= moved <= 10, "of 50"


def test_uses_repeat_the_latest() -> None:
    def repeated(repetition: float) -> float:
        drawn = AdapterWorkload(ONE, 5000, 0.0, repetition).draw([0.0] * 3000, seed=2)
        names = [name for (name,) in drawn]
        return statistics.fmean(
            names[place] in names[max(0, place - LATEST) : place] for place in range(1, len(names))
        )

    assert repeated(0.0) == pytest.approx(0.0, abs=0.01)
    assert repeated(0.6) == pytest.approx(0.6, abs=0.04)


def test_facts_are_gentd26s() -> None:
    numbers = facts.ADAPTERS["gentd26"]["loras"]
    with_loras = 1 - numbers[0]
    assert with_loras == pytest.approx(0.22, abs=0.005)
    assert [numbers[n] / with_loras for n in (1, 2, 3)] == pytest.approx([0.93, 0.05, 0.02], abs=0.005)
    assert (facts.LORAS, facts.LORA_ZIPF, facts.PEAK) == (874, 0.92, 79)


def test_sizes_lie_between_and_are_the_same_for_a_seed() -> None:
    sizes = AdapterSizes.between(5e6, 200e6)
    found = [sizes.of(f"lora{n}", 3) for n in range(2000)]
    assert found == [sizes.of(f"lora{n}", 3) for n in range(2000)]
    assert all(5e6 <= size <= 200e6 for size in found)
    assert statistics.median(found) == pytest.approx((5e6 * 200e6) ** 0.5, rel=0.1)
    assert {AdapterSizes().of(f"lora{n}", 0) for n in range(50)} == set(facts.LORA_BYTES)
    with pytest.raises(ValueError, match="received sizes from 9 to 3 bytes; accepted"):
        AdapterSizes.between(9, 3)


def test_crowds_keep_the_rate_and_are_denser() -> None:
    times = crowded_times(2.0, 200_000.0, 1, ArrivalBursts(5.0, 45.0, 900.0))
    assert len(times) == pytest.approx(400_000, rel=0.03)
    assert times == sorted(times)
    per_window = Counter(int(at_s // 15) for at_s in times)
    counts = [per_window[place] for place in range(int(200_000 / 15))]
    usual = statistics.median(counts)
    assert sum(count > 3 * usual for count in counts) / len(counts) == pytest.approx(45 / 945, abs=0.03)
    gaps = [b - a for a, b in pairwise(crowded_times(2.0, 20_000.0, 1, ArrivalBursts(1.0)))]
    assert statistics.stdev(gaps) / statistics.fmean(gaps) == pytest.approx(1.0, abs=0.05)
    with pytest.raises(ValueError, match="received"):
        crowded_times(1.0, 10.0, 0, ArrivalBursts(0.5))


def test_a_trace_tells_adapters_and_what_it_leaves_out_is_drawn() -> None:
    workload = Workload(
        (0.2, 0.2), None, ONE, {0: 1.0}, MaskShape.BLOB, AdapterWorkload(ONE, names=("drawn",))
    )
    text = "timestamp,adapters\n1,style-a lora_2.b\n2,a;b\n3,-\n4,\n"
    lines = traces.read_trace(text, ".csv")
    found = traces.complete(lines, workload, seed=0)
    assert [request.adapters for request in found] == [("style-a", "lora_2.b"), ("a", "b"), (), ("drawn",)]
    told = '{"timestamp": 1, "adapters": ["a", "b"]}\n{"timestamp": 2, "adapters": []}\n'
    assert [line.adapters for line in traces.read_trace(told, ".jsonl")] == [("a", "b"), ()]
    for suffix in traces.SUFFIXES:
        assert (
            traces.complete(traces.read_trace(traces.write(found, suffix), suffix), workload, seed=9) == found
        )


@pytest.mark.parametrize("cell", ["a b c d e", "a a", "a,b", "../up", "x" * 129])
def test_a_malformed_column_is_refused_with_what_it_is_and_what_it_may_be(cell: str) -> None:
    with pytest.raises(ValueError, match=r"line 3: adapters: .*received .*accepted are up to 4 names"):
        traces.read_trace(f'timestamp,adapters\n1,a\n2,"{cell}"\n', ".csv")


TIMED = "gmt_create,num_inference_steps,num_images_per_prompt\n2025-01-01 10:00:05,,4.0\n2025-01-01 10:00:00,25,\n"
ADAPTED = (
    "lora_args\n\"[{'modelVersionId': 'old'}]\"\n"
    "\"[{'modelVersionId': 'a', 'scale': 0.5}, {'modelVersionId': 'b'}]\"\n\"\"\n"
)


def test_gentd26s_last_lines_are_the_timed_ones() -> None:
    first, second = traces.read_gentd26(TIMED, ADAPTED)
    assert (first.timestamp, first.steps, first.n, first.adapters) == (0.0, 25, 1, ())
    assert (second.timestamp, second.steps, second.n, second.adapters) == (5.0, 30, 4, ("a", "b"))


@pytest.mark.parametrize(
    ("timed", "adapted", "told"),
    [
        (TIMED, "lora_args\n\n", "at least as many"),
        (TIMED, "other\n1\n2\n", "no column lora_args"),
        (TIMED.replace(",25,", ",many,"), ADAPTED, "line 3 of lora_request_trace.csv.*received"),
        (TIMED, ADAPTED.replace("'a'", "__import__('os')"), "line 3 of data_trace_processed.csv.*accepted"),
        (TIMED, ADAPTED.replace("modelVersionId': 'a'", "id': 'a'"), "line 3.*accepted"),
        (TIMED, ADAPTED.replace("'a'", "'" + "a" * 70_000 + "'"), "characters; accepted are 65536"),
    ],
)
def test_what_is_no_gentd26_is_refused(timed: str, adapted: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        traces.read_gentd26(timed, adapted)
