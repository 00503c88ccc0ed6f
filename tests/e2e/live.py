"""A whole stack for tests: six services as processes, forked from what has imported them, and embedded servers.

A stack lives in an event loop of a thread of its own: it outlives the tests' loops.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self, TypeVar
from unittest import mock

from giornata.fleet import Fleet
from giornata.wire.subjects import NatsRole
from giornata.wire.workers import ServiceName
from giornata_tools.launcher import plan as commands
from giornata_tools.launcher.models import StackModel
from giornata_tools.launcher.plan import ONE_EACH, StackPlan, socket_folder
from giornata_tools.launcher.stack import Stack, running
from tests import forked_programs
from tests.fakes import paced_denoiser
from tests.patience import HUNG_S

ROOT = Path(__file__).parents[2]

NO_REPLICAS: Mapping[ServiceName, int] = MappingProxyType({})
NO_ENV: Mapping[str, str] = MappingProxyType({})
EnvOf = Mapping[ServiceName, Mapping[str, str]]
NO_ENV_OF: EnvOf = MappingProxyType({})

T = TypeVar("T")


class LiveStack:
    """A stack as tests use it: addresses, and processes by name. Methods may be awaited in any event loop."""

    def __init__(self, stack: Stack, loop: asyncio.AbstractEventLoop) -> None:
        self._stack = stack
        self._loop = loop

    @property
    def url(self) -> str:
        """REST address of the first living gateway."""
        return self._stack.url

    @property
    def nats_url(self) -> str:
        return self._stack.nats_url

    @property
    def urls(self) -> list[str]:
        """REST addresses of all gateways that listen, oldest first."""
        return self._stack.urls

    @property
    def observer_password_file(self) -> Path:
        """Password of the NATS user that hears telemetry."""
        return self.password_file(NatsRole.OBSERVER)

    def password_file(self, user: NatsRole) -> Path:
        """Password of a NATS user."""
        path = self._stack.nats_password_file(user)
        assert path is not None
        return path

    @property
    def blobs_url(self) -> str:
        return self._stack.blobs_url

    def instances(self, service: ServiceName) -> list[str]:
        """Names of the living processes, oldest first."""
        return self._stack.instances(service)

    def log(self, instance: str) -> str:
        """What an instance has logged so far."""
        return (self._stack.plan.logs / f"{instance}.log").read_text(encoding="utf-8")

    def pid(self, instance: str) -> int:
        """Id of an instance's process."""
        return self._stack.process(instance).pid

    async def start(self, service: ServiceName, n: int = 1, model: str | None = None) -> list[str]:
        """Start `n` more instances and wait until they are ready; their names.

        `model` names the one that they load, by default the first of the stack.
        """
        served = {one.name: one for one in self._stack.plan.models}
        names = await self._elsewhere(self._stack.start(service, n, served[model] if model else None))
        await self.wait_ready()
        return names

    async def kill(self, instance: str) -> None:
        """SIGKILL, as a crash; returns when it has ended."""
        await self._elsewhere(self._stack.kill(instance))

    async def crash(self, server: str) -> None:
        """SIGKILL to a server; the launcher starts it again, and this returns when it is up."""
        await self._elsewhere(self._crash(server))

    async def make_whole(self) -> None:
        """Start what is missing of the planned replicas and wait until all are ready."""
        for service, n in self._stack.plan.replicas.items():
            await self._elsewhere(self._stack.start(service, n - len(self.instances(service))))
        await self.wait_ready()

    async def _crash(self, server: str) -> None:
        stack = self._stack
        stack.keep_up = True
        await kill_server(stack, server)
        stack.keep_up = False

    async def terminate(self, instance: str) -> int:
        """SIGTERM; returns the exit status after the drain, 0 if it was orderly."""
        return await self._elsewhere(self._stack.terminate(instance))

    async def wait_ready(self) -> None:
        """Until every instance says *ready* and the gateway agrees."""
        await self._elsewhere(self._stack.wait_ready(HUNG_S))

    async def until(self, condition: Callable[[Fleet], bool], limit_s: float = HUNG_S) -> None:
        """Until telemetry says so, for instance that a worker has taken a second step; no polling."""
        await self._elsewhere(
            self._stack.watch.until(condition, limit_s, lambda fleet: f"seen: {fleet.all()}")
        )

    async def _elsewhere(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))


async def kill_server(stack: Stack, server: str) -> None:
    """SIGKILL to a server of a stack that keeps itself up; returns when its successor listens."""
    killed = stack.process(server)
    os.kill(killed.pid, signal.SIGKILL)
    await killed.ended.wait()
    await stack.watch.until(
        lambda _: server in stack.servers and stack.process(server) is not killed,
        HUNG_S,
        lambda _: "it is gone",
    )
    await stack.process(server).announced(HUNG_S)


@contextmanager
def live_stack(
    model: Path | Mapping[str, Path],
    replicas: Mapping[ServiceName, int] = NO_REPLICAS,
    env: Mapping[str, str] = NO_ENV,
    nats_servers: int = 1,
    env_of: EnvOf = NO_ENV_OF,
    blobs_url: str | None = None,
) -> Iterator[LiveStack]:
    """Start a stack of one of each service, or as many as `replicas` says; wait until it is ready; stop it.

    `model` is a checkpoint that requests may call ``tiny``, or several by their names; each has its own denoisers and
    preposts. `blobs_url` is another blob store than its own.

    Fails if a process did not end in order, or if NATS has refused a service something that it wanted.
    """
    named = model if isinstance(model, Mapping) else {"tiny": model}
    with tempfile.TemporaryDirectory(prefix="gio-", dir=socket_folder()) as state, Portal() as portal:
        plan = StackPlan(
            state=Path(state),
            logs=Path(state) / "logs",
            models=tuple(StackModel(str(folder), name) for name, folder in named.items()),
            ready_s=HUNG_S,
            replicas={**ONE_EACH, **replicas},
            nats_servers=nats_servers,
            blobs_url=blobs_url,
            env={"GIORNATA_LOG_LEVEL": "debug", **env},
            env_of=env_of,
        )
        stack = portal.enter(running(plan, spawn=forked_programs.spawn))
        try:
            portal.call(stack.bring_up())
            yield LiveStack(stack, portal.loop)
        finally:
            portal.leave()
            logs = {path.name: path.read_text(errors="replace") for path in plan.logs.glob("*.log")}
    refused = {name: log for name, log in logs.items() if "nats_refused" in log or "answer_refused" in log}
    assert refused == {}, "every service has the rights that it needs"
    assert stack.obituaries == [], f"not every process ended when and as it was told: {stack.obituaries}"


@contextmanager
def paced(file: Path, step_s: float | None = None) -> Iterator[EnvOf]:
    """While inside, stacks with the yielded environment start denoisers whose steps wait `step_s` and compute little.

    With None they compute, and decide by settled costs. In either case `file` lets steps wait: see :func:`slowly`.
    """
    env = {paced_denoiser.STEP_FILE: str(file), "PYTHONPATH": str(ROOT)}
    if step_s is not None:
        env[paced_denoiser.STEP_S] = str(step_s)
    with mock.patch.dict(commands.MODULES, {ServiceName.DENOISER: paced_denoiser.__name__}):
        yield {ServiceName.DENOISER: env}


@contextmanager
def slowly(file: Path, step_s: float) -> Iterator[None]:
    """While inside, steps of the denoisers that are :func:`paced` by `file` wait `step_s`."""
    new = file.with_suffix(".new")
    new.write_text(str(step_s), encoding="utf-8")
    new.replace(file)
    try:
        yield
    finally:
        file.unlink()


class Portal:
    """An event loop in a thread of its own, in which one task holds one context open."""

    def __enter__(self) -> Self:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="stack")
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` in the loop and wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def enter(self, context: AbstractAsyncContextManager[T]) -> T:
        """Enter `context` in a task that also leaves it, as task groups and time limits need."""
        entered: Future[T] = Future()
        self._left = asyncio.Event()

        async def hold() -> None:
            async with context as value:
                entered.set_result(value)
                await self._left.wait()

        def failed(holding: Future[None]) -> None:
            if not entered.done():
                entered.set_exception(holding.exception() or RuntimeError("the context was left at once"))

        self._holding = asyncio.run_coroutine_threadsafe(hold(), self.loop)
        self._holding.add_done_callback(failed)
        return entered.result()

    def leave(self) -> None:
        """Leave the context and wait until that is done."""
        self.loop.call_soon_threadsafe(self._left.set)
        self._holding.result()
