"""The warden ends the launcher's children when the launcher itself is killed.

Every child leads a process group of its own, so that Ctrl-C reaches only the launcher, which drains. The
price is that nothing would end them if the launcher were killed. The warden does: a small process that is
told of every group over a pipe and, when the pipe closes with the launcher, kills the groups that are left.
Unlike ``PR_SET_PDEATHSIG`` this also ends children of children, runs nothing between fork and exec, and
works on every POSIX system.

This file is also the warden's own program, so it imports the standard library only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from typing import Self


class OrphanReaper:
    """The launcher's end of the pipe. A context; leaving it ends every group that it still watches."""

    def __enter__(self) -> Self:
        self._child = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            bufsize=0,
        )
        return self

    def __exit__(self, *_: object) -> None:
        if self._child.stdin:
            self._child.stdin.close()
        self._child.wait()

    def watch(self, group: int) -> None:
        """End `group` with the launcher from now on."""
        self._tell(f"+{group}\n")

    def forget(self, group: int) -> None:
        """`group` has ended; its number may be given to another process."""
        self._tell(f"-{group}\n")

    def _tell(self, line: str) -> None:
        if self._child.stdin:
            # Where the warden was killed, the launcher still ends its children.
            with contextlib.suppress(BrokenPipeError):
                self._child.stdin.write(line.encode())


def remaining(lines: Iterable[str]) -> set[int]:
    """Groups that were named with ``+`` and not with ``-`` afterwards."""
    groups: set[int] = set()
    for line in lines:
        change = groups.add if line.startswith("+") else groups.discard
        change(int(line[1:]))
    return groups


def signal_group(group: int, number: signal.Signals) -> None:
    """Send `number` to every process of `group`; do nothing where there is none."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS says EPERM of a group of zombies
        os.killpg(group, number)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for group in remaining(sys.stdin):
        signal_group(group, signal.SIGKILL)
