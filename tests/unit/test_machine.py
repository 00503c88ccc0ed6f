"""What the machine has, and freed memory, which stays with a process that asks for it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
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


# Freed memory stays with a process that asks for it.


TOUCHED = """
import resource, threading
import numpy as np
from giornata.runtime import keep_freed

def touch():
    for turn in range(5):
        if turn == 1:
            faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
        np.ones(48 << 20, np.uint8)
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)

def touched():
    faults.clear()
    thread = threading.Thread(target=touch)  # other than the first, as an engine's
    thread.start()
    thread.join()
    return faults[1] - faults[0]

faults = []
before = touched()
assert keep_freed()
print(before, touched())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc's allocator")
def test_an_array_takes_the_pages_of_the_one_before() -> None:
    environment = {"NUMPY_MADVISE_HUGEPAGE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", TOUCHED], capture_output=True, text=True, check=True, env=environment
    )
    before, kept = map(int, done.stdout.split())
    assert 10 * kept < before
