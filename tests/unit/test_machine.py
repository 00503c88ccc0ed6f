"""What the machine has."""

from __future__ import annotations

import os
import threading

import pytest

from giornata.runtime import usable_cores


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system pins no threads")
def test_a_process_that_is_pinned_may_use_its_cores_alone() -> None:
    found: list[tuple[int, ...]] = []

    def pinned() -> None:
        os.sched_setaffinity(0, usable_cores()[-1:])
        found.append(usable_cores())

    every = usable_cores()
    thread = threading.Thread(target=pinned)
    thread.start()
    thread.join()
    assert found == [every[-1:]]
