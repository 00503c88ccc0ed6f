"""The ranks of a pool, as their leader has started them: one process for each device, and another after it is lost."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import structlog

from giornata.planning.profiles import Profile
from giornata.wire.error_root import from_body
from giornata.wire.errors import Failed
from giornata.wire.workers import RankPhase, RankState
from giornata_denoiser.pool.channel import ChannelClosed, Message
from giornata_denoiser.pool.messages import ANSWER, Ping, RankReady, RankRefused, Stop
from giornata_denoiser.pool.patience import RankTimeouts
from giornata_denoiser.pool.processes import RankProcess, Start
from giornata_denoiser.pool.shelf import RankKnowledge, RankMessage, parcel

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
        """Whether it computes what it is ordered to."""
        return self.phase is RankPhase.READY

    @property
    def given_up(self) -> bool:
        """Whether its device will not compute any more."""
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

    def loaded(self) -> Profile:
        """Wait until every rank has loaded its model. Returns what steps cost on the first device.

        Raises:
            GiornataError: a rank refuses; the others are ended.
            Failed: one has ended without a word, or takes too long.
        """
        profiles: dict[int, Profile] = {}
        try:
            while len(profiles) < len(self.members):
                limit_s = self.members[0].started_s + self.patience.load_s - self._clock()
                ready = self.selector.select(max(limit_s, 0.0))
                if not ready:
                    raise Failed("The ranks have not loaded the model in time.")  # noqa: TRY301 - others are ended
                for key, _ in ready:
                    self._heard(key.data, profiles)
        except BaseException:
            self.close(within_s=0.0)
            raise
        return profiles[0]

    def send(self, member: RankHandle, parcels: Iterable[RankMessage]) -> bool:
        """Tell a rank; False where it does not listen any more, which its channel tells as well, or will."""
        try:
            for each in parcels:
                member.process.channel.send(each.data, each.files)
        except ChannelClosed as error:
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

    def _heard(self, member: RankHandle, profiles: dict[int, Profile]) -> None:
        messages, ended = member.process.channel.receive_ready()
        for message in messages:
            answer = answered(message)
            if isinstance(answer, RankRefused):
                raise from_body(answer.error)
            if isinstance(answer, RankReady):
                member.phase = RankPhase.READY
                profiles[member.me] = answer.profile
        if ended:
            raise Failed(f"The rank of {member.device} has ended while it was loading; its log tells why.")


def answered(message: Message) -> object:
    """What a rank has said; files that came along are the caller's."""
    return ANSWER.validate_json(message.data)
