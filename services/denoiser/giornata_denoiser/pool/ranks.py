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
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from giornata.config import ENV_PREFIX
from giornata.frames import FramedConnection
from giornata.gpus import VISIBLE
from giornata.wire.errors import Failed, from_body
from giornata.wire.workers import RankPhase, RankState
from giornata_denoiser.pool.messages import Ping, RankReady, RankRefused, RankSetup, Stop, connect, unpack
from giornata_denoiser.pool.shared_rows import RankKnowledge, RankMessage, parcel

# How long a leader waits for its ranks.


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


# Starting and ending rank processes, as a leader sees them.


class RankProcess(Protocol):
    """A rank that has been started."""

    @property
    def channel(self) -> FramedConnection:
        """To it; ends when the rank does."""

    def kill(self) -> None:
        """End it at once; what it was computing is lost."""

    def join(self, within_s: float) -> None:
        """Wait for its end, which it has been told; kill it where it takes longer."""


Start = Callable[[int], RankProcess]
"""Starts the rank at this place among the devices. The calling thread outlives it."""


class LocalRankProcess:
    """A process of this program's; satisfies :class:`RankProcess`.

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
                [sys.executable, "-m", "giornata_denoiser.pool", str(descriptor)],
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
        """See :class:`RankProcess`."""
        self._process.kill()
        self._process.wait()
        self.channel.close()

    def join(self, within_s: float) -> None:
        """See :class:`RankProcess`."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(within_s)
        self.kill()


# The ranks of a pool, as their leader has started them: one process for each device, and another after it
# is lost.


JOIN_S = 10.0
"""How long a rank may take to end when it has been told to, beyond the step that it computes."""

log = structlog.get_logger(__name__)


@dataclass(eq=False)
class RankHandle:
    """A device of the pool and its rank."""

    device: str
    me: int
    process: RankProcess
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
        start: Start,
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

    def ping(self, member: RankHandle, number: int, now_s: float) -> None:
        """Ask whether it runs."""
        member.asked_s = now_s
        self.send(member, [parcel(Ping(number))])

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
