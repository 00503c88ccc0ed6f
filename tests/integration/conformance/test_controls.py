"""Rows under ControlNets end as diffusers' pipelines do, alone and in mixed batches; in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
from diffusers import (
    FluxControlNetPipeline,
    SD3MultiControlNetModel,
    StableDiffusion3ControlNetInpaintingPipeline,
)
from PIL import Image
from torch import Tensor

from giornata.families import Family
from giornata.wire.adapters import ControlInput
from giornata.wire.models import Sampler
from giornata_denoiser.rows.row import Row
from tests.distances import distance
from tests.integration.conformance.controls import (
    Control,
    Expanded,
    control,
    controlled,
    expected,
    under,
    wrapped,
)
from tests.integration.conformance.families import Asked, OpenFamily
from tests.integration.conformance.test_families import guided, plain
from tests.integration.painting import final_latent
from tests.integration.prepost.oracle import mask

Opened = Callable[[str], OpenFamily]
CLOSE: Final = 1e-5
"""Largest difference, relative to the largest value."""
TOLD: Final[dict[str, Any]] = {"force_zeros_for_pooled_projection": False}
MASKED: Final[dict[str, Any]] = {"extra_conditioning_channels": 1}
INSTANTX: Final[dict[str, Any]] = {"dual_attention_layers": (), "qk_norm": None}
BEGUN: Final[dict[str, Any]] = {"sampler": Sampler.HEUN, "strength": 0.6, "steps": 5}
XLABS: Final[dict[str, Any]] = {"conditioning_embedding_channels": 16, "patch_size": 2}
"""Such nets embed pixels themselves, and blocks take their samples in turns."""
REVERSED: Final[dict[str, Any]] = {"controlnet_conditioning_channel_order": "bgr"}


def made(of: OpenFamily, asked: Asked, controls: list[Control], job: str = "row") -> Row:
    """A generation of SD3, or another's edit, under ControlNets."""
    make = of.generation if of.case.family is Family.SD3 else of.edit
    return under(of, make, controls, asked, job)


def assert_equals(of: OpenFamily, row: Row, mine: Tensor, theirs: Tensor) -> None:
    """The latents are the pipeline's, and the ControlNets are seen."""
    assert distance(mine, theirs) <= CLOSE
    free = replace(row, adapters=type(row.adapters)())
    assert distance(final_latent(of.served, free), mine) > 1000 * CLOSE


@pytest.mark.parametrize(
    ("name", "how", "asked", "options", "depth", "acts"),
    [
        ("flux-inpaint", plain, {"strength": 0.6, "steps": 5}, {}, (1, 2), {"scale": 1.3, "end": 0.5}),
        ("flux-inpaint", plain, {"steps": 4}, {}, (2, 0), {"start": 0.25, "end": 0.75}),
        ("flux-inpaint", plain, {}, {"num_mode": 3}, (2, 1), {"mode": 2}),
        ("flux-inpaint", plain, {}, XLABS, (2, 1), {}),
        ("sd", guided, {}, {}, (), {}),
        ("sdxl", guided, {"sampler": Sampler.EULER, "steps": 4}, {}, (), {"start": 0.25, "end": 0.75}),
        ("sdxl-inpaint", plain, BEGUN, {}, (), {"scale": 1.3, "end": 0.5}),
        ("sd3", guided, {}, INSTANTX, (2,), {}),
        ("sd3", plain, {"steps": 4}, TOLD, (1,), {"scale": 1.3}),
        ("sd3", guided, {"steps": 4}, TOLD, (3,), {"start": 0.25, "end": 0.75}),
    ],
)
def test_a_row_equals_the_pipeline(
    name: str,
    how: Callable[..., Asked],
    asked: dict[str, Any],
    options: dict[str, Any],
    depth: tuple[int, ...],
    acts: dict[str, Any],
    exact_family: Opened,
    tmp_path: Path,
) -> None:
    of = exact_family(name)
    request, one = how(of, **asked), control(of, tmp_path / "net", depth=depth, options=options, **acts)
    seen = {"sd3": ControlInput.USUAL if options is TOLD else ControlInput.UNSHIFTED}
    assert one.sees is (ControlInput.PIXELS if options is XLABS else seen.get(name, ControlInput.USUAL))
    row = made(of, request, [one])
    assert_equals(of, row, controlled(of, [row], [one])["row"], expected(of, request, [one]))


def test_a_generation_of_flux_equals_the_pipeline(exact_family: Opened, tmp_path: Path) -> None:
    """Its control image is drawn before its noise."""
    of = exact_family("flux-inpaint")
    asked, one = plain(of, steps=4), control(of, tmp_path / "net", depth=(2, 1))
    row = under(of, of.generation, [one], asked, "row")
    theirs = expected(of, asked, [one], kind=FluxControlNetPipeline)
    assert_equals(of, row, controlled(of, [row], [one])["row"], theirs)


@pytest.mark.parametrize("options", [MASKED, MASKED | TOLD], ids=["usual", "told otherwise"])
def test_a_net_of_sd3_that_sees_the_mask_equals_the_pipeline(
    options: dict[str, Any], exact_family: Opened, tmp_path: Path
) -> None:
    """That pipeline completes a picture from noise alone: the mask is in the control image, and nothing is blended."""
    of = exact_family("sd3")
    asked, one = guided(of), control(of, tmp_path / "net", options=options)
    assert one.sees is ControlInput.MASKED
    row = made(of, asked, [one])
    image = row.adapters.controls[0].image
    assert image is not None
    assert image.shape == (35, 4 * 17)
    kind, shown = StableDiffusion3ControlNetInpaintingPipeline, Image.fromarray(mask(of.case.size))
    theirs = expected(of, asked, [one], kind=kind, control_mask=shown)
    assert_equals(of, row, controlled(of, [row], [one])["row"], theirs)


@pytest.mark.parametrize(
    ("name", "options"),
    [("sd3", TOLD), ("sd3", INSTANTX), ("sd3", MASKED), ("flux-fill", {}), ("flux-inpaint", {})],
)
def test_an_edit_equals_the_pipeline_whose_transformer_is_wrapped(
    name: str, options: dict[str, Any], exact_family: Opened, tmp_path: Path
) -> None:
    of = exact_family(name)
    asked, one = guided(of), control(of, tmp_path / "net", options=options)

    def edit(asked: Asked, job: str, **_: Any) -> Row:
        """These pipelines draw no control image before all else."""
        return of.edit(asked, job)

    row = under(of, edit, [one], asked, "edit")
    with wrapped(of, one, row):
        theirs = of.inpainted(asked, row).latents
    assert_equals(of, row, controlled(of, [row], [one])["edit"], theirs)


@pytest.mark.parametrize("name", ["sdxl", "flux-inpaint"])
def test_several_nets_are_summed(name: str, exact_family: Opened, tmp_path: Path) -> None:
    of = exact_family(name)
    unet = name == "sdxl"
    nets = [
        control(of, tmp_path / "0", seed=1, scale=0.7),
        control(of, tmp_path / "1", seed=2, scale=1.1, start=0.4, options=REVERSED if unet else {}),
        control(of, tmp_path / "2", seed=3, scale=0.4, end=0.2),
    ]
    asked = guided(of, sampler=Sampler.EULER, steps=5) if unet else plain(of, steps=5)
    row = made(of, asked, nets)
    assert_equals(of, row, controlled(of, [row], nets)["row"], expected(of, asked, nets))


def test_two_nets_of_sd3_are_summed(exact_family: Opened, tmp_path: Path) -> None:
    """Nets of one depth as in `SD3MultiControlNetModel`; of two, it drops what the first does not have."""
    of = exact_family("sd3")
    asked = plain(of, steps=5)  # guided, diffusers draws more of the first image before the second
    one, other, deep = (
        control(of, tmp_path / str(seed), depth=(depth,), seed=seed, options=TOLD, **acts)
        for seed, depth, acts in ((0, 1, {}), (1, 1, {"scale": 0.4, "start": 0.4}), (2, 3, {"scale": 1.1}))
    )
    rows = [made(of, asked, [one, other], "alike"), made(of, asked, [one, deep], "deep")]
    mine = controlled(of, rows, [one, other, deep])
    assert distance(mine["alike"], expected(of, asked, [one, other])) <= CLOSE
    whole = Expanded([one.net, deep.net], len(of.pipeline.transformer.transformer_blocks))
    assert distance(mine["deep"], expected(of, asked, [one, deep], multi=whole)) <= CLOSE
    multi: Any = SD3MultiControlNetModel
    dropped = expected(of, asked, [one, deep], multi=multi([one.net, deep.net]))
    assert distance(mine["deep"], dropped) > 1000 * CLOSE


@pytest.mark.parametrize("name", ["flux-inpaint", "sdxl-inpaint", "sd3"])
def test_rows_with_and_without_share_steps(name: str, exact_family: Opened, tmp_path: Path) -> None:
    """They differ in size, text, guidance, sampler and steps; of two, the ControlNets are the same."""
    of = exact_family(name)
    options, sampler = TOLD if name == "sd3" else {}, Sampler.HEUN if name == "sdxl-inpaint" else None
    how = plain if name == "flux-inpaint" else guided  # no pipeline with ControlNets has its true guidance
    one, other = (control(of, tmp_path / str(seed), seed=seed, options=options) for seed in range(2))
    weak = replace(one, scale=0.3, end=0.5)
    asked: dict[str, tuple[Asked, list[Control]]] = {
        "first": (how(of), [one]),
        "plain": (plain(of, seed=9, steps=2), []),
        "weak": (plain(of, size=of.case.other, sampler=sampler, steps=2), [weak, other]),
        "another": (how(of, prompt="a cat", seed=8, steps=5), [one]),
    }
    rows = [made(of, request, nets, job) for job, (request, nets) in asked.items()]
    mine = controlled(of, rows, [one, other])
    for row, (job, (request, nets)) in zip(rows, asked.items(), strict=True):
        if nets:
            assert_equals(of, row, mine[job], expected(of, request, nets))
        else:
            assert distance(mine[job], final_latent(of.served, row)) <= CLOSE


def test_a_controlnet_sees_a_prompt_in_chunks(exact_family: Opened, tmp_path: Path) -> None:
    """Its halves have texts of different lengths, and beside it is a row with a short prompt."""
    of = exact_family("sdxl")
    one = control(of, tmp_path / "net")
    long, short = guided(of, prompt=" ".join(["red"] * 80), steps=2), guided(of, steps=2)
    rows = [made(of, long, [one], "long"), made(of, short, [one], "short")]
    both, alone = controlled(of, rows, [one]), controlled(of, rows[:1], [one])
    assert distance(both["long"], alone["long"]) <= CLOSE
    assert_equals(of, rows[1], both["short"], expected(of, short, [one]))
