"""The ranks of a pool as their leader starts, watches and ends them."""

from __future__ import annotations

import os
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final

import structlog
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch exports no type

from giornata.config import ENV_PREFIX
from giornata.gpus import VISIBLE, visible_alone
from giornata.planning.cost_model import Profile
from giornata.scheduling.degrees.pool import Devices, device_subsets
from giornata.wire.errors import Failed, from_body
from giornata.wire.workers import RankPhase, RankState
from giornata_denoiser.checkpoint import Checkpoint, open_outline
from giornata_denoiser.choices import check_present
from giornata_denoiser.config import DenoiserConfig
from giornata_denoiser.parallel import is_possible
from giornata_denoiser.pool.messages import Ping, RankReady, RankRefused, RankSetup, Stop, connect, unpack
from giornata_denoiser.pool.state import RankKnowledge, RankMessage, parcel


@dataclass(frozen=True)
class RankTimeouts:
    """Limits in seconds; a step's are counted from its beginning."""

    late: tuple[float, float] = (3.0, 1.0)
    """A step that takes so many times as long as predicted and so much more has its ranks asked whether they run."""
    ping_s: float = 3.0
    """A rank that does not answer within so long is stalled: it is killed."""
    hung: tuple[float, float] = (30.0, 60.0)
    """A step that takes so many times as long and so much more never ends: its ranks are killed, answer or not."""
    load_s: float = 1800.0
    """A rank that has not loaded its model by then is killed."""
    again_s: tuple[float, ...] = (0.0, 1.0, 5.0, 15.0, 30.0)
    """How long after its end a rank is started again, by how often it has ended without a step since; beyond, it is
    given up."""

    def late_s(self, seconds: float) -> float:
        """After how long a step that was predicted to take `seconds` is late."""
        return self.late[0] * seconds + self.late[1]

    def hung_s(self, seconds: float) -> float:
        """Likewise."""
        return self.hung[0] * seconds + self.hung[1]


class LocalRankProcess:
    """A rank that has been started; the thread that does so outlives it.

    Nothing of the service's configuration is in its arguments or environment. On a GPU, `visible` is the one that CUDA
    shows it (:func:`giornata.gpus.visible_alone`).
    """

    def __init__(self, opening: RankSetup, visible: str | None = None) -> None:
        here, there = socket.socketpair()
        self.channel = connect(here)
        environment = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
        if visible is not None:
            environment[VISIBLE] = visible
        descriptor = there.fileno()
        with there:
            self._process = subprocess.Popen(  # noqa: S603 - this program, with a number
                [sys.executable, "-m", "giornata_denoiser.pool.rank", str(descriptor)],
                pass_fds=[descriptor],
                stdin=subprocess.DEVNULL,
                env=environment,
            )
        with suppress(OSError):  # it has died already: its channel tells
            self.channel.send(parcel(opening).frame)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def kill(self) -> None:
        """End it at once; what it was computing is lost."""
        self._process.kill()
        self._process.wait()
        self.channel.close()

    def join(self, within_s: float) -> None:
        """Wait for its end, which it has been told; kill it where it takes longer."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(within_s)
        self.kill()


JOIN_S = 10.0
"""How long a rank may take to end when it has been told to, beyond the step that it computes."""

log = structlog.get_logger(__name__)


@dataclass(eq=False)
class RankHandle:
    """A device of the pool and its rank."""

    device: str
    me: int
    process: LocalRankProcess
    started_s: float
    phase: RankPhase = RankPhase.LOADING
    starts: int = 1
    vain: int = 0
    """Ends without a step since its start."""
    again_s: float | None = None
    """When it is started again; None while it runs, and when it is given up."""
    told: RankKnowledge = field(default_factory=RankKnowledge)
    asked_s: float | None = None
    """When it was last pinged; None where it has answered."""

    @property
    def ready(self) -> bool:
        """Return whether it computes what it is ordered to."""
        return self.phase is RankPhase.READY

    @property
    def given_up(self) -> bool:
        """Return whether its device will not compute any more."""
        return self.phase is RankPhase.LOST and self.again_s is None

    def state(self, busy: Iterable[int]) -> RankState:
        """As telemetry tells it; `busy` are the devices that steps hold."""
        return RankState(
            device=self.device, phase=self.phase, busy=self.ready and self.me in busy, starts=self.starts
        )


class RankSupervisor:
    """Starts ranks and talks with them. Started in a thread that outlives them; afterwards one thread uses it.

    Args:
        devices: by place.
        start: starts the rank of a place.
        patience: see :class:`RankTimeouts`.
        keeps: what is to live as long as the ranks: the store by which their groups meet.
    """

    def __init__(
        self,
        devices: Sequence[str],
        start: Callable[[int], LocalRankProcess],
        patience: RankTimeouts | None = None,
        clock: Callable[[], float] = time.perf_counter,
        *,
        keeps: object = None,
    ) -> None:
        self._keeps = keeps
        self._start, self.patience, self._clock = start, patience or RankTimeouts(), clock
        self.selector = selectors.DefaultSelector()
        self.members = [RankHandle(device, me, start(me), self._clock()) for me, device in enumerate(devices)]
        for member in self.members:
            self.selector.register(member.process.channel, selectors.EVENT_READ, member)

    def loaded(self) -> RankReady:
        """Wait until every rank has loaded its model. Returns what the first one says.

        Raises:
            GiornataError: a rank refuses; the others are ended.
            Failed: one has ended without a word, or takes too long.
        """
        ready: dict[int, RankReady] = {}
        try:
            while len(ready) < len(self.members):
                limit_s = self.members[0].started_s + self.patience.load_s - self._clock()
                heard = self.selector.select(max(limit_s, 0.0))
                if not heard:
                    raise Failed("The ranks have not loaded the model in time.")  # noqa: TRY301 - others are ended
                for key, _ in heard:
                    self._heard(key.data, ready)
        except BaseException:
            self.close(within_s=0.0)
            raise
        return ready[0]

    def send(self, member: RankHandle, parcels: Iterable[RankMessage]) -> bool:
        """Tell a rank; False where it does not listen any more, which its channel tells as well, or will."""
        try:
            for each in parcels:
                member.process.channel.send(each.frame, each.files)
        except OSError as error:
            log.warning("rank_does_not_listen", device=member.device, error=str(error))
            return False
        return True

    def ping(self, member: RankHandle, now_s: float) -> None:
        """Ask whether it runs."""
        member.asked_s = now_s
        self.send(member, [parcel(Ping())])

    def lost(self, member: RankHandle, now_s: float) -> None:
        """A rank has ended, or is ended now; it is started again in a while, unless that was in vain too often."""
        self.selector.unregister(member.process.channel)
        member.process.kill()
        waits = self.patience.again_s
        member.phase, member.asked_s, member.told = RankPhase.LOST, None, RankKnowledge()
        member.again_s = now_s + waits[member.vain] if member.vain < len(waits) else None
        member.vain += 1

    def start_again(self, member: RankHandle, now_s: float) -> None:
        """Start a process for a device whose last one was lost."""
        log.warning("rank_starts_again", device=member.device, starts=member.starts + 1)
        member.process = self._start(member.me)
        member.phase, member.again_s, member.started_s = RankPhase.LOADING, None, now_s
        member.starts += 1
        self.selector.register(member.process.channel, selectors.EVENT_READ, member)

    def close(self, within_s: float = JOIN_S) -> None:
        """End all ranks: those that compute end with their step, or are killed after `within_s`."""
        running = [member for member in self.members if member.phase is not RankPhase.LOST]
        for member in running:
            if member.ready and within_s:
                self.send(member, [parcel(Stop())])
        until_s = self._clock() + within_s
        for member in running:
            member.process.join(max(0.0, until_s - self._clock()) if member.ready else 0.0)
            member.phase = RankPhase.LOST
        self.selector.close()

    def _heard(self, member: RankHandle, ready: dict[int, RankReady]) -> None:
        messages, ended = member.process.channel.receive_ready()
        for message in messages:
            answer = unpack(message)
            if isinstance(answer, RankRefused):
                raise from_body(answer.error)
            if isinstance(answer, RankReady):
                member.phase = RankPhase.READY
                ready[member.me] = answer
        if ended:
            raise Failed(f"The rank of {member.device} has ended while it was loading; its log tells why.")


LOOPBACK: Final = "127.0.0.1"
GROUP_S: Final = 30.0
"""How long members of a group wait for each other; a stalled one is ended long before."""
LEFT_OUT: Final = ("nats_url", "nats_password_file", "blobs_url", "devices")
"""Fields of the service's configuration for which a rank has no use."""


def start_ranks(config: DenoiserConfig, patience: RankTimeouts | None = None) -> RankSupervisor:
    """Start a rank for each device. They load the model; :meth:`RankSupervisor.loaded` waits for that.

    The calling thread has to outlive them: the kernel ends them with it.

    Raises:
        Failed: this machine lacks a device.
    """
    devices = config.device_names
    check_present(devices)
    store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)

    def start(me: int) -> LocalRankProcess:
        shown = None if devices[me] == "cpu" else visible_alone(devices[me], os.environ.get(VISIBLE))
        return LocalRankProcess(opening_of(config, me, store.port), shown)

    return RankSupervisor(devices, start, patience, keeps=store)


def opening_of(config: DenoiserConfig, me: int, port: int) -> RankSetup:
    """What the rank of a place, which sees its GPU alone, is told first; `port` is that of the leader's store."""
    devices = config.device_names
    fields = DenoiserConfig.model_fields
    without = {name: fields[name].get_default(call_default_factory=True) for name in LEFT_OUT}
    on_cpu = devices[me] == "cpu"
    own = config.model_copy(update={**without, "device": "cpu" if on_cpu else "cuda:0"})
    threads = None
    if on_cpu and "OMP_NUM_THREADS" not in os.environ:
        threads = max(1, (os.cpu_count() or 1) // len(devices))
    groups = sum(me in group for group in groups_of(len(devices)))
    return RankSetup(own, me, (LOOPBACK, port), groups, GROUP_S, config.correction_bits, threads)


def loaded(config: DenoiserConfig, ranks: RankSupervisor) -> tuple[Checkpoint, Profile]:
    """The checkpoint's outline, and what steps cost on the first device, once all ranks have loaded the model.

    Of several devices, only in ways in which they can compute the checkpoint.

    Raises:
        Failed: the model cannot be loaded, or computes nothing finite, or the profile is of something else.
    """
    try:
        described = open_outline(config.model_copy(update={"device": config.device_names[0]}))
    except BaseException:
        ranks.close(within_s=0.0)
        raise
    ready = ranks.loaded()
    degrees = tuple(fit for fit in ready.profile.degrees if is_possible(described.family, fit.way))
    outline = replace(described, rank_controls=ready.controls)
    return outline, ready.profile.model_copy(update={"degrees": degrees})


def groups_of(devices: int) -> tuple[Devices, ...]:
    """The groups that steps of a pool may have, small ones first."""
    return tuple(sorted((group for group in device_subsets(devices) if len(group) > 1), key=len))
