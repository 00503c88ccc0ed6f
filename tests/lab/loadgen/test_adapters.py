"""Which LoRAs requests ask for, crowds, and traces that tell adapters."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata_lab.loadgen import traces
from giornata_lab.loadgen.workload import (
    AdapterWorkload,
    MaskShape,
    Workload,
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


@pytest.mark.parametrize("cell", ["a b c d e", "a a", "a,b", "../up", "x" * 129])
def test_a_malformed_column_is_refused_with_what_it_is_and_what_it_may_be(cell: str) -> None:
    with pytest.raises(ValueError, match=r"line 3: adapters: .*received .*accepted are up to 4 names"):
        traces.read_trace(f'timestamp,adapters\n1,a\n2,"{cell}"\n', ".csv")


ADAPTED = (
    "lora_args\n\"[{'modelVersionId': 'old'}]\"\n"
    "\"[{'modelVersionId': 'a', 'scale': 0.5}, {'modelVersionId': 'b'}]\"\n\"\"\n"
)
