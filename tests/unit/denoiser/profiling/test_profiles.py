"""Profile files: written as a whole, read back equal, refused where they are of something else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from giornata.planning.profiles import Profile
from giornata.planning.regression import LinearFit
from giornata.wire.errors import Failed
from giornata_denoiser.checkpoint import Checkpoint
from giornata_denoiser.families.preview_map import PreviewMap
from giornata_denoiser.profiling.profiles import device_name, read_profile, write_profile
from giornata_lab.simulation.h100 import MACHINES, shipped
from tests.fakes import tiny_flux
from tests.fakes.networks import plain
from tests.fakes.profiles import PROFILE
from tests.unit.denoiser.engine.test_rehearsal import CARD


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return Checkpoint(CARD, tiny_flux.family(), PreviewMap(torch.zeros(16, 3), torch.zeros(3)))


@pytest.fixture(scope="module")
def profile() -> Profile:
    return PROFILE.model_copy(
        update={"device": device_name(torch.device("cpu")), "blocks": tiny_flux.family().operations.specs}
    )


def test_what_is_written_is_read_and_nothing_else_is_left(
    tmp_path: Path, checkpoint: Checkpoint, profile: Profile
) -> None:
    path = tmp_path / "new" / "profile.json"
    write_profile(path, PROFILE)
    write_profile(path, profile)
    assert read_profile(path, checkpoint) == profile
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("field", "value", "what"),
    [
        ("model_digest", "eeeeeeeeeeeeeeee", "model; .*Received: eeeeeeeeeeee. Accepted: d."),
        ("blocks", plain(57), "network; .*Received: 57 blocks .*Accepted: 4 blocks"),
        ("dtype", "bfloat16", "dtype; .*Received: bfloat16. Accepted: float32."),
        ("device", "NVIDIA H100", "device; .*Received: NVIDIA H100. Accepted: .*threads: "),
    ],
)
def test_a_profile_of_something_else_is_refused(
    tmp_path: Path, checkpoint: Checkpoint, profile: Profile, field: str, value: Any, what: str
) -> None:
    path = tmp_path / "profile.json"
    write_profile(path, profile.model_copy(update={field: value}))
    with pytest.raises(Failed, match=rf"of another {what}") as caught:
        read_profile(path, checkpoint)
    assert "giornata profile" in str(caught.value)


def test_a_derived_profile_is_refused_though_all_else_fits(
    tmp_path: Path, checkpoint: Checkpoint, profile: Profile
) -> None:
    path = tmp_path / "profile.json"
    write_profile(path, profile.model_copy(update={"derived": "a formula"}))
    with pytest.raises(
        Failed, match=r"not measured, but derived from a formula.*measure it again with `giornata"
    ):
        read_profile(path, checkpoint)


@pytest.mark.parametrize("name", MACHINES)
def test_the_derived_profiles_that_ship_are_refused(
    tmp_path: Path, checkpoint: Checkpoint, name: str
) -> None:
    path = tmp_path / f"{name}.json"
    write_profile(path, shipped(name))
    with pytest.raises(Failed, match="not measured"):
        read_profile(path, checkpoint)


@pytest.mark.parametrize("content", [None, b"", b"{}", b"[1, 2"])
def test_what_is_no_profile_is_refused_by_name(
    tmp_path: Path, checkpoint: Checkpoint, content: bytes | None
) -> None:
    path = tmp_path / "profile.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(Failed, match=r"profile\.json"):
        read_profile(path, checkpoint)


def test_a_fit_is_the_same_after_it_was_written_down() -> None:
    fit = PROFILE.compute.model_copy(update={"error_p50": 0.01})
    assert LinearFit.model_validate_json(fit.model_dump_json()) == fit


def test_a_profile_with_batch_caps_of_an_earlier_version_is_read() -> None:
    written = PROFILE.model_dump(mode="json") | {"caps": [{"tokens": 100, "rows": 8}]}
    assert Profile.model_validate(written) == PROFILE


@pytest.mark.parametrize("schema", [1, 4])
def test_a_profile_of_another_schema_is_refused(
    tmp_path: Path, checkpoint: Checkpoint, profile: Profile, schema: int
) -> None:
    path = tmp_path / "profile.json"
    write_profile(path, profile.model_copy(update={"schema_version": schema}))
    with pytest.raises(
        Failed, match=f"received a profile of schema {schema}, accepted are 3 and 2"
    ) as caught:
        read_profile(path, checkpoint)
    assert "giornata profile" in str(caught.value)
