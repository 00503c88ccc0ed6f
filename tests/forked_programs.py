"""Programs of tests that are forked from a process that has imported what they import: their starts cost little.

This file is also that process's own program: `python -m tests.forked_programs`. It computes nothing and has one thread;
each fork gets a session, an environment and descriptors of its own. A worker of pytest has one, which ends with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple

from giornata_tools.checkout import TRAINED

ROOT: Final = Path(__file__).parents[1]
PRELOADED: Final = (
    "numpy", "scipy.ndimage", "PIL.JpegImagePlugin", "PIL.PngImagePlugin", "PIL.WebPImagePlugin", "throttled.store",
    "giornata_gateway.service", "giornata_router.service", "giornata_lora_store.service",
    "giornata_prepost.config", "giornata_prepost.service", "giornata_prepost.segmenters",
    "giornata_prepost.families.flux", "giornata_prepost.loras.normalisation",
    "giornata_denoiser.service", "giornata_denoiser.engine.rehearsal", "giornata_denoiser.families.flux",
    "giornata_controlnet.service", "giornata_controlnet.config",
    "giornata_tools.cli.app", "tests.fakes.profiles",
)  # fmt: skip
"""Modules of the services, of the program `giornata`, and some that these import later."""


def preloaded() -> Sequence[str]:
    """Names of modules, and MODULE:CLASS of the parts of a checkpoint, which libraries import when they are named."""
    index = json.loads((TRAINED / "model_index.json").read_text(encoding="utf-8"))
    return (*PRELOADED, *(":".join(part) for part in index.values() if isinstance(part, list)))


READ_EARLY: Final = (
    "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "TRITON_INTERPRET", "LD_PRELOAD", "PYTHONHASHSEED", "CUDA_VISIBLE_DEVICES",
)  # fmt: skip
"""Variables that are read at the start of Python or when a module is imported: a program with others starts truly."""
THREADS: Final = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
REQUEST_BYTES: Final = 1 << 17


class Program(NamedTuple):
    """What a fork runs, as ``python -m MODULE ARGUMENTS`` does."""

    argv: tuple[str, ...]
    """The module and its arguments."""
    env: Mapping[str, str]
    folder: str

    def run(self) -> None:
        """Run it as the main module of this process."""
        os.environ.clear()
        os.environ.update(self.env)
        os.chdir(self.folder)
        sys.path[0] = self.folder
        sys.argv[:] = self.argv
        if "numpy" in sys.modules:
            sys.modules[
                "numpy"
            ].random.seed()  # alone of all generators it draws its seed when it is imported
        runpy.run_module(self.argv[0], run_name="__main__", alter_sys=True)


class ForkedProcess:
    """A program that runs; it has what tests and the launcher use of :class:`asyncio.subprocess.Process`."""

    stdout: asyncio.StreamReader | None = None

    def __init__(self, pid: int, told: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._told, self._writer = told, writer

    async def wait(self) -> int:
        """Its exit status, -N for signal N. One task waits at a time."""
        if self.returncode is None:
            line = await self._told.readline()
            self._writer.close()
            self.returncode = int(line) if line else -signal.SIGKILL
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it is known to have ended."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """The process, as its worker uses it."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._requests, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        env = {**os.environ, **THREADS, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
        with there:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(there.fileno()), *modules],
                cwd=ROOT,
                env=env,
                stdin=subprocess.DEVNULL,
                pass_fds=[there.fileno()],
                start_new_session=True,
            )
        self.env: Final[Mapping[str, str]] = env

    async def start(self, program: Program, stdin: int, stdout: int, stderr: int) -> ForkedProcess:
        """Fork a process that leads a session and runs `program`."""
        mine, theirs = socket.socketpair()
        with theirs:
            message = json.dumps([program.argv, dict(program.env), program.folder]).encode()
            socket.send_fds(self._requests, [message], [stdin, stdout, stderr, theirs.fileno()])
        told, writer = await asyncio.open_connection(sock=mine)
        line = await told.readline()
        assert line, "the server of forks has ended"
        return ForkedProcess(int(line), told, writer)

    def close(self) -> None:
        """End it, and what is left of its forks."""
        self._requests.close()
        self._process.wait()


@functools.cache
def server() -> ForkServer:
    """The worker's own, started on first use; see :func:`end`."""
    return ForkServer(preloaded())


def end() -> None:
    """End the worker's own, if there is one."""
    if server.cache_info().currsize:
        server().close()
        server.cache_clear()


async def spawn(
    *argv: str,
    env: Mapping[str, str],
    stdin: int,
    stdout: Any,
    stderr: int,
    start_new_session: bool,
    cwd: str | Path | None = None,
) -> Any:
    """Start a program as :func:`asyncio.create_subprocess_exec` does; fork it where it is a module of this Python.

    A program that writes into a pipe of asyncio's, or whose interpreter would begin otherwise, is started truly.
    """
    if argv[:2] != (sys.executable, "-m") or stdout == asyncio.subprocess.PIPE or not _alike(env):
        return await asyncio.create_subprocess_exec(
            *argv,
            env=env,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            cwd=cwd,
            start_new_session=start_new_session,
        )
    with ExitStack() as opened:
        nothing = opened.enter_context(open(os.devnull, "r+b"))  # noqa: ASYNC230, PTH123 - no file that anybody waits for
        given = nothing.fileno() if stdin == asyncio.subprocess.DEVNULL else stdin
        out = stdout if isinstance(stdout, int) else stdout.fileno()
        errors = out if stderr == asyncio.subprocess.STDOUT else stderr
        program = Program(argv[2:], env, str(cwd or Path.cwd()))
        return await server().start(program, given, out, errors)


class EndedProgram(NamedTuple):
    """What a program has left."""

    status: int
    out: bytes
    err: str


async def run(
    *argv: str, env: Mapping[str, str], stdin: bytes = b"", cwd: str | Path | None = None
) -> EndedProgram:
    """Start a program as :func:`spawn` does, give it `stdin` and wait for its end."""
    with ExitStack() as opened:
        given, out, err = (opened.enter_context(tempfile.TemporaryFile()) for _ in range(3))
        given.write(stdin)
        given.seek(0)
        files = {"stdin": given.fileno(), "stdout": out.fileno(), "stderr": err.fileno()}
        process = await spawn(*argv, env=env, cwd=cwd, start_new_session=True, **files)
        status: int = await process.wait()
        for each in (out, err):
            each.seek(0)
        return EndedProgram(status, out.read(), err.read().decode())


def _alike(env: Mapping[str, str]) -> bool:
    """Whether Python and what is preloaded begin with `env` as they have begun in the server."""
    return all(env.get(name) == server().env.get(name) for name in READ_EARLY)


# What follows runs in the server's own process.


class ForkTable:
    """The forks that live, and whom their ends are told."""

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._forks: dict[int, tuple[int, socket.socket]] = {}
        """By descriptor of the process: its number, and where its end is told."""

    def serve(self) -> Program | None:
        """Fork what is asked for, and tell of each end. Returns what a fork is to run; in the server, None."""
        poll = select.poll()
        poll.register(self._requests, select.POLLIN)
        while True:
            for descriptor, _ in poll.poll():
                if descriptor in self._forks:
                    poll.unregister(descriptor)
                    self._tell_end(descriptor)
                    continue
                message, passed, _, _ = socket.recv_fds(self._requests, REQUEST_BYTES, 4)
                if not message:
                    return None
                *standard, told = passed
                pid = os.fork()
                if pid == 0:
                    self._become(standard, told)
                    return Program(*json.loads(message))
                poll.register(self._keep(pid, socket.socket(fileno=told)), select.POLLIN)
                for each in standard:
                    os.close(each)

    def _keep(self, pid: int, told: socket.socket) -> int:
        """Have the end of a fork told; its descriptor."""
        told.send(f"{pid}\n".encode())
        descriptor = os.pidfd_open(pid)
        self._forks[descriptor] = (pid, told)
        return descriptor

    def _tell_end(self, descriptor: int) -> None:
        pid, told = self._forks.pop(descriptor)
        os.close(descriptor)
        _, status = os.waitpid(pid, 0)
        with told, contextlib.suppress(OSError):  # nobody waits
            told.send(f"{os.waitstatus_to_exitcode(status)}\n".encode())

    def _become(self, standard: list[int], told: int) -> None:
        """Be a fork: a session, three descriptors, and nothing of the server's."""
        os.setsid()
        for number, each in enumerate(standard):
            os.dup2(each, number)
        for each in (*standard, told, *self._forks):
            os.close(each)
        for _, end in self._forks.values():
            end.close()
        self._requests.close()

    def end_all(self) -> None:
        """Kill what is left of the forks and of what they have started."""
        for pid, _ in self._forks.values():
            for kill in (os.killpg, os.kill):  # one that was just forked leads no group yet
                with contextlib.suppress(ProcessLookupError):
                    kill(pid, signal.SIGKILL)


def preload(names: Sequence[str]) -> None:
    """Import what forks would import."""
    sys.modules["opentelemetry"] = None  # type: ignore[assignment]  # as giornata.observability.tracing.switch_off has it
    for name in names:
        module, _, part = name.partition(":")
        imported = importlib.import_module(module)
        if part:
            getattr(imported, part)
    del sys.modules["opentelemetry"]
    gc.collect()
    gc.freeze()
    threads = os.listdir("/proc/self/task")  # noqa: PTH208 - names, not paths
    assert len(threads) == 1, "a fork would lack the threads that an import has started"


if __name__ == "__main__":
    preload(sys.argv[2:])
    forks = ForkTable(socket.socket(fileno=int(sys.argv[1])))
    asked = forks.serve()
    if asked is None:
        forks.end_all()
    else:
        asked.run()
