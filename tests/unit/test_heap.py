"""Freed memory stays with a process that asks for it."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

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
