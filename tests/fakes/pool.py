"""A pool whose ranks are threads of the test: everything between leader and rank is real but the process."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from giornata.frames import PeerEnded
from giornata.planning.cost_model import CostModel, Profile
from giornata.scheduling.degrees.pool import Devices
from giornata.scheduling.degrees.rule import ReplanningOptions, ReplanningRule
from giornata.wire.values import BlockMode
from giornata_denoiser.engine.model_runner import FiniteCheck, ModelRunner, StepReport
from giornata_denoiser.families.network import ModelFamily
from giornata_denoiser.pool.leader import DevicePool
from giornata_denoiser.pool.messages import RankReady, connect
from giornata_denoiser.pool.rank import GroupFamilies, Loaded, Rank, RankControls, RankLoras, RankSteps
from giornata_denoiser.pool.ranks import LocalRankProcess, RankSupervisor, RankTimeouts
from giornata_denoiser.pool.shared_memory import Arena
from giornata_denoiser.pool.state import PoolTimes
from tests.fakes.profiles import PROFILE
from tests.patience import HUNG_S


class OneDevice(GroupFamilies):
    """Families of a rank that shares no step."""

    def __init__(self, family: ModelFamily) -> None:
        self.family = family

    def meet(self, devices: Devices, epoch: int) -> None:
        assert len(devices) == 1, epoch

    def of(self, devices: Devices, epoch: int, *, halves: bool) -> ModelFamily:
        assert not halves
        assert len(devices) == 1, epoch
        return self.family

    def check(self, devices: Devices, epoch: int) -> None:
        assert len(devices) == 1, epoch

    def abort(self, devices: Devices, epoch: int) -> None:
        raise AssertionError(f"{devices} of epoch {epoch} is no group")

    def close(self, devices: Devices) -> None:
        pass


class ThreadRank(LocalRankProcess):
    """A thread of the test."""

    def __init__(self, me: int, family: ModelFamily, profile: Profile = PROFILE) -> None:
        self.channel, self._there = map(connect, socket.socketpair())
        self._me, self._family, self._profile = me, family, profile
        self._thread = threading.Thread(target=self._run, name=f"rank {me}")
        self._thread.start()

    def kill(self) -> None:
        """Its thread ends with its step, of which nobody hears."""
        self._there.interrupt()
        self.channel.close()

    def join(self, within_s: float) -> None:
        self._thread.join(HUNG_S)
        assert within_s >= 0.0
        self.kill()

    @contextmanager
    def _loaded(self) -> Iterator[Loaded]:
        loras, controls = RankLoras(self._family.device), RankControls(self._family.device)

        def make(family: ModelFamily) -> ModelRunner:
            return ModelRunner(family, time.perf_counter, judge=FiniteCheck, low_ranks=loras)

        steps = RankSteps(self._me, OneDevice(self._family), make, loras, controls)
        yield steps, RankReady(self._profile)

    def _run(self) -> None:
        rank = Rank(self._there, on_end=lambda: None)
        try:
            rank.run(self._loaded())
        except PeerEnded:
            pass
        finally:
            rank.close()


def pool(
    families: Sequence[ModelFamily],
    on_report: Callable[[StepReport], object],
    on_crash: Callable[[Exception], object],
    *,
    rows: int = 8,
    tokens: int = 10_000,
    switches: ReplanningOptions | None = None,
    patience: RankTimeouts | None = None,
    profile: Profile = PROFILE,
) -> DevicePool:
    """A pool with a rank for each of `families`, all of them of one network."""
    ranks = RankSupervisor(
        ["cpu"] * len(families), lambda me: ThreadRank(me, families[me], profile), patience or RankTimeouts()
    )
    times = PoolTimes(
        CostModel.of(ranks.loaded().profile), families[0].operations, BlockMode.KV, rows, tokens
    )
    return DevicePool(
        ranks,
        Arena(),
        rule=ReplanningRule(len(families), switches, together=times.together),
        groups=(),
        times=times,
        on_report=on_report,
        on_crash=on_crash,
    )
