"""A Flux ControlNet over packed rows, beside diffusers' own forward of each row."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.controlnets.controlnet_flux import FluxControlNetModel
from torch import Tensor

from giornata.packed import attention, elementwise
from giornata.packed.flux.blocks import FluxComponents
from giornata.packed.flux.forward import FluxForward
from giornata.packed.flux.modulation import Modulation, prepared
from giornata.packed.flux.projections import FluxProjections
from giornata.packed.low_rank_hooks import LowRankHooks
from giornata.packed.packing import layout
from giornata.packed.region import PackedBatch
from giornata.packed.tracing import UNTRACED
from tests.fakes.tiny_flux import JOINT_DIM, LATENT, POOLED_DIM

CPU = torch.device("cpu")
GRIDS = ((3, 4), (4, 4), (2, 3))


def net() -> Any:
    torch.manual_seed(0)
    kind: Any = FluxControlNetModel
    made = kind(
        in_channels=LATENT,
        num_layers=2,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=JOINT_DIM,
        pooled_projection_dim=POOLED_DIM,
        guidance_embeds=True,
        axes_dims_rope=(4, 6, 6),
    )
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if name.startswith("controlnet_"):  # zeros before training
                weight.normal_(0, 0.1)
            elif ".attn." in name:
                weight.mul_(2.0)
    return made.eval().requires_grad_(requires_grad=False)


def ids(grid: tuple[int, int]) -> Tensor:
    found = torch.zeros(grid[0] * grid[1], 3)
    found[:, 1] = torch.arange(grid[0]).repeat_interleave(grid[1])
    found[:, 2] = torch.arange(grid[1]).repeat(grid[0])
    return found


def test_packed_samples_equal_those_of_each_row_alone() -> None:
    model = net()
    texts = [torch.randn(4 + i, JOINT_DIM) for i in range(3)]
    pooled, times = torch.randn(3, POOLED_DIM), torch.tensor([900.0, 500.0, 40.0])
    latents, conditions = ([torch.randn(h * w, LATENT) for h, w in GRIDS] for _ in range(2))
    guidance = torch.tensor([3.5, 1.0, 2.0])
    places = [ids(grid) for grid in GRIDS]
    with torch.inference_mode():
        whole = [
            model(
                hidden_states=latents[i][None],
                controlnet_cond=conditions[i][None],
                encoder_hidden_states=texts[i][None],
                pooled_projections=pooled[i : i + 1],
                timestep=times[i : i + 1] / 1000,
                guidance=guidance[i : i + 1],
                txt_ids=torch.zeros(len(texts[i]), 3),
                img_ids=places[i],
                return_dict=False,
            )
            for i in range(3)
        ]
        vectors = prepared(model, model.time_text_embed(times, guidance * 1000, pooled))
        rotary = [
            model.pos_embed(torch.cat((torch.zeros(len(text), 3), place)))
            for text, place in zip(texts, places, strict=True)
        ]
        sequences = PackedBatch(
            layout([len(text) for text in texts], [len(place) for place in places]),
            (torch.cat([c for c, _ in rotary]), torch.cat([s for _, s in rotary])),
            (None, None, None),
        )
        each = elementwise.choose(CPU, torch.float32)
        attend = attention.choose(CPU, torch.float32, each.gather)
        parts = FluxComponents(model, FluxProjections(model), attend, each, LowRankHooks(model))
        modulation = Modulation(model, list(torch.split(vectors, 1)), (0, 0, 0))
        forward = FluxForward(parts, sequences, modulation, (), trace=UNTRACED)
        text = model.context_embedder(torch.cat(texts))
        hint = model.controlnet_x_embedder(torch.cat(conditions))
        packed = [
            torch.split(s, [len(p) for p in places]) for s in forward.samples(text, torch.cat(latents), hint)
        ]
    assert len(packed) == 3
    for i, (doubles, singles) in enumerate(whole):
        for mine, theirs in zip(packed, (*doubles, *singles), strict=True):
            torch.testing.assert_close(mine[i], theirs[0], atol=1e-5 * float(theirs.abs().max()), rtol=0)
            assert theirs.abs().max() > 0.1, "the comparison sees samples"
