"""Programs of tests that are forked from a process that has imported what they import: their starts cost little.

This file is also that process's own program: `python -m tests.forked_programs`. It computes nothing and has one thread;
each program gets a session, an environment and descriptors of its own. A run of pytest has one, which ends with it. Its
workers are forks of it (`tests/forked_worker.py`), and :mod:`tests.forked_processes` forks from it, too.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
import warnings
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from multiprocessing import forkserver, resource_tracker
from multiprocessing import spawn as spawning
from pathlib import Path
from typing import Any, Final, NamedTuple

from giornata_tools.checkout import TRAINED

ROOT: Final = Path(__file__).parents[1]
PRELOADED: Final = (
    "numpy", "scipy.ndimage", "PIL.JpegImagePlugin", "PIL.PngImagePlugin", "PIL.WebPImagePlugin", "throttled.store",
    "giornata_gateway.service", "giornata_router.service", "giornata_lora_store.service",
    "giornata_prepost.config", "giornata_prepost.service", "giornata_prepost.segmenters",
    "giornata_prepost.families.flow_transformers", "giornata_prepost.loras.normalisation",
    "giornata_denoiser.service", "giornata_denoiser.startup", "giornata_denoiser.families.flux",
    "giornata_denoiser.families.unet.network", "giornata_denoiser.profiling.ranks",
    "giornata_controlnet.service", "giornata_controlnet.config",
    "giornata_tools.cli.app", "tests.fakes.profiles",
    "diffusers.models.auto_model", "diffusers.models.autoencoders.autoencoder_kl", "hypothesis", "pytest",
    "tests.fakes.control_instance", "tests.fakes.forked_rank", "tests.fakes.tiny_driven",
    "giornata_lab.bench.compute.tiny_unet", "tests.integration.denoiser.parallel.members",
    "jsonschema", "matplotlib.pyplot", "openai", "sklearn",
)  # fmt: skip
"""Modules of the services, of the program `giornata`, of processes of tests, and what these or workers import later."""


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
DESCRIPTORS: Final = 64
PROCESS: Final = b"process"
"""The request for a process of :mod:`multiprocessing`, which gets its work by a pipe."""
ADDRESS: Final = "GIO_TEST_FORKS"
"""The variable that names the server of the run to its workers."""


class Program(NamedTuple):
    """What a fork runs, as ``python -m MODULE ARGUMENTS`` or ``python -c CODE`` does."""

    argv: tuple[str, ...]
    """The module and its arguments, or -c and the code."""
    env: Mapping[str, str]
    folder: str

    def run(self, *standard: int) -> None:
        """Run it as the main module of this process, with these three descriptors."""
        for number, each in enumerate(standard):
            os.dup2(each, number)
            os.close(each)
        os.environ.clear()
        os.environ.update(self.env)
        os.chdir(self.folder)
        sys.path[0] = self.folder
        sys.argv[:] = self.argv
        if "numpy" in sys.modules:
            sys.modules[
                "numpy"
            ].random.seed()  # alone of all generators it draws its seed when it is imported
        if self.argv[0] == "-c":
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            exec(self.argv[1], vars(main))  # noqa: S102 - as Python does
        else:
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
            told = await self._told.read(forkserver.SIGNED_STRUCT.size)
            self._writer.close()
            self.returncode = _number(told) if told else -signal.SIGKILL
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
    """A connection to the process, which its first user starts. What a user has forked ends with its connection."""

    def __init__(self, modules: Sequence[str] = (), *, address: str = "") -> None:
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        self.env: Final[Mapping[str, str]] = {
            **os.environ,
            **THREADS,
            "PYTHONPATH": path,
            "PYTHONUNBUFFERED": "1",
        }
        self.address: Final = address or f"giornata-{secrets.token_hex(8)}"
        self._process = None if address else self._started(modules)
        self._requests = connect(self.address)

    def _started(self, modules: Sequence[str]) -> subprocess.Popen[bytes]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(f"\0{self.address}")
            listener.listen()
            return subprocess.Popen(
                [sys.executable, "-m", __name__, str(listener.fileno()), *modules],
                cwd=ROOT,
                env=self.env,
                stdin=subprocess.PIPE,
                pass_fds=[listener.fileno()],
                start_new_session=True,
            )

    async def start(self, program: Program, stdin: int, stdout: int, stderr: int) -> ForkedProcess:
        """Fork a process that leads a session and runs `program`."""
        mine, theirs = socket.socketpair()
        with theirs:
            message = json.dumps([program.argv, dict(program.env), program.folder]).encode()
            self.ask(message, stdin, stdout, stderr, theirs.fileno())
        told, writer = await asyncio.open_connection(sock=mine)
        return ForkedProcess(_number(await told.readexactly(forkserver.SIGNED_STRUCT.size)), told, writer)

    def ask(self, message: bytes, *descriptors: int) -> None:
        """Ask for a fork; its number and how it ended are told through the last descriptor."""
        socket.send_fds(self._requests, [message], descriptors)

    def close(self) -> None:
        """End what is left of its forks, and the process where this has started it."""
        self._requests.close()
        if self._process:
            self._process.communicate()


def connect(address: str) -> socket.socket:
    """A connection to the server of this address, by which it is asked for forks."""
    requests = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    requests.connect(f"\0{address}")
    return requests


@functools.cache
def server() -> ForkServer:
    """The server of this run, started on first use where no controller has started it; see :func:`end`."""
    address = os.environ.get(ADDRESS, "")
    return ForkServer(address=address) if address else ForkServer(preloaded())


def end() -> None:
    """End this process's use of the server, if it has used it."""
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


@asynccontextmanager
async def program(module: str, *arguments: str, env: Mapping[str, str], log: Path) -> AsyncIterator[Any]:
    """``python -m MODULE ARGUMENTS``, which writes into `log`; it is killed at the end, if it is still there.

    `env` is added to this process's environment.
    """
    with log.open("wb") as out:
        given: dict[str, Any] = {"stdin": asyncio.subprocess.DEVNULL, "stderr": asyncio.subprocess.STDOUT}
        command = (sys.executable, "-m", module, *arguments)
        process = await spawn(
            *command, env={**os.environ, **env}, stdout=out, start_new_session=True, **given
        )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def _number(told: bytes) -> int:
    found: int = forkserver.SIGNED_STRUCT.unpack(told)[0]
    return found


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


class Fork(NamedTuple):
    """A fork that lives."""

    pid: int
    told: int
    """The descriptor where its end is told."""
    client: int
    """The descriptor of the connection that asked for it."""

    def end(self) -> None:
        """Kill it and what it has started."""
        for kill in (os.killpg, os.kill):  # one that has just been forked leads no group yet
            with contextlib.suppress(ProcessLookupError):
                kill(self.pid, signal.SIGKILL)


class ForkTable:
    """The forks that live, and whom their ends are told."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._clients: dict[int, socket.socket] = {}
        self._forks: dict[int, Fork] = {}
        """By descriptor of the process."""

    def serve(self) -> Callable[[], object] | None:
        """Fork what clients ask for, and tell of each end. Returns what a fork is to run; in the server, None.

        The server ends with its standard input, and a client's forks with its connection.
        """
        poll = select.poll()
        for each in (sys.stdin, self._listener):
            poll.register(each, select.POLLIN)
        while True:
            for descriptor, _ in poll.poll():
                if descriptor == sys.stdin.fileno():
                    return None
                if descriptor in self._forks:
                    poll.unregister(descriptor)
                    self._tell_end(descriptor)
                elif descriptor == self._listener.fileno():
                    client, _ = self._listener.accept()
                    self._clients[client.fileno()] = client
                    poll.register(client, select.POLLIN)
                else:
                    message, passed, _, _ = socket.recv_fds(
                        self._clients[descriptor], REQUEST_BYTES, DESCRIPTORS
                    )
                    if not message:
                        poll.unregister(descriptor)
                        self._part(descriptor)
                        continue
                    *given, told = passed
                    pid = os.fork()
                    if pid == 0:
                        self._become(told)
                        run = run_process if message == PROCESS else Program(*json.loads(message)).run
                        return functools.partial(run, *given)
                    poll.register(self._keep(pid, told, descriptor), select.POLLIN)
                    for each in given:
                        os.close(each)

    def _keep(self, pid: int, told: int, client: int) -> int:
        """Have the end of a fork told; its descriptor."""
        with contextlib.suppress(OSError):  # nobody waits
            forkserver.write_signed(told, pid)
        descriptor = os.pidfd_open(pid)
        self._forks[descriptor] = Fork(pid, told, client)
        return descriptor

    def _tell_end(self, descriptor: int) -> None:
        fork = self._forks.pop(descriptor)
        os.close(descriptor)
        _, status = os.waitpid(fork.pid, 0)
        with contextlib.suppress(OSError):
            forkserver.write_signed(fork.told, os.waitstatus_to_exitcode(status))
        os.close(fork.told)

    def _part(self, client: int) -> None:
        """End what a client that has left has forked."""
        self._clients.pop(client).close()
        for descriptor, fork in self._forks.items():
            if fork.client == client:
                fork.end()
                self._forks[descriptor] = fork._replace(client=-1)

    def _become(self, told: int) -> None:
        """Be a fork: a session, and nothing of the server's."""
        os.setsid()
        for each in (told, *self._forks, *(fork.told for fork in self._forks.values())):
            os.close(each)
        for connection in (self._listener, *self._clients.values()):
            connection.close()

    def end_all(self) -> None:
        """Kill what is left of the forks and of what they have started."""
        for fork in self._forks.values():
            fork.end()


def run_process(reader: int, tracker: int, *inherited: int) -> None:
    """Be a process of :mod:`multiprocessing`, as a fork of its own server is; what it runs comes through `reader`."""
    resource_tracker._resource_tracker._fd = tracker  # type: ignore[attr-defined]
    forkserver._forkserver._inherited_fds = list(inherited)  # type: ignore[attr-defined]
    code = 1
    try:
        code = spawning._main(reader, os.dup(reader))
    except BaseException:  # noqa: BLE001 - a process's edge
        traceback.print_exc()
    finally:
        os._exit(code)


def preload(names: Sequence[str]) -> None:
    """Import what forks would import."""
    sys.modules["opentelemetry"] = None  # type: ignore[assignment]  # as giornata.tracing.switch_off has it
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"  # its remarks on torchvision concern no test
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # of what libraries say of themselves, a test hears where it concerns one
        for name in names:
            module, _, part = name.partition(":")
            imported = importlib.import_module(module)
            if part:
                getattr(imported, part)
    del sys.modules["opentelemetry"], os.environ["TRANSFORMERS_VERBOSITY"]
    gc.collect()
    gc.freeze()
    threads = os.listdir("/proc/self/task")  # noqa: PTH208 - names, not paths
    assert len(threads) == 1, "a fork would lack the threads that an import has started"


def run_and_end(run: Callable[[], object]) -> None:
    """Run it and end as Python does, but leave to the system what was imported.

    Python takes thousands of modules apart one by one, and a fork would have to copy their memory first. What ends by
    another error than SystemExit, or cannot write its last words, ends as Python does to the last.
    """
    code = 0
    try:
        run()
    except SystemExit as ended:
        if isinstance(ended.code, str):
            raise
        code = ended.code or 0
    threading._shutdown()  # type: ignore[attr-defined]  # which waits for threads
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        sys.exit(code)
    os._exit(code & 0xFF)


if __name__ == "__main__":
    preload(sys.argv[2:])
    forks = ForkTable(socket.socket(fileno=int(sys.argv[1])))
    run_and_end(forks.serve() or forks.end_all)
