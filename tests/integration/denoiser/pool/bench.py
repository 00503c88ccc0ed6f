"""What tests of pools share: a profiled checkpoint, rows of it, and a pool whose reports are gathered."""

from __future__ import annotations

import os
import queue
import signal
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from giornata.packed.packing import make_region
from giornata.planning.cost_model import CostModel, DegreeFit, Profile
from giornata.scheduling.batch import Capacity, RowKey
from giornata.scheduling.degrees.pool import Devices, PoolDecision, PoolRow, PoolRule, StepStart
from giornata.scheduling.degrees.rule import ReplanningRule
from giornata.tensors import NEGATIVE
from giornata.wire.values import BlockMode
from giornata.wire.workers import StepSample
from giornata_denoiser.checkpoint import Checkpoint, open_checkpoint
from giornata_denoiser.config import DenoiserConfig
from giornata_denoiser.controls.residuals import PoolControls
from giornata_denoiser.engine.batch_tensors import ControlPart, LowRanks
from giornata_denoiser.engine.engine import Engine
from giornata_denoiser.engine.model_runner import StepReport
from giornata_denoiser.families.network import build_row, text_shapes
from giornata_denoiser.pool.leader import DevicePool
from giornata_denoiser.pool.ranks import LocalRankProcess, RankTimeouts, groups_of, loaded, start_ranks
from giornata_denoiser.pool.shared_memory import Arena
from giornata_denoiser.pool.state import PoolTimes
from giornata_denoiser.profiling.fitting import profile
from giornata_denoiser.rows.row import Row
from giornata_lab.bench.compute.rows import changed
from tests.fakes.profiles import PROFILE
from tests.patience import HUNG_S

TOLERANCE = 1e-5


@dataclass(frozen=True)
class Model:
    """A checkpoint on disk, its profile, and the same in this process."""

    folder: Path
    profile: Path
    checkpoint: Checkpoint

    def config(self, devices: int) -> DenoiserConfig:
        return DenoiserConfig(
            model=str(self.folder), profile=self.profile, devices=",".join(["cpu"] * devices)
        )

    def profiled(self, path: Path, degrees: Collection[int], *, halves: bool = False) -> Model:
        """With a profile at `path` in which several devices are quicker, and quickest by `halves`, if it has them."""
        told: dict[str, Any] = {
            "compute": PROFILE.compute,
            "load": PROFILE.load,
            "activation": (4096.0, 4096.0),
        }
        measured = profile(self.checkpoint, **told)
        fits = [_quicker(measured, degree) for degree in degrees]
        if halves:
            fits.append(_quicker(measured, 8).model_copy(update={"degree": 2, "halves": True}))
        device = measured.device.rsplit(":", 1)[0] + ": 1"  # as many threads as ranks have
        several = measured.model_copy(update={"degrees": tuple(fits), "device": device})
        path.write_text(several.model_dump_json())
        return replace(self, profile=path)

    def row(
        self,
        name: str,
        *,
        grid: tuple[int, int] = (4, 5),
        steps: int = 4,
        seed: int = 0,
        guided: bool = False,
        masked: bool = False,
    ) -> Row:
        """A row of random inputs; the same arguments make an equal one."""
        family, tokens = self.checkpoint.family, grid[0] * grid[1]
        generator = torch.Generator().manual_seed(seed)

        def values(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        conditioning = {
            each: values(tokens, channels) for each, channels in family.network.conditioning.items()
        }
        conditioning["mask"] = (conditioning["mask"] > 0).float()
        made = build_row(
            family,
            RowKey(name, 1, 0),
            grid=grid,
            track=family.schedule.track(
                sampler=family.schedule.default_sampler, steps=steps, strength=1.0, cells=tokens
            ),
            text={
                f"{sign}{each}": values(*shape)
                for sign in (("", NEGATIVE) if guided else ("",))
                for each, shape in text_shapes(family, 6).items()
            },
            conditioning=conditioning,
            guidance_scale=2.0,
            true_cfg_scale=2.0 if guided else None,
        )
        if not masked:
            return made
        cells = torch.zeros(grid, dtype=torch.bool)
        cells[1:3, 1:3] = True
        return changed(made, region=make_region(cells), renewed_every=3)

    def alone(
        self, rows: Sequence[Row], low_ranks: LowRanks | None = None, controls: ControlPart | None = None
    ) -> dict[str, torch.Tensor]:
        """The final latents of rows, each computed by itself in this process."""
        found: dict[str, torch.Tensor] = {}
        for row in rows:
            engine = Engine(
                self.checkpoint.family, Capacity(1, 1), lambda: 0.0, low_ranks=low_ranks, controls=controls
            )
            engine.batch.submit([row])
            while (report := engine.step()) is not None:
                assert not report.failed
                found |= {each.key.job_id: each.latent for each in report.advanced if each.done}
        return found


def open_model(folder: Path) -> Model:
    """The checkpoint in `folder`, which has no profile yet."""
    return Model(folder, Path(), open_checkpoint(DenoiserConfig(model=str(folder), device="cpu")))


def _quicker(alone: Profile, degree: int) -> DegreeFit:
    weights = tuple(weight / degree for weight in alone.compute.weights)
    return DegreeFit(degree=degree, compute=alone.compute.model_copy(update={"weights": weights}))


class Walk:
    """A rule that has every row's steps computed by the devices of a list, one after the other."""

    def __init__(self, plan: Sequence[Devices]) -> None:
        self._plan = plan

    def decide(self, now_s: float, rows: Sequence[PoolRow], free: AbstractSet[int]) -> PoolDecision:
        assert now_s > 0
        left, begins = set(free), []
        for row in rows:
            devices = self._plan[len(self._plan) - row.left] if row.left else ()
            if row.boundary and left.issuperset(devices):
                left -= set(devices)
                begins.append(StepStart((row.key,), devices))
        return PoolDecision(tuple(begins))


@dataclass
class Gathered:
    """A pool, and what it has told."""

    pool: DevicePool
    checkpoint: Checkpoint
    """As the leader has it."""
    told: queue.Queue[StepReport | Exception]
    ended: dict[str, Row | Exception] = field(default_factory=dict)
    degrees: list[int] = field(default_factory=list)
    """Degrees of each row's steps, in order."""
    skipped_blocks: int = 0
    """Blocks that step caches stood in for."""
    samples: list[StepSample] = field(default_factory=list)
    """The sample of each step."""

    def until(self, done: Callable[[], bool]) -> None:
        """Take in reports until `done`. No row ends twice."""
        while not done():
            report = self.told.get(timeout=HUNG_S)
            assert isinstance(report, StepReport), report
            self.degrees += [row.degree for row in report.advanced]
            self.skipped_blocks += report.cached.skipped_blocks
            self.samples += [] if report.sample is None else [report.sample]
            ends: dict[str, Row | Exception] = {row.key.job_id: row for row in report.advanced if row.done}
            ends |= {failure.row.key.job_id: failure.error for failure in report.failed}
            assert ends.keys().isdisjoint(self.ended)
            self.ended |= ends

    def until_ended(self, names: Collection[str]) -> None:
        self.until(lambda: self.ended.keys() >= set(names))

    def latents(self) -> Mapping[str, torch.Tensor]:
        failed = {name: row for name, row in self.ended.items() if isinstance(row, Exception)}
        assert not failed
        return {name: row.latent for name, row in self.ended.items() if isinstance(row, Row)}


def pid(pool: DevicePool, device: int) -> int:
    """Id of the process of a device's rank."""
    process = pool._ranks.members[device].process
    assert isinstance(process, LocalRankProcess)
    return process.pid


def send(number: signal.Signals, *devices: int) -> Callable[[DevicePool], None]:
    """What sends a signal to the ranks of these devices."""

    def sent(pool: DevicePool) -> None:
        for device in devices:
            os.kill(pid(pool, device), number)

    return sent


@dataclass
class After:
    """Does something once in the pool's own thread, when it has told of so many steps: none follows meanwhile."""

    steps: int
    do: Callable[[DevicePool], object]

    def told(self, pool: DevicePool) -> None:
        self.steps -= 1
        if self.steps == 0:
            self.do(pool)


@contextmanager
def running(
    config: DenoiserConfig,
    rule: PoolRule | None = None,
    patience: RankTimeouts | None = None,
    after: After | None = None,
    low_ranks: LowRanks | None = None,
    controls: PoolControls | None = None,
) -> Iterator[Gathered]:
    """A pool as `config` says; a rank that a busy machine starves is not taken for a stalled one."""
    ranks = start_ranks(config, patience or RankTimeouts(ping_s=HUNG_S))
    checkpoint, found = loaded(config, ranks)
    times = PoolTimes(CostModel.of(found), checkpoint.family.operations, BlockMode.KV, 8, 10_000)
    told: queue.Queue[StepReport | Exception] = queue.Queue()
    devices = len(config.device_names)

    def report(step: StepReport) -> None:
        told.put(step)
        if after is not None:
            after.told(pool)

    pool = DevicePool(
        ranks,
        Arena(),
        rule=rule or ReplanningRule(devices, together=times.together),
        groups=groups_of(devices),
        times=times,
        on_report=report,
        on_crash=told.put,
        low_ranks=low_ranks,
        controls=controls,
    )
    with pool:
        yield Gathered(pool, checkpoint, told)


def equal(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, latent in wanted.items():
        torch.testing.assert_close(found[name], latent, rtol=0, atol=TOLERANCE)
