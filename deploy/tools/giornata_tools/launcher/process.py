"""One child process: a session of its own, a log file, and an end that is always noticed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Final

from giornata_tools.launcher.warden import OrphanReaper, signal_group

TAIL_LINES: Final = 15
DISK_FULL: Final = re.compile(r"\[ERR\].*(no space left on device|disk quota exceeded)", re.IGNORECASE)
"""How NATS logs that it could not store a message."""


class LaunchError(Exception):
    """A part of the stack did not start or did not stay up. The message is a sentence for people."""


@dataclass(frozen=True)
class LaunchCommand:
    """A program to start."""

    name: str
    """Unique per start; also the log file's name."""
    argv: tuple[str, ...]
    env: Mapping[str, str]
    """The whole environment."""
    announcement: re.Pattern[str] | None = None
    """A log line by which the program says that it is up; services say it by telemetry instead."""
    store: Path | None = None
    """Folder of a server that writes no more after its disk was full, until it is started again."""


SpawnChild = Callable[..., Awaitable[asyncio.subprocess.Process]]
"""Starts a program as :func:`asyncio.create_subprocess_exec` does."""


@asynccontextmanager
async def single_error() -> AsyncIterator[None]:
    """Raise the error of a group that holds one: a task group wraps even its body's own error in a group."""
    try:
        yield
    except BaseExceptionGroup as group:
        if len(group.exceptions) > 1:
            raise
        raise group.exceptions[0] from None


class StackProcess:
    """A running command. Make it with :meth:`start`; its owner must await :meth:`attend`."""

    def __init__(
        self, command: LaunchCommand, child: asyncio.subprocess.Process, log: Path, warden: OrphanReaper
    ) -> None:
        self.name: Final = command.name
        self.log: Final = log
        self.ended: Final = asyncio.Event()
        self.expected_end = False
        """It was asked to stop, or killed on purpose."""
        self._command = command
        self._child = child
        self._warden = warden
        self.store: Final = command.store
        self.stuck: Final[asyncio.Future[bool]] = asyncio.get_running_loop().create_future()
        """Whether its log has told of a full disk; known when it has, or when the process has ended."""
        self._announced: asyncio.Future[re.Match[str] | None] = asyncio.get_running_loop().create_future()

    @classmethod
    async def start(
        cls,
        command: LaunchCommand,
        logs: Path,
        warden: OrphanReaper,
        spawn: SpawnChild = asyncio.create_subprocess_exec,
    ) -> StackProcess:
        """Start `command`; its output goes to ``<logs>/<name>.log``.

        Raises:
            LaunchError: the program cannot be executed.
        """
        log = logs / f"{command.name}.log"
        with _opened(log) as output:
            try:
                child = await spawn(
                    *command.argv,
                    env=dict(command.env),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.PIPE if command.announcement else output,
                    stderr=asyncio.subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise LaunchError(f"{command.name} cannot be started: {error}.") from error
        warden.watch(child.pid)
        return cls(command, child, log, warden)

    @property
    def pid(self) -> int:
        """The number of the process and of its group."""
        return self._child.pid

    async def attend(self) -> None:
        """Keep the log until the process ends, then end what is left of its group."""
        try:
            if self._child.stdout and self._command.announcement:
                await self._copy_output(self._child.stdout, self._command.announcement)
            await self._child.wait()
        finally:
            signal_group(self.pid, signal.SIGKILL)
            self._warden.forget(self.pid)
            if not self._announced.done():
                self._announced.set_result(None)
            if not self.stuck.done():
                self.stuck.set_result(False)
            self.ended.set()

    async def announced(self, limit_s: float) -> re.Match[str]:
        """Wait for the announcement in its log.

        Raises:
            LaunchError: the process ended, or said nothing of the kind within `limit_s`.
        """
        try:
            async with asyncio.timeout(limit_s):
                found = await asyncio.shield(self._announced)
        except TimeoutError:
            raise LaunchError(f"{self.name} did not come up within {limit_s:g} s.\n{self.tail()}") from None
        if found is None:
            raise LaunchError(self.obituary())
        return found

    async def stop(self, limit_s: float) -> int:
        """Send SIGTERM, and SIGKILL to the whole group after `limit_s`; return the exit status."""
        self.expected_end = True
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(limit_s):
                await self.ended.wait()
        except TimeoutError:
            self.kill()
            await self.ended.wait()
        return self.status

    def kill(self) -> None:
        """Send SIGKILL to the whole group."""
        self.expected_end = True
        if not self.ended.is_set():
            signal_group(self.pid, signal.SIGKILL)

    async def crash(self, number: signal.Signals = signal.SIGKILL) -> int:
        """Send a signal as from outside, so that the end is not expected; return the exit status once it has ended."""
        self._signal(number)
        await self.ended.wait()
        return self.status

    @property
    def status(self) -> int:
        """Exit status of an ended process, -N for signal N."""
        return -signal.SIGKILL if self._child.returncode is None else self._child.returncode

    def ending(self) -> str:
        """Say in a sentence how it ended."""
        status = self.status
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return f"{self.name} {how}."

    def obituary(self) -> str:
        """Say how it ended, with the end of its log."""
        return f"{self.ending()} The end of {self.log}:\n{self.tail()}"

    def tail(self) -> str:
        """The last lines of its log, indented."""
        lines: deque[str] = deque(maxlen=TAIL_LINES)
        with contextlib.suppress(OSError), self.log.open(encoding="utf-8", errors="replace") as file:
            lines.extend(file)
        return "".join(f"    {line}" for line in lines).rstrip() or "    (empty)"

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    async def _copy_output(self, output: asyncio.StreamReader, announcement: re.Pattern[str]) -> None:
        with _opened(self.log) as file:
            while line := await output.readline():
                with contextlib.suppress(OSError):  # a full disk
                    file.write(line)
                text = line.decode(errors="replace")
                if not self._announced.done() and (found := announcement.search(text)):
                    self._announced.set_result(found)
                if not self.stuck.done() and DISK_FULL.search(text):
                    self.stuck.set_result(True)


def _opened(log: Path) -> FileIO:
    """The file of a log; the null device where a full disk takes no file."""
    try:
        return log.open("ab", buffering=0)
    except OSError:
        return Path(os.devnull).open("ab", buffering=0)
