"""Ways to make what ControlNets add, as the benchmark of pictures compares them."""

from __future__ import annotations

from giornata_lab.bench.adapters_quality import EACH, SERVED, WAYS


def test_what_denoisers_do_is_among_the_ways() -> None:
    assert {EACH, SERVED} <= WAYS.keys()
