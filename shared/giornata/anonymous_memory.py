"""Memory without a name that processes of one machine share: it goes with the last process that has mapped it.

A descriptor of it travels over a Unix socket. Nothing stays behind of a process that is killed.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
from typing import Final

_SEALABLE: Final = hasattr(os, "memfd_create")
"""Whether the memory can be kept from shrinking under whoever has mapped it."""
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL if _SEALABLE else 0


def allocated(name: str, size_bytes: int) -> int:
    """A descriptor of new memory, the caller's to close; `name` is shown in the process's maps alone.

    Raises:
        OSError: there is not so much memory, as far as the platform can tell.
    """
    descriptor = _unnamed_file(name)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, size_bytes)
        else:
            os.ftruncate(descriptor, size_bytes)
        if _SEALABLE:
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def sealed(descriptor: int) -> bool:
    """Whether the memory cannot shrink, as far as the platform can tell; raises OSError for a closed descriptor."""
    return not _SEALABLE or fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS == _SEALS


def mapped(descriptor: int, size_bytes: int, *, touched: bool = True) -> mmap.mmap:
    """The memory in this process; where it is not `touched`, pages come as they are read. OSError if it cannot be."""
    flags = mmap.MAP_SHARED | (getattr(mmap, "MAP_POPULATE", 0) if touched else 0)
    return mmap.mmap(descriptor, size_bytes, flags)


def _unnamed_file(name: str) -> int:
    if _SEALABLE:
        return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    descriptor, path = tempfile.mkstemp()
    os.unlink(path)  # noqa: PTH108 - a descriptor, not a path, is what stays
    return descriptor
