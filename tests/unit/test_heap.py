"""Freed memory stays with a process that asks for it."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

TOUCHED = """
import resource, sys, threading
import numpy as np
from giornata.runtime import keep_freed

def touch():
    for turn in range(5):
        if turn == 1:
            faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
        np.ones(48 << 20, np.uint8)
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)

faults = []
if "keep" in sys.argv:
    assert keep_freed()
thread = threading.Thread(target=touch)
thread.start()
thread.join()
print(faults[1] - faults[0])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc's allocator")
def test_an_array_takes_the_pages_of_the_one_before() -> None:
    """In a thread other than the first, as an engine's."""

    def faults(*arguments: str) -> int:
        command = [sys.executable, "-c", TOUCHED, *arguments]
        environment = {"NUMPY_MADVISE_HUGEPAGE": "0"}
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        return int(done.stdout)

    assert 10 * faults("keep") < faults()
