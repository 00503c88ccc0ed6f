"""ControlNets: what a folder tells, what each sees, adds and computes, and what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import ControlNetModel, FluxControlNetModel, SD3ControlNetModel
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from giornata.control.layout import (
    BlockCounts,
    ControlMismatch,
    control_input,
    flux_layout,
    sd3_layout,
    sum_residuals,
)
from giornata.control.networks import ControlConditions, ControlNet, ControlSequenceStep, ControlText, load
from giornata.model_cards import read_control_card
from giornata.planning.operations import control_work, work_of, work_of_weights
from giornata.wire.adapters import ControlCard, ControlInput, ControlKind, ControlWork
from giornata.wire.controlnets import ControlBase
from giornata_lab.bench.compute import tiny_flux, tiny_unet
from tests.fakes import tiny_driven, tiny_flux_control, tiny_sd3_control, tiny_unet_control

FLUX_CONFIG = {"_class_name": "FluxControlNetModel", "joint_attention_dim": 4096, "num_mode": None}
UNET_CONFIG = {"_class_name": "ControlNetModel", "cross_attention_dim": 768}


def folder(at: Path, config: object, weights: bytes = b"weights") -> Path:
    (at / "config.json").write_text(json.dumps(config))
    if weights:
        (at / "diffusion_pytorch_model.safetensors").write_bytes(weights)
    return at


@pytest.mark.parametrize(
    ("config", "kind", "channels", "modes"),
    [
        (FLUX_CONFIG, ControlKind.FLUX, 4096, 0),
        ({**FLUX_CONFIG, "num_mode": 10}, ControlKind.FLUX, 4096, 10),
        ({**FLUX_CONFIG, "_class_name": "SD3ControlNetModel"}, ControlKind.SD3, 4096, 0),
        (UNET_CONFIG, ControlKind.UNET, 768, 0),
        (
            {**UNET_CONFIG, "addition_embed_type": "text_time", "cross_attention_dim": 2048},
            ControlKind.UNET,
            2048,
            0,
        ),
    ],
)
def test_a_card_tells_what_the_folder_holds(
    config: dict[str, Any], kind: ControlKind, channels: int, modes: int, tmp_path: Path
) -> None:
    card = read_control_card(folder(tmp_path, config), "outline")
    assert (card.name, card.kind, card.text_channels, card.modes) == ("outline", kind, channels, modes)
    assert (card.weight_bytes, card.sees) == (len(b"weights"), control_input(config))


def test_the_name_is_the_folders_and_the_digest_follows_the_weights(tmp_path: Path) -> None:
    first = read_control_card(folder(tmp_path, FLUX_CONFIG))
    again = read_control_card(folder(tmp_path, FLUX_CONFIG, b"others!"))
    assert first.name == again.name == tmp_path.name
    assert first.digest != again.digest


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({**UNET_CONFIG, "_class_name": "ControlNetUnionModel"}, "served ControlNets are"),
        ({**UNET_CONFIG, "global_pool_conditions": True}, "global_pool_conditions is True; served is False"),
        ({**UNET_CONFIG, "addition_embed_type": "image"}, "served is None or text_time"),
        ({**UNET_CONFIG, "cross_attention_dim": [768, 768]}, "a number of channels"),
        ({"_class_name": "SD3ControlNetModel", "joint_attention_dim": None}, "joint_attention_dim is None"),
        (
            {**FLUX_CONFIG, "_class_name": "SD3ControlNetModel", "use_pos_embed": False},
            "no positions of its own",
        ),
        (
            {**FLUX_CONFIG, "_class_name": "SD3ControlNetModel", "pos_embed_type": None},
            "no positions of its own",
        ),
        (
            {**FLUX_CONFIG, "_class_name": "SD3ControlNetModel", "extra_conditioning_channels": 3},
            "3 extra channels",
        ),
        ([], "does not hold a JSON object"),
    ],
)
def test_what_is_not_served_is_refused(config: object, said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        read_control_card(folder(tmp_path, config))


def test_a_folder_needs_a_configuration_and_safetensors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json is missing"):
        read_control_card(tmp_path)
    with pytest.raises(ValueError, match=r"no \*\.safetensors"):
        read_control_card(folder(tmp_path, FLUX_CONFIG, b""))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        read_control_card(tmp_path)


# What a ControlNet sees by its configuration, and which of its samples goes behind which block, as in
# diffusers.


COUNTS = st.integers(1, 20)


@given(double=COUNTS, single=COUNTS, doubles=COUNTS, singles=COUNTS, repeats=st.booleans())
def test_it_is_the_one_that_diffusers_adds(
    double: int, single: int, doubles: int, singles: int, repeats: bool
) -> None:
    base, samples = BlockCounts(double, single), BlockCounts(min(doubles, double), min(singles, single))
    interval = math.ceil(double / samples.double)
    expected = [block % samples.double if repeats else block // interval for block in range(double)]
    interval = math.ceil(single / samples.single)
    expected += [samples.double + block // interval for block in range(single)]
    assert flux_layout(base, samples, repeats=repeats) == tuple(expected)
    assert all(index < samples.double + samples.single for index in expected)


def test_without_samples_of_a_kind_nothing_is_added_there() -> None:
    base = BlockCounts(2, 3)
    assert flux_layout(base, BlockCounts(1, 0)) == (0, 0, None, None, None)
    assert flux_layout(base, BlockCounts(0, 1)) == (None, None, 0, 0, 0)


@given(blocks=st.integers(1, 40), samples=COUNTS)
def test_of_sd3_it_is_the_one_that_diffusers_adds(blocks: int, samples: int) -> None:
    samples = min(samples, blocks)
    interval = blocks / samples
    last_is_text_free = [int(block / interval) for block in range(blocks - 1)]
    assert sd3_layout(blocks, samples) == (*last_is_text_free, None)


NETS = st.integers(1, 8).flatmap(
    lambda blocks: st.lists(
        st.lists(st.one_of(st.none(), st.integers(0, 3)), min_size=blocks, max_size=blocks).map(tuple),
        min_size=1,
        max_size=3,
    )
)


@given(nets=NETS)
def test_a_sum_holds_what_every_net_adds_behind_its_blocks(nets: list[tuple[int | None, ...]]) -> None:
    found = sum_residuals(nets)
    for block, index in enumerate(found.behind):
        wanted = {(net, behind[block]) for net, behind in enumerate(nets) if behind[block] is not None}
        assert (set() if index is None else set(found.parts[index])) == wanted
    assert len(set(found.parts)) == len(found.parts), "equal sums are computed once"
    assert [found.behind.index(index) for index in range(len(found.parts))] == list(found.first)


FLUX = {
    "num_layers": 1, "num_single_layers": 0, "attention_head_dim": 8, "num_attention_heads": 2,
    "joint_attention_dim": 8, "pooled_projection_dim": 8, "axes_dims_rope": [4, 2, 2], "in_channels": 8,
}  # fmt: skip
SD3 = {
    "num_layers": 1, "attention_head_dim": 8, "num_attention_heads": 2, "joint_attention_dim": 8,
    "caption_projection_dim": 16, "pooled_projection_dim": 8, "in_channels": 4, "sample_size": 8,
    "pos_embed_max_size": 8,
}  # fmt: skip
UNET = {
    "block_out_channels": (8,), "down_block_types": ("DownBlock2D",), "layers_per_block": 1, "norm_num_groups": 4,
    "cross_attention_dim": 8,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "shape", "options", "expected"),
    [
        (FluxControlNetModel, FLUX, {}, ControlInput.USUAL),
        (FluxControlNetModel, FLUX, {"conditioning_embedding_channels": 8}, ControlInput.PIXELS),
        (SD3ControlNetModel, SD3, {}, ControlInput.UNSHIFTED),
        (SD3ControlNetModel, SD3, {"force_zeros_for_pooled_projection": False}, ControlInput.USUAL),
        (SD3ControlNetModel, SD3, {"extra_conditioning_channels": 1}, ControlInput.MASKED),
        (ControlNetModel, UNET, {}, ControlInput.USUAL),
    ],
)
def test_the_configuration_of_diffusers_tells(
    kind: Any, shape: dict[str, Any], options: dict[str, Any], expected: ControlInput
) -> None:
    made = kind(**shape, **options)
    assert control_input({"_class_name": kind.__name__, **made.config}) is expected
    if kind is FluxControlNetModel:
        assert (made.input_hint_block is not None) == (expected is ControlInput.PIXELS)


def test_a_file_may_leave_out_defaults() -> None:
    assert control_input({"_class_name": "SD3ControlNetModel"}) is ControlInput.UNSHIFTED
    assert control_input({"_class_name": "FluxControlNetModel"}) is ControlInput.USUAL


# What a ControlNet is said to compute in a step is what torch counts in its forward.


WORDS = 77
"""CLIP's, which UNets attend to; of others any number does."""


def counted(net: ControlNet, given: ControlConditions, latent_channels: int) -> float:
    """Multiplications of one sequence's step; every one is followed by an addition, and torch counts both."""
    latents = torch.randn(given.grid[0] * given.grid[1], latent_channels)
    opened = net.open(given)
    # in this form attention is two products of matrices, which are counted; the processor's own kernel is not
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        samples = list(net.run([ControlSequenceStep(opened, 0, latents)]))
    assert samples
    return float(counter.get_total_flops()) / 2


def base(kind: ControlKind, latent_channels: int) -> ControlBase:
    return ControlBase(
        kind=kind, channels=(), latent_channels=latent_channels, token_pixels=16, text_channels=8
    )


def words(channels: int, tokens: int, *, pooled: int | None = None, sizes: bool = False) -> ControlText:
    return ControlText(
        torch.randn(tokens, channels),
        None if pooled is None else torch.randn(pooled),
        torch.rand(6) if sizes else None,
    )


@pytest.mark.parametrize(("shape", "side", "options", "grid"), [
    ("sd", 8, {}, (2, 3)), ("xl", 4, {"layers_per_block": 2}, (2, 3)), ("shallow", 8, {}, (3, 4)),
])  # fmt: skip
def test_of_unets(
    tmp_path: Path, shape: str, side: int, options: dict[str, Any], grid: tuple[int, int]
) -> None:
    tiny_unet_control.net(shape, **options).save_pretrained(tmp_path)
    net, channels = load(tmp_path, torch.float32, torch.device("cpu")), 4 * side**2
    pooled = tiny_unet.POOLED if shape != "sd" else None
    text = words(tiny_unet.CROSS, WORDS, pooled=pooled, sizes=shape != "sd")
    hint = torch.rand(3, *(4 * side * tiles for tiles in grid))
    found = counted(net, ControlConditions(hint, grid, (text,), torch.tensor([500.0])), channels)
    work, image = net.work(base(ControlKind.UNET, channels)), grid[0] * grid[1]
    assert control_work(work, text=0, image=image, sequences=1) == pytest.approx(found, rel=1e-9)
    assert control_work(work, text=0, image=image, sequences=2) == pytest.approx(found), "each has its own"


@pytest.mark.parametrize(
    ("kind", "shape", "tokens", "grid"),
    [
        (ControlKind.SD3, {}, 30, (5, 4)),
        (ControlKind.SD3, {"depth": 1, "dual_attention_layers": ()}, 5, (2, 3)),
        (ControlKind.FLUX, (2, 1), 30, (5, 4)),
        (ControlKind.FLUX, (1, 0), 5, (2, 3)),
        (ControlKind.FLUX, (1, 3), 5, (5, 4)),
    ],
)
def test_of_transformers(
    tmp_path: Path, kind: ControlKind, shape: Any, tokens: int, grid: tuple[int, int]
) -> None:
    """A negative prompt of Flux gets the positive's samples: two sequences cost what one does."""
    flux, image = kind is ControlKind.FLUX, grid[0] * grid[1]
    if flux:
        tiny_flux_control.net(*shape).save_pretrained(tmp_path)
        text, channels = words(tiny_flux.JOINT_DIM, tokens, pooled=tiny_flux.POOLED_DIM), tiny_flux.LATENT
    else:
        tiny_sd3_control.net(tiny_driven.transformer("sd3").config, **shape).save_pretrained(tmp_path)
        text, channels = words(tiny_driven.TEXT, tokens, pooled=tiny_driven.POOLED), tiny_driven.LATENT
    net = load(tmp_path, torch.float32, torch.device("cpu"))
    given = ControlConditions(torch.randn(image, channels), grid, (text,), torch.tensor([500.0]))
    found, work = counted(net, given, channels), net.work(base(kind, channels))
    assert control_work(work, text=tokens, image=image, sequences=1) == pytest.approx(found, rel=1e-9)
    both = control_work(work, text=tokens, image=image, sequences=2)
    assert both * (1 + flux) == pytest.approx(found, rel=1e-9)


def test_a_card_of_before_tells_its_size_alone() -> None:
    card = ControlCard(name="edges", digest="e", kind=ControlKind.UNET, text_channels=8, weight_bytes=200)
    assert work_of(card) == work_of_weights(200, shared=False) == ControlWork(text=100, image=100)
    assert work_of(card.model_copy(update={"kind": ControlKind.FLUX})).shared
    told = ControlWork(image=5, pair=1)
    assert work_of(card.model_copy(update={"work": told})) == told
    assert control_work(told, text=3, image=4, sequences=2) == 5 * 4 + 16


def unet(folder: Path) -> ControlNet:
    tiny_unet_control.net("xl").save_pretrained(folder)
    return load(folder, torch.float32, torch.device("cpu"))


def sd3(folder: Path) -> ControlNet:
    tiny_sd3_control.net(tiny_driven.transformer("sd3").config).save_pretrained(folder)
    return load(folder, torch.float32, torch.device("cpu"))


def flux(folder: Path) -> ControlNet:
    tiny_flux_control.net(2, 1).save_pretrained(folder)
    return load(folder, torch.float32, torch.device("cpu"))


def conditions(made: Callable[[Path], ControlNet], grid: tuple[int, int], tokens: int) -> ControlConditions:
    """Of a row with two sequences and three steps."""
    image, times = grid[0] * grid[1], torch.tensor([901.0, 501.0, 37.0])
    if made is unet:
        hint = torch.rand(3, *(16 * tiles for tiles in grid))
        of = [words(tiny_unet.CROSS, tokens, pooled=tiny_unet.POOLED, sizes=True) for _ in range(2)]
    elif made is sd3:
        hint = torch.randn(image, tiny_driven.LATENT)
        of = [words(tiny_driven.TEXT, tokens, pooled=tiny_driven.POOLED) for _ in range(2)]
    else:
        hint = torch.randn(image, tiny_flux.LATENT)
        of = [words(tiny_flux.JOINT_DIM, tokens, pooled=tiny_flux.POOLED_DIM) for _ in range(2)]
    return ControlConditions(hint, grid, tuple(of), times)


@pytest.mark.parametrize(
    ("made", "channels"), [(unet, 64), (sd3, tiny_driven.LATENT), (flux, tiny_flux.LATENT)]
)
@torch.inference_mode()
def test_steps_of_different_rows_in_one_run_are_what_each_is_alone(
    made: Callable[[Path], ControlNet], channels: int, tmp_path: Path
) -> None:
    """What each is alone the conformance suite compares with diffusers' pipelines."""
    net = made(tmp_path)
    opened = [
        net.open(conditions(made, grid, tokens)) for grid, tokens in (((2, 3), 5), ((3, 2), 5), ((2, 3), 4))
    ]
    latents = torch.randn(6, channels)
    items = [
        ControlSequenceStep(opened[row], step, latents, 0 if made is flux else sequence)
        for row, step, sequence in ((0, 0, 0), (0, 0, 1), (1, 2, 0), (2, 1, 1), (0, 2, 0))
    ]
    together = list(net.run(items))
    for place, item in enumerate(items):
        for sample, alone in zip(together, net.run([item]), strict=True):
            torch.testing.assert_close(sample[place], alone[0], atol=1e-4, rtol=1e-4)
    last = together[-1]
    assert (last[0] - last[4]).abs().max() > 1e-3, "the step is seen"
    assert made is flux or (last[0] - last[1]).abs().max() > 1e-3, "the text is seen"


OF_XL = words(tiny_unet.CROSS, 5, pooled=tiny_unet.POOLED, sizes=True)
OF_SD3 = words(tiny_driven.TEXT, 5, pooled=tiny_driven.POOLED)


@pytest.mark.parametrize(
    ("made", "hint", "text", "told"),
    [
        (unet, (3, 32, 32), words(tiny_unet.CROSS + 8, 5), "width 24, and the model has 32"),
        (unet, (3, 32, 32), words(tiny_unet.CROSS, 5), "pooled"),
        (unet, (1, 32, 32), OF_XL, "was given"),
        (sd3, (4, 64), words(tiny_driven.TEXT, 5), "pooled"),
        (sd3, (4, 68), OF_SD3, r"\(4, 64\) tokens and channels, and was given \(4, 68\)"),
    ],
)
def test_what_is_not_the_rows_is_refused(
    made: Callable[[Path], ControlNet], hint: tuple[int, ...], text: ControlText, told: str, tmp_path: Path
) -> None:
    with pytest.raises(ControlMismatch, match=told):
        made(tmp_path).open(ControlConditions(torch.zeros(hint), (2, 2), (text,), torch.zeros(1)))
