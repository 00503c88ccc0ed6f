"""Ranks and leaders that are killed or stopped under load: every row ends once, and nothing stays behind."""

from __future__ import annotations

import asyncio
import os
import re
import select
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from giornata.scheduling.degrees.pool import Devices
from giornata.wire.workers import RankPhase
from giornata_denoiser.pool.leader import DevicePool
from giornata_denoiser.pool.ranks import RankTimeouts
from tests.forked_programs import program
from tests.integration.denoiser.pool.bench import After, Model, Walk, equal, running, send
from tests.patience import HUNG_S

BRISK = RankTimeouts(late=(3.0, 0.5))
STEPS = 24


def rows_end_well(model: Model, plan: list[Devices] | None, do: Callable[[DevicePool], object]) -> list[int]:
    """Have something done in the middle of four rows of a pool of two. Returns how often its ranks were started."""
    rows = [model.row(f"row {index}", steps=STEPS, seed=index) for index in range(4)]
    rule = None if plan is None else Walk(plan)
    with running(model.config(2), rule, BRISK, After(8, do)) as bench:
        assert bench.pool.submit(rows)
        bench.until_ended([row.key.job_id for row in rows])
        starts = [rank.starts for rank in bench.pool.ranks()]
    equal(bench.latents(), model.alone(rows))
    return starts


@pytest.mark.parametrize("device", [0, 1], ids=["first of a pair", "second of a pair"])
def test_rows_of_a_killed_rank_go_on_and_it_comes_back(model: Model, device: int) -> None:
    """No step can be made before the rank is back."""
    starts = rows_end_well(model, [(0, 1)] * STEPS, send(signal.SIGKILL, device))
    assert starts[device] >= 2


def test_a_stopped_rank_is_killed_and_its_rows_go_on(model: Model) -> None:
    """On the other device, as the rule says."""
    starts = rows_end_well(model, None, send(signal.SIGSTOP, 1))
    assert starts[1] >= 2


def test_a_pool_without_ranks_ends(model: Model) -> None:
    """What can be taken, can be taken."""
    never = RankTimeouts(again_s=())
    with running(model.config(2), None, never, After(2, send(signal.SIGKILL, 0, 1))) as bench:
        bench.pool.submit([model.row("lost", steps=STEPS)])
        with pytest.raises(AssertionError, match="All ranks of the pool have ended"):
            bench.until_ended(["lost"])
        assert [each.phase for each in bench.pool.ranks()] == [RankPhase.LOST] * 2
        assert not bench.pool.submit([model.row("late")])
        (taken,) = bench.pool.take_all()
        assert 1 <= taken.step < STEPS
        assert taken.export().step == taken.step


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
async def test_nothing_is_left_of_a_pool_whose_leader_is_killed(model: Model, tmp_path: Path) -> None:
    """Ranks end with it. What they share has no name, so that it goes with them."""
    log = tmp_path / "log"
    where = str(model.folder), str(model.profile)
    leading = program("tests.integration.denoiser.pool.leader", *where, env={}, log=log)
    async with leading as leader:
        async with asyncio.timeout(HUNG_S):
            told = None
            while told is None:
                await asyncio.sleep(0.05)
                told = re.search(r"^ranks (\d+) (\d+)$", log.read_text(), re.MULTILINE)
        ranks = [int(number) for number in told.groups()]
        descriptors = [os.pidfd_open(number) for number in ranks]
        for number in (leader.pid, *ranks):
            assert (shared := shared_files(number))
            assert all(name.endswith(" (deleted)") for name in shared), shared
        leader.kill()
        await leader.wait()
    for descriptor in descriptors:
        ended(descriptor)


def shared_files(process: int) -> list[str]:
    """Files by which a process shares memory that it may write to, as its maps name them."""
    lines = Path(f"/proc/{process}/maps").read_text(encoding="utf-8").splitlines()
    parts = [line.split(maxsplit=5) for line in lines]
    return [part[5] for part in parts if part[1] == "rw-s" and part[5].startswith("/")]


def ended(descriptor: int) -> None:
    """Wait for the end of a process that is nobody's child here."""
    ready, _, _ = select.select([descriptor], [], [], HUNG_S)
    assert ready
    os.close(descriptor)
