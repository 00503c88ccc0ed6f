"""What the machine has, as far as budgets follow it."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Final

HOST_SHARE: Final = 4
"""A denoiser's templates may fill one part in so many of the machine's memory by default."""


def memory_bytes() -> int:
    """Memory of the machine, or of the container if that has less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdecimal() else total


def usable_cores() -> tuple[int, ...]:
    """Numbers of the cores that this process may compute on."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def host_name() -> str:
    """Equal for processes that can share memory: by the kernel's boot id, which containers of one host have, too."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()
