"""A profile measured for real, of a tiny model with random weights; and a denoiser that starts without one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest
import torch

from giornata.families import Family
from giornata.planning.cost_model import ALONE, Profile, StepParallelism
from giornata.planning.operations import SequenceShape, StepWork, step_work
from giornata.wire.errors import Failed
from giornata.wire.values import BlockMode
from giornata_denoiser.checkpoint import Checkpoint, load, open_checkpoint
from giornata_denoiser.config import DenoiserConfig
from giornata_denoiser.profiling import fitting
from giornata_denoiser.profiling import ranks as members
from giornata_denoiser.profiling.__main__ import ProfilerConfig, run
from giornata_denoiser.profiling.fitting import profile_of
from giornata_denoiser.profiling.measuring import StepMeter
from giornata_denoiser.profiling.mixtures import RowSize, StepShape
from giornata_denoiser.profiling.ranks import ProfilerRanks
from tests.forked_processes import FORKS

ANY: Final = -1e9
"""Times of a tiny model on a busy machine may fit no line."""


@pytest.fixture(autouse=True, scope="module")
def _quick() -> Iterator[None]:
    """Members are forked, and each step is measured once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(members, "get_context", lambda _: FORKS)
        patch.setattr(fitting, "QUICK_ROUNDS", 1)
        yield


def whole(checkpoint: Checkpoint, tokens: int) -> StepWork:
    """A step of one row in full."""
    blocks = checkpoint.family.depth
    return step_work(
        checkpoint.family.operations, [SequenceShape(0, tokens, tokens)], [(BlockMode.FULL,) * blocks]
    )


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint: Callable[[Family], Path]) -> Checkpoint:
    found = load(tiny_checkpoint(Family.FLUX_INPAINT), dtype=torch.float32, device=torch.device("cpu"))
    small = found.card.model_copy(update={"native_size": 128})
    return Checkpoint(small, found.family, found.preview_map)


@pytest.fixture(scope="module")
def config(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> ProfilerConfig:
    out = tmp_path_factory.mktemp("profile") / "profile.json"
    settings = ProfilerConfig(model="tiny", device="cpu", out=out, quick=True, capacity_rows=3, least_r2=ANY)
    run(settings, checkpoint)
    return settings


@pytest.mark.slow
def test_a_profile_predicts_and_measures_what_it_has_not_seen(
    config: ProfilerConfig, checkpoint: Checkpoint
) -> None:
    profile = Profile.model_validate_json(config.out.read_bytes())
    assert profile.compute.r2 <= 1
    assert profile.load.samples > 2
    assert min(*profile.compute.weights, *profile.load.weights) >= 0
    assert not profile.compute.derived, "ControlNets are measured, too"
    assert profile.activation_bytes > 100
    blocks = checkpoint.family.depth
    full, masked = (
        StepShape((RowSize(10, 11, 20, (mode,) * blocks, ratio),) * 2)
        for mode, ratio in ((BlockMode.FULL, 1.0), (BlockMode.KV, 0.2))
    )

    def took(mixture: StepShape) -> float:
        return profile.costs.step_ms(mixture.work(checkpoint.family.operations))

    assert 0 < took(masked) <= took(full)
    meter = StepMeter(checkpoint, 8)
    assert all(meter.step_ms(mixture) > 0 for mixture in (full, masked))


@pytest.mark.slow
def test_predictions_never_shrink_with_what_is_computed(
    config: ProfilerConfig, checkpoint: Checkpoint
) -> None:
    """On a busy machine steps of a tiny model may all seem alike."""
    costs = Profile.model_validate_json(config.out.read_bytes()).costs
    steps = [costs.step_ms(whole(checkpoint, tokens)) for tokens in (50, 100, 500, 2000)]
    assert steps == sorted(steps)
    assert steps[0] > 0
    assert costs.load_ms(10**6) >= costs.load_ms(10**4) > 0


@pytest.mark.slow
def test_a_denoiser_takes_the_profile_it_is_given(config: ProfilerConfig, checkpoint: Checkpoint) -> None:
    named = DenoiserConfig(model="tiny", profile=config.out)
    assert profile_of(named, checkpoint) == Profile.model_validate_json(config.out.read_bytes())
    with pytest.raises(Failed, match="cannot be read"):
        profile_of(DenoiserConfig(model="tiny", profile=Path("nowhere.json")), checkpoint)


@pytest.mark.slow
def test_without_one_it_measures_a_few_steps(checkpoint: Checkpoint) -> None:
    profile = profile_of(DenoiserConfig(model="tiny"), checkpoint)
    assert profile.model_digest == checkpoint.card.digest
    assert min(profile.costs.compute) >= 0
    small, large = (profile.costs.step_ms(whole(checkpoint, tokens)) for tokens in (100, 2000))
    assert 0 < small <= large
    assert profile.costs.load_ms(10**6) > 0


@pytest.mark.slow
def test_steps_of_several_devices_are_measured_by_degree_and_by_halves(
    tiny_checkpoint: Callable[[Family], Path], tmp_path: Path
) -> None:
    settings = ProfilerConfig(
        model=str(tiny_checkpoint(Family.FLUX_INPAINT)),
        device="cpu",
        devices="cpu,cpu",
        out=tmp_path / "p.json",
        quick=True,
        least_r2=ANY,
        capacity_rows=1,
    )
    opened = open_checkpoint(settings)
    small = opened.card.model_copy(update={"native_size": 96})
    run(settings, Checkpoint(small, opened.family, opened.preview_map))
    profile = Profile.model_validate_json(settings.out.read_bytes())
    assert [way for way, _ in profile.ways] == [StepParallelism(2), StepParallelism(2, halves=True)]
    costs = {ALONE: profile.costs, **dict(profile.ways)}
    assert all(of.step_ms(whole(opened, 500)) > 0 for of in costs.values())
    assert not any(fit.compute.derived for fit in profile.degrees), "steps with adapters are measured, too"


@pytest.mark.slow
def test_a_member_that_cannot_load_the_model_ends_the_profiler_with_its_reason(
    config: ProfilerConfig, checkpoint: Checkpoint
) -> None:
    nowhere = config.model_copy(update={"model": "/nowhere", "devices": "cpu,cpu"})
    ranks = ProfilerRanks(nowhere, checkpoint, StepMeter(checkpoint, 8))
    with pytest.raises(Failed, match="/nowhere"), ranks:
        pass
