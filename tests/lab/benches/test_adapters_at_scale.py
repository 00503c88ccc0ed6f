"""What the benchmarks of adapters at scale make of runs."""

from __future__ import annotations

import pytest

from giornata.wire.workers import Tier
from giornata_lab.bench.adapters_at_scale import VARIANTS, ScaleFigures, ScaleRequest, rows_of
from giornata_lab.bench.adapters_shift import CHANGE_S, SPAN_S, row_of
from giornata_lab.bench.systems.adapter_rooms import paper_jobs, room


def test_ratios_are_of_runs_with_the_same_jobs() -> None:
    def run(mean: float) -> ScaleFigures:
        return ScaleFigures(mean, 50.0, 0.3, 0.7, 0.9)

    rock, ours = rows_of("512 MB", "rock", {"rock": [run(20.0), run(10.0)], "ours": [run(10.0), run(9.0)]})
    assert (rock["mean ÷ base's"], ours["mean ÷ base's"]) == (1.0, pytest.approx(0.7))
    assert ours["range"] == "0.50-0.90"
    (alone,) = rows_of("512 MB", "rock", {"ours": [run(10.0)]})
    assert alone["mean ÷ base's"] == ""


def test_the_testbed_is_as_published() -> None:
    asked = ScaleRequest(rate=0.4, seconds=2400.0, speed=18.0, device_mb=512.0)
    machines, setting = asked.room().machines, asked.room().adapters
    assert len(machines) == 16
    assert [round(machine.speed / machines[0].speed, 2) for machine in machines[::4]] == [1, 0.55, 1, 0.55]
    assert setting.hop_s(Tier.MEMORY, 65e6) == pytest.approx(4.8, abs=0.02)
    assert setting.hop_s(None, 65e6) + setting.hop_s(Tier.MEMORY, 65e6) == pytest.approx(6.8, abs=0.02)
    jobs = asked.jobs(seed=1, joins_within=0.0)
    used = {lora for job in jobs for lora in job.demand.adapters}
    assert len({lora.digest for lora in used}) == len(used) <= 220
    assert all(5e6 <= lora.size_bytes <= 200e6 for lora in used)
    assert asked.rate == pytest.approx(len(jobs) / asked.seconds, rel=0.1)
    assert {"rrod", "lrums", "proactive", "rock", "ours", "free loads"} < VARIANTS.keys()
    assert not any("," in name for name in VARIANTS), "--only has commas between them"


def test_all_ranks_change_and_sizes_stay() -> None:
    before = paper_jobs(3, rate=0.6, seconds=2400.0, shift_s=CHANGE_S)
    sizes: dict[str, int] = {}
    counts: tuple[dict[str, int], dict[str, int]] = ({}, {})
    for job in before:
        for lora in job.demand.adapters:
            assert sizes.setdefault(lora.digest, lora.size_bytes) == lora.size_bytes
            side = counts[job.at_s >= CHANGE_S]
            side[lora.digest] = side.get(lora.digest, 0) + 1
    first, then = (max(side, key=side.__getitem__) for side in counts)
    assert first != then
    assert room(512e6).adapters.device_bytes == 512e6


def test_shares_come_back_when_two_spans_are_near() -> None:
    waits = [(CHANGE_S - 1 - n, n % 10 != 0) for n in range(100)]
    for span, ready in enumerate((2, 5, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9)):
        waits += [(CHANGE_S + span * SPAN_S + n, n < ready) for n in range(10)]
    row = row_of("ours", waits)
    assert row["before"] == 0.9
    assert row["after, by 30 s"].startswith("20 50 90 90")
    assert row["as before within, s"] == 3 * SPAN_S
