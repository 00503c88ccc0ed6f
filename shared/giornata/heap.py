"""What the C library does with memory that a step has freed."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping
from typing import Final

OPTIONS: Final[Mapping[int, int]] = {
    -8: 1,  # M_ARENA_MAX: threads share one heap; another thread's could not hold a large tensor
    -3: 1 << 30,  # M_MMAP_THRESHOLD: smaller allocations come from the heap, not from the kernel
    -1: (1 << 31) - 1,  # M_TRIM_THRESHOLD: so many free bytes at its end stay with the process
}
"""Values of the options of glibc's `mallopt`, by number; `malloc.h` has the names."""


def keep_freed() -> bool:
    """Keep freed memory for the next allocation; whether the C library can. For processes that compute on a processor.

    By default glibc gives every tensor above 32 MiB back to the kernel. The next one is then made of pages that the
    kernel clears at first touch, which takes a batch of UNet rows a tenth of its step. Before the first thread starts.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(option, value) for option, value in OPTIONS.items())
