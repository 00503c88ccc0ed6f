"""Who computes a row's ControlNets, and which ControlNets fit a network."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from giornata.control.layout import ControlMismatch
from giornata.wire.adapters import ControlKind, ControlWork
from giornata.wire.controlnets import ControlState
from giornata.wire.workers import ServiceState
from giornata_denoiser.choices import ControlNetExecutor
from giornata_denoiser.controls.controlnets import (
    ResidualTiming,
    RowWork,
    choose_executor,
    exposed_ms,
    residual_timing,
)
from giornata_denoiser.controls.residuals import ControlNetTarget, control_target, open_controls
from giornata_denoiser.controls.sessions import able_instances, best_instance
from giornata_lab.bench.compute import tiny_flux, tiny_unet
from tests.fakes import tiny_driven, tiny_flux_control, tiny_sd3_control, tiny_unet_control
from tests.present import present
from tests.unit.scheduling.test_adapters import instance

# Who computes a row's ControlNets.


NETS = frozenset({"a" * 64, "b" * 64})


def here(**changed: object) -> ControlState:
    """This process."""
    known = {"capacity_rows": 0, "machine": "m1", "device": "cuda", "threads": 1, "cores": (0, 1)}
    return ControlState.model_validate(known | changed)


HERE = here()
ROW = RowWork(
    network_ms=100,
    local_ms=60,
    work=30e9,
    moved_bytes=20_000_000,
    due=(ResidualTiming(0.1, 0.01), ResidualTiming(1.0, 0.9)),
)
"""An instance at 2 ms for 1e9 multiplications takes 60 ms, and 4 ms to move samples on one host."""
UNET = replace(ROW, due=residual_timing(ControlKind.UNET, [tuple(range(13))]))


def told(name: str, **control: object) -> ServiceState:
    known = {"capacity_rows": 4, "machine": "m1", "device": "cuda:1", "threads": 1, "work_ms": 2.0}
    return instance(name, NETS, control=ControlState.model_validate(known | control))


def test_a_step_waits_for_the_sum_that_comes_latest_after_it_is_read() -> None:
    assert exposed_ms(ROW, told("c"), HERE) == pytest.approx(6.4 - 1)
    late = exposed_ms(ROW, told("c", pending_ms=80), HERE)
    assert late == pytest.approx(86.4 - 1), "others come first"
    slow = exposed_ms(ROW, told("c", work_ms=5.0), HERE)
    assert slow == pytest.approx(154 - 90), "the last one is read behind nine tenths of the network"
    assert exposed_ms(replace(ROW, due=(ResidualTiming(0.1, 0.5),)), told("c"), HERE) == 0


def test_a_unet_waits_before_its_decoder() -> None:
    assert exposed_ms(UNET, told("c"), HERE) == pytest.approx(14)
    assert exposed_ms(replace(UNET, network_ms=200), told("c"), HERE) == 0


def test_sums_are_made_with_all_samples_before_them_and_read_behind_their_block() -> None:
    two, one = (0, 0, 1, 2), (0, 0, 0, None)
    assert residual_timing(ControlKind.FLUX, [two, one]) == (
        ResidualTiming(2 / 4, 1 / 4),
        ResidualTiming(3 / 4, 3 / 4),
        ResidualTiming(4 / 4, 4 / 4),
    )
    nothing: tuple[None, ...] = (None,) * 4
    assert residual_timing(ControlKind.FLUX, [two, nothing]) == residual_timing(ControlKind.FLUX, [two])


@pytest.mark.parametrize(
    ("process", "control"),
    [
        (here(device="cuda:1"), {}),
        (
            here(device="cpu", threads=2, cores=(0, 1, 2)),
            {"device": "cpu", "threads": 2, "cores": (0, 1, 2)},
        ),
        (here(device="cpu", cores=(0,)), {"device": "cpu", "cores": (0,)}),
        (here(device="cpu", cores=(0,)), {"device": "cpu"}),
    ],
)
def test_nothing_is_computed_meanwhile_on_one_device_or_too_few_cores(
    process: ControlState, control: dict[str, object]
) -> None:
    assert exposed_ms(ROW, told("c", **control), process) == pytest.approx(64)
    assert choose_executor(ROW, [told("c", **control)], NETS, process, ControlNetExecutor.AUTO) is None
    assert (
        choose_executor(ROW, [told("c", work_ms=0.1, **control)], NETS, process, ControlNetExecutor.AUTO)
        is None
    )
    assert choose_executor(ROW, [told("c", **control)], NETS, process, ControlNetExecutor.SERVICE) is not None


def test_an_instance_that_has_computed_nothing_yet_is_asked_where_its_work_would_hide() -> None:
    new = told("c", work_ms=None)
    assert exposed_ms(ROW, new, HERE) == exposed_ms(ROW, told("c"), HERE), "as fast as this process: 60 ms"
    assert choose_executor(ROW, [new], NETS, HERE, ControlNetExecutor.AUTO) is not None
    assert choose_executor(ROW, [new], NETS, here(device="cuda:1"), ControlNetExecutor.AUTO) is None


def test_cores_of_their_own_are_enough() -> None:
    alone = here(device="cpu", cores=(0,))
    assert exposed_ms(ROW, told("c", device="cpu", cores=(1,)), alone) == pytest.approx(6.4 - 1)


def test_another_host_moves_samples_more_slowly() -> None:
    far = told("c", machine="m2")
    assert exposed_ms(replace(ROW, due=(ResidualTiming(1.0, 0.0),)), far, HERE) == pytest.approx(80)


def test_what_is_not_here_is_asked_for() -> None:
    elsewhere = replace(ROW, local_ms=math.inf)
    for executor in ControlNetExecutor:
        assert choose_executor(elsewhere, [told("c", work_ms=900.0)], NETS, HERE, executor) is not None
    assert choose_executor(elsewhere, [], NETS, HERE, ControlNetExecutor.AUTO) is None
    assert choose_executor(ROW, [told("c")], NETS, HERE, ControlNetExecutor.LOCAL) is None


def test_the_best_instance_shares_memory_then_has_the_weights_then_has_the_least_to_do() -> None:
    states = [
        told("a", machine="m2", resident=tuple(NETS)),
        told("b", pending_ms=1.0),
        told("c", resident=tuple(NETS), pending_ms=9.0),
        told("d", resident=tuple(NETS), pending_ms=5.0),
    ]
    found = present(best_instance(states, NETS, "m1"))
    assert found.instance == "d"


@given(rows=st.integers(0, 5), has=st.frozensets(st.sampled_from(sorted(NETS))), excluded=st.booleans())
def test_an_instance_is_able_with_room_and_all_nets(rows: int, has: frozenset[str], excluded: bool) -> None:
    state = instance("c", has, control=ControlState(capacity_rows=4, rows=rows))
    found = able_instances([state], NETS, {"c"} if excluded else ())
    assert bool(found) == (rows < 4 and has == NETS and not excluded)


# A denoiser refuses ControlNets that do not fit its network when it starts, and says what differs.


PIXELS: Mapping[str, int] = {"flux": 16, "sd3": 16, "sd": 32, "xl": 16}
"""A token's, a side: a latent's pixel is eight of Flux and SD3, and four of these UNets, which have no autoencoder."""
XLABS: dict[str, Any] = {"conditioning_embedding_channels": tiny_flux.LATENT // 4, "patch_size": 2}


@cache
def network(name: str) -> ControlNetTarget:
    of: Any = tiny_unet.network(name, fill=name == "xl") if name in tiny_unet.SHAPES else None
    if of is None:
        of = (tiny_flux.family() if name == "flux" else tiny_driven.family(name)).network
    return present(control_target(of, PIXELS[name]))


def net(name: str, options: Mapping[str, Any]) -> Any:
    if name == "flux":
        return tiny_flux_control.net(**options)
    if name == "sd3":
        return tiny_sd3_control.net(tiny_driven.transformer("sd3").config, **options)
    return tiny_unet_control.net(name, **options)


def opened(folder: Path, of: str, kind: str, **options: Any) -> Any:
    net(kind, options).save_pretrained(folder / "edges")
    (found,) = open_controls(
        str(folder / "edges"), network(of), dtype=torch.float32, device=torch.device("cpu")
    ).values()
    return found


@pytest.mark.parametrize(
    ("of", "options"),
    [("flux", XLABS), ("sd3", {"depth": 4}), ("sd", {}), ("xl", {})],
)
def test_one_that_fits_is_opened_with_its_work(of: str, options: dict[str, Any], tmp_path: Path) -> None:
    """UNets that see a mask take those that do not."""
    work = opened(tmp_path, of, of, **options).card.work
    assert isinstance(work, ControlWork)
    assert work.image > 0
    assert work.shared == (of == "flux")


@pytest.mark.parametrize(
    ("of", "kind", "options", "told"),
    [
        ("flux", "flux", XLABS | {"patch_size": 1}, "pixels of a token 8, and the model's 16"),
        ("flux", "flux", {"doubles": 3}, "double blocks 3, and the model's 2"),
        ("flux", "flux", {"pooled_projection_dim": 12}, "width of pooled text 12"),
        ("sd", "sd", {"scaled": 8}, "pixels of a token 64, and the model's 32"),
        ("xl", "sd", {}, "width of pooled text None, and the model's 20"),
        ("sd", "sd", {"in_channels": 9}, "channels of latents 225, and the model's 256"),
        ("sd", "sd", {"cross_attention_dim": 32}, "width of text 32, and the model's 24"),
        ("sd", "sd", {"layers_per_block": 2}, "skip connections"),
        ("xl", "xl", {"projection_class_embeddings_input_dim": 60}, "width of pooled text 12"),
        ("sd3", "sd3", {"attention_head_dim": 32, "caption_projection_dim": 64}, "width of blocks 64"),
        ("sd3", "sd3", {"joint_attention_dim": 12}, "width of text 12"),
        ("sd3", "sd3", {"depth": 5}, "blocks 5, and the model's 4"),
        ("sd3", "sd3", {"in_channels": 8}, "channels of latents 32, and the model's 64"),
        ("sd3", "flux", {}, "is one of flux, and the model is of sd3"),
    ],
)
def test_one_that_does_not_fit_is_refused(
    of: str, kind: str, options: dict[str, Any], told: str, tmp_path: Path
) -> None:
    with pytest.raises(ControlMismatch, match=told):
        opened(tmp_path, of, kind, **options)
