"""The stack: servers and services as processes of this machine; started, watched, restarted, drained."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final

import aiohttp

from giornata.bus import bus
from giornata.config import ENV_PREFIX, new_instance
from giornata.deadlines import retry_soon
from giornata.fleet import Fleet
from giornata.nats_users import password_file
from giornata.scratch import scratch_folder
from giornata.wire import subjects
from giornata.wire.errors import ServiceUnavailable
from giornata.wire.subjects import NatsRole
from giornata.wire.workers import ServiceName, ServiceState
from giornata_tools.launcher.models import StackModel
from giornata_tools.launcher.plan import (
    DRAIN_ORDER,
    LOADING,
    EmbeddedNats,
    GatewayPorts,
    StackPlan,
    check_port,
    empty,
    environment,
    has_room,
    locked,
    model_environment,
    nats_command,
    restart_delay_s,
    service_command,
    socket_folder,
    valkey_command,
)
from giornata_tools.launcher.process import LaunchCommand, LaunchError, SpawnChild, StackProcess, single_error
from giornata_tools.launcher.warden import OrphanReaper

# What telemetry says of the fleet, and a way to wait until it says something.


class TelemetryWatch:
    """The fleet as its telemetry draws it, while :meth:`listening`."""

    def __init__(self) -> None:
        self.fleet = Fleet()
        self._news = asyncio.Event()

    @asynccontextmanager
    async def listening(self, nats_url: str, password_file: Path | None) -> AsyncIterator[None]:
        """Hear all telemetry, as the user `observer`.

        `password_file` holds the observer's password; None where the address does, or none is asked for.

        Raises:
            ServiceUnavailable: no server answers.
            NotPermitted: the user that the address names may not hear it.
        """
        async with (
            bus.connect(
                nats_url, "launcher", user=NatsRole.OBSERVER, password_file=password_file
            ) as connected,
            connected.listen(subjects.ALL_TELEMETRY, ServiceState, self.hear),
        ):
            yield

    def hear(self, state: ServiceState) -> None:
        """Take in one telemetry message."""
        self.fleet.observe(state, time.monotonic())
        self.wake()

    def lose(self, instance: str) -> None:
        """Forget an instance whose process has ended."""
        self.fleet.forget(instance)
        self.wake()

    def wake(self) -> None:
        """Have every waiting task look again."""
        self._news.set()
        self._news = asyncio.Event()

    async def until(
        self, condition: Callable[[Fleet], bool], limit_s: float, unmet: Callable[[Fleet], str]
    ) -> None:
        """Wait until `condition` holds; it is asked again at every news, and may raise to end the waiting.

        `unmet` says in a sentence what is still missing.

        Raises:
            LaunchError: `condition` does not hold within `limit_s`.
        """
        try:
            async with asyncio.timeout(limit_s):
                while not condition(self._living()):
                    await self._news.wait()
        except TimeoutError:
            raise LaunchError(f"After {limit_s:g} s: {unmet(self._living())}") from None

    def _living(self) -> Fleet:
        self.fleet.expire(time.monotonic())
        return self.fleet


def missing(fleet: Fleet, expected: Mapping[str, ServiceName]) -> list[str]:
    """Instances of `expected` that are not *ready* (a standby router is), and services without one that takes work."""
    states = {name: fleet.get(name) for name in expected}
    waiting = [name for name, state in states.items() if state is None or not state.ready or state.draining]
    others = set(expected.values()) - {expected[name] for name in waiting}
    return waiting + [f"a {service} that takes work" for service in fleet.missing(sorted(others))]


async def answers_200(url: str, limit_s: float) -> None:
    """Ask until `url` answers 200: a gateway knows the fleet from the same telemetry as we, a moment later.

    Raises:
        LaunchError: it does not within `limit_s`.
    """
    try:
        async with aiohttp.ClientSession(raise_for_status=True) as session:

            async def ask() -> None:
                await session.get(url)

            await retry_soon(aiohttp.ClientError, limit_s)(ask)
    except aiohttp.ClientError as error:
        raise LaunchError(f"{url} does not answer 200 within {limit_s:g} s: {error}.") from error


# The stack: servers and services as processes of this machine; started, watched, restarted, drained.


SERVER_LIMIT_S: Final = 60.0
ROOM_S: Final = 1.0
GRACE_S: Final = 15.0
"""A process gets this long to exit beyond its own drain limit."""


class Stack:
    """A running stack. Make it with :func:`running`."""

    def __init__(
        self,
        plan: StackPlan,
        tasks: asyncio.TaskGroup,
        warden: OrphanReaper,
        say: Callable[[str], None],
        spawn: SpawnChild = asyncio.create_subprocess_exec,
    ) -> None:
        self.plan: Final = plan
        self.watch: Final = TelemetryWatch()
        self.nats_url = plan.nats_url or ""
        """Address of NATS, also for applications, which bring no password to embedded servers."""
        self._nats: EmbeddedNats | None = None
        self.blobs_url = plan.blobs_url or ""
        self.keep_up = False
        """Whether a process that ends unasked is started again, after growing delays."""
        self.obituaries: Final[list[str]] = []
        """Why each process ended that ended unasked and was not started again, or did not drain."""
        self._tasks = tasks
        self._warden = warden
        self._say = say
        self._start_child = spawn
        self._draining = asyncio.Event()
        self._processes: dict[str, StackProcess] = {}
        self._services: dict[str, ServiceName] = {}
        self._ports = GatewayPorts(plan.host, plan.port, plan.logs)

    @property
    def url(self) -> str:
        """REST address of the first living gateway.

        Raises:
            LaunchError: no gateway has been ready yet.
        """
        if not self.urls:
            raise LaunchError("No gateway of this stack is up.")
        return self.urls[0]

    @property
    def urls(self) -> list[str]:
        """REST addresses of the living gateways that have told theirs, oldest first."""
        return [url for url in map(self._ports.url, self.instances(ServiceName.GATEWAY)) if url]

    @property
    def servers(self) -> list[str]:
        """Names of the living processes of the embedded servers."""
        return [name for name in self._processes if name not in self._services]

    @property
    def names(self) -> list[str]:
        """Names of all living processes: of the servers and of every instance, oldest first."""
        return list(self._processes)

    def process(self, name: str) -> StackProcess:
        """The living process of an instance or a server."""
        return self._processes[name]

    def instances(self, service: ServiceName) -> list[str]:
        """Names of the living processes of `service`, oldest first."""
        return [name for name in self._processes if self._services.get(name) is service]

    async def start(self, service: ServiceName, n: int = 1, model: StackModel | None = None) -> list[str]:
        """Start `n` more instances of `service`; their names. Then see :meth:`wait_ready`.

        Denoisers and preposts load `model`, by default the plan's first.
        """
        make = partial(self._service_command, service, model)
        return [(await self._launch(make)).name for _ in range(n)]

    async def _start_for_each_model(self, service: ServiceName, n: int) -> None:
        for model in self.plan.models_of(service):
            await self.start(service, n, model)

    async def kill(self, instance: str) -> None:
        """Send SIGKILL to an instance and its children, as a crash; return when it has ended."""
        process = self._processes[instance]
        process.kill()
        await process.ended.wait()

    async def terminate(self, instance: str) -> int:
        """Send SIGTERM to an instance; return its exit status after the drain, -9 where it had to be killed."""
        return await self._processes[instance].stop(self.plan.drain_s + GRACE_S)

    async def bring_up(self) -> None:
        """Start the planned services, then :meth:`wait_ready`; routers come last.

        A router goes on at once with the jobs of an earlier run, and would give up those whose next stage has no
        service yet.
        """
        replicas = dict(self.plan.replicas)
        routers = replicas.pop(ServiceName.ROUTER, 0)
        for service, n in replicas.items():
            await self._start_for_each_model(service, n)
        await self._wait_for_telemetry(self.plan.ready_s)
        await self._start_for_each_model(ServiceName.ROUTER, routers)
        await self.wait_ready()

    async def wait_ready(self, limit_s: float | None = None) -> None:
        """Wait until every instance says *ready*, every service has one that takes work, and the gateway agrees.

        Raises:
            LaunchError: a process ended, or something is still missing after `limit_s` (default the plan's).
        """
        limit_s = self.plan.ready_s if limit_s is None else limit_s
        await self._wait_for_telemetry(limit_s)
        if self.instances(ServiceName.GATEWAY):
            await answers_200(f"{self.url}/readyz", limit_s)

    async def unchecked_loras(self, limit_s: float) -> int:
        """Wait until the LoRA stores have checked all that they know; how many they have not after `limit_s`."""

        def unchecked(fleet: Fleet) -> int:
            return max((state.loras.validating for state in fleet.all() if state.loras), default=0)

        with suppress(LaunchError):
            await self.watch.until(lambda fleet: unchecked(fleet) == 0, limit_s, str)
        return unchecked(self.watch.fleet)

    async def _wait_for_telemetry(self, limit_s: float) -> None:
        await self.watch.until(self._is_ready, limit_s, lambda fleet: f"not ready: {self.missing(fleet)}.")

    def _is_ready(self, fleet: Fleet) -> bool:
        if self.obituaries:
            raise LaunchError(self.obituaries[0])
        return not self.missing(fleet)

    def missing(self, fleet: Fleet) -> str:
        """Return what is not ready yet of what was started, with commas between; empty where all is."""
        return ", ".join(missing(fleet, self._services))

    async def _open_servers(self, socket: Path) -> None:
        if not self.nats_url:
            keys = {**os.environ, **self.plan.env}.get(f"{ENV_PREFIX}API_KEYS_FILE")
            nats = self._nats = EmbeddedNats(
                self.plan.state, self.plan.nats_servers, Path(keys) if keys else None
            )
            started = [
                await self._launch(partial(lambda name: nats_command(nats.servers[name], os.environ), name))
                for name in nats.servers
            ]
            for process in started:
                await process.announced(SERVER_LIMIT_S)
            self.nats_url = nats.url
        if not self.blobs_url:
            process = await self._launch(
                partial(valkey_command, self.plan.state / "valkey", socket, os.environ)
            )
            await process.announced(SERVER_LIMIT_S)
            self.blobs_url = f"unix://{socket}"

    def nats_password_file(self, user: NatsRole) -> Path | None:
        """Where the password of `user` lies; None for external servers, whose address may hold user and password."""
        return password_file(self._nats.users, user) if self._nats else None

    def _service_command(self, service: ServiceName, model: StackModel | None) -> LaunchCommand:
        instance = new_instance(service)
        flags = self._ports.flags(instance) if service is ServiceName.GATEWAY else ()
        self._services[instance] = service
        password = self.nats_password_file(NatsRole(service))
        env = environment(os.environ, self.plan, self.nats_url, self.blobs_url, password)
        loaded = model_environment(model or self.plan.models[0]) if service in LOADING else {}
        env |= {**loaded, **self.plan.env, **self.plan.env_of.get(service, {})}
        return service_command(service, instance, env, *flags)

    async def _launch(self, make: Callable[[], LaunchCommand]) -> StackProcess:
        process = await self._spawn(make)
        self._tasks.create_task(self._supervise(make, process), name=f"supervise {process.name}")
        return process

    async def _spawn(self, make: Callable[[], LaunchCommand]) -> StackProcess:
        process = await StackProcess.start(make(), self.plan.logs, self._warden, self._start_child)
        self._processes[process.name] = process
        if process.store:
            self._tasks.create_task(self._unstick(process, process.store), name=f"unstick {process.name}")
        return process

    async def _unstick(self, server: StackProcess, store: Path) -> None:
        """End a server whose disk was full as soon as there is room; then it is started again, and writes."""
        if not await server.stuck:
            return
        self._say(
            f"{server.name} cannot write: the disk of {store} is full. It is started again when there is room."
        )
        while not server.ended.is_set() and not has_room(store):  # noqa: ASYNC110 - no event tells of it
            await asyncio.sleep(ROOM_S)
        if self.keep_up and not server.expected_end:
            await server.crash(signal.SIGTERM)

    async def _supervise(self, make: Callable[[], LaunchCommand], process: StackProcess) -> None:
        """Await the end of a process; start its successor where that is wanted."""
        delay_s = 0.0
        while True:
            started_s = time.monotonic()
            await process.attend()
            del self._processes[process.name]
            self._services.pop(process.name, None)
            self._ports.vacate(process.name)
            self.watch.lose(process.name)
            if process.expected_end:
                return
            if not self.keep_up:
                self.obituaries.append(process.obituary())
                self.watch.wake()
                return
            delay_s = restart_delay_s(delay_s, time.monotonic() - started_s)
            self._say(f"{process.ending()} It is started again in {delay_s:g} s; see {process.log}.")
            with suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await self._draining.wait()
            if self._draining.is_set():
                return
            process = await self._spawn(make)

    async def _drain(self) -> None:
        """Stop the services in order; a service that does not end with status 0 gets an obituary."""
        self._draining.set()
        for tier in DRAIN_ORDER:
            names = [name for service in tier for name in self.instances(service)]
            await self._stop(names, self.plan.drain_s + GRACE_S)

    async def _stop(self, names: list[str], limit_s: float) -> None:
        processes = [self._processes[name] for name in names]
        statuses = await asyncio.gather(*(process.stop(limit_s) for process in processes))
        ended = zip(processes, statuses, strict=True)
        self.obituaries.extend(process.obituary() for process, status in ended if status != 0)

    def end_now(self) -> None:
        """Send SIGKILL to everything that is left, without waiting."""
        self._draining.set()
        for process in self._processes.values():
            process.kill()


@asynccontextmanager
async def running(
    plan: StackPlan,
    say: Callable[[str], None] = print,
    spawn: SpawnChild = asyncio.create_subprocess_exec,
) -> AsyncIterator[Stack]:
    """Start the servers, for :meth:`Stack.bring_up`; on leaving, drain and stop everything, also after an error.

    `say` is told a sentence when a process is started again; `spawn` starts programs.

    Raises:
        LaunchError: something cannot be started, or another stack uses the same state folder.
    """
    async with single_error(), AsyncExitStack() as undo:
        undo.enter_context(locked(plan.state))
        check_port(plan.host, plan.port)
        warden = undo.enter_context(OrphanReaper())
        tasks = await undo.enter_async_context(asyncio.TaskGroup())
        stack = Stack(plan, tasks, warden, say, spawn)
        empty(plan.logs)
        sockets = undo.enter_context(scratch_folder(socket_folder()))
        undo.callback(stack.end_now)
        undo.push_async_callback(lambda: stack._stop(stack.servers, SERVER_LIMIT_S))  # noqa: SLF001 - this function is the class's constructor
        await stack._open_servers(sockets / "valkey.sock")  # noqa: SLF001 - as above
        try:
            password = stack.nats_password_file(NatsRole.OBSERVER)
            await undo.enter_async_context(stack.watch.listening(stack.nats_url, password))
        except ServiceUnavailable as error:
            raise LaunchError(str(error)) from error
        undo.push_async_callback(stack._drain)  # noqa: SLF001 - as above
        yield stack
