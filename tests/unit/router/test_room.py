"""The door of the records' bucket, and how the file store is divided."""

from __future__ import annotations

from pathlib import Path

import pytest

from giornata.wire import stores
from giornata.wire.workers import StoreRoom
from giornata_router.admission import GROWTH_BYTES, may_come
from giornata_tools.launcher.servers import MAX_FILE_STORE

DEPLOY = Path(__file__).parents[3] / "deploy"
LIMIT = 1000 * GROWTH_BYTES


@pytest.mark.parametrize(
    ("used", "unfinished", "comes"),
    [(0, 0, True), (0, 899, True), (0, 900, False), (800, 99, True), (800, 100, False), (1000, 0, False)],
)
def test_a_job_comes_while_all_before_it_can_write_their_ends(
    used: int, unfinished: int, comes: bool
) -> None:
    room = StoreRoom(store="s", used_bytes=used * GROWTH_BYTES, limit_bytes=LIMIT)
    assert may_come(room, unfinished) is comes


@pytest.mark.parametrize("store_bytes", [stores.LEAST_STORE_BYTES, stores.STORE_BYTES])
def test_every_stream_has_a_share_of_the_file_store_and_all_fit(store_bytes: int) -> None:
    limits = stores.limits(store_bytes)
    assert set(limits) == {stores.JOBS, *stores.STREAMS}
    in_memory = limits.pop(stores.EVENTS)
    assert min(limits.values()) > 0
    free = (store_bytes - stores.LEASE_BYTES) // 32  # what earlier versions have left there
    assert store_bytes - free - 16 <= sum(limits.values()) <= store_bytes - free
    assert in_memory <= 512 << 20


def test_the_default_fits_every_server_that_we_configure() -> None:
    told = [DEPLOY / "nats.conf", DEPLOY / "nats-cluster.conf"]
    sizes = [
        line.split()[1]
        for file in told
        for line in file.read_text().splitlines()
        if "max_file_store:" in line
    ]
    assert sizes
    assert {*sizes, MAX_FILE_STORE} == {"8GB"}
    assert stores.STORE_BYTES < 8 << 30
