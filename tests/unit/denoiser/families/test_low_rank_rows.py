"""Rows under LoRAs of their own in one forward: each equals PEFT's `set_adapters` of its LoRAs alone."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import cache
from itertools import cycle
from typing import Any, Final

import pytest
import torch
from diffusers.utils.peft_utils import set_weights_and_activate_adapters
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from giornata.packed.low_rank import SequenceLoras, low_rank
from giornata.packed.packing import BlockInputs, CachedTokens
from giornata.wire.values import BlockMode
from giornata_denoiser.engine.batch_tensors import assemble, place_inputs, with_low_ranks
from giornata_denoiser.families.network import ModelFamily
from giornata_denoiser.families.unet.network import network_of
from giornata_denoiser.rows.row import Row
from giornata_lab.bench.compute import tiny_flux, tiny_unet
from giornata_lab.bench.compute.tiny_flux import Spec
from tests.distances import distance
from tests.fakes import tiny_driven
from tests.fakes.tiny_driven import FAMILIES
from tests.present import present
from tests.unit.denoiser.engine.test_masked import Everything, Recorded, masked
from tests.unit.denoiser.families.test_driven import DIFFERENT, region_of

Chosen = tuple[tuple[str, float], ...]
"""A row's LoRAs and their scales."""
RANKS: Final[Mapping[str, tuple[int, int]]] = {"a": (4, 4), "b": (8, 16), "c": (16, 4)}
"""Rank and alpha by name."""
SIZE: Final = 0.1
"""Standard deviation of all factors."""


class Loras:
    """LoRAs `a` (attention), `b` (every layer) and `c` (every third layer), put into `module`: the oracle."""

    def __init__(self, module: Any, dtype: torch.dtype = torch.float64) -> None:
        layers = [path for path, part in module.named_modules() if isinstance(part, (nn.Linear, nn.Conv2d))]
        targets = {"a": [path for path in layers if ".att" in path], "b": layers, "c": layers[::3]}
        for name, (rank, alpha) in RANKS.items():
            config = LoraConfig(
                r=rank, lora_alpha=alpha, target_modules=targets[name], init_lora_weights=False
            )
            with warnings.catch_warnings():  # several LoRAs in one module are meant
                warnings.filterwarnings("ignore", "Already found a `peft_config`", UserWarning)
                inject_adapter_in_model(config, module, name)
        torch.manual_seed(5)
        for path, weight in module.named_parameters():
            if "lora_" in path:
                weight.data = SIZE * torch.randn(weight.shape, dtype=torch.float64).to(dtype)
                weight.requires_grad_(requires_grad=False)
        self.module = module.eval()
        self._sets: dict[Chosen, SequenceLoras | None] = {(): None}

    @contextmanager
    def alone(self, chosen: Chosen) -> Iterator[Any]:
        """The module under these LoRAs, as `set_adapters` has it."""
        parts = [part for part in self.module.modules() if isinstance(part, BaseTunerLayer)]
        for part in parts:
            part.enable_adapters(enabled=bool(chosen))
        if chosen:
            names, scales = zip(*chosen, strict=True)
            set_weights_and_activate_adapters(self.module, list(names), list(scales))
        yield self.module

    def tensors(self, name: str) -> dict[str, Tensor]:
        """One LoRA as its canonical file: alpha and rank folded in."""
        rank, alpha = RANKS[name]
        found: dict[str, Tensor] = {}
        for path, part in self.module.named_modules():
            if isinstance(part, BaseTunerLayer):
                layers: Any = part
                if name in layers.lora_A:
                    found[f"{path}.down"] = layers.lora_A[name].weight.detach()
                    found[f"{path}.up"] = layers.lora_B[name].weight.detach() * (alpha / rank)
        return found

    def set_of(self, chosen: Chosen) -> SequenceLoras | None:
        """The set of these LoRAs, the same object each time."""
        if chosen not in self._sets:
            self._sets[chosen] = low_rank(
                str(chosen), [(self.tensors(name), scale) for name, scale in chosen]
            )
        return self._sets[chosen]

    def sets(self, chosen: Sequence[Chosen]) -> list[SequenceLoras | None]:
        """Those of several rows."""
        return [self.set_of(each) for each in chosen]


EXACT = 1e-5
"""Tolerance over the largest value: diffusers turns positions and times in float32."""
NONE: Chosen = ()
CHOSEN: tuple[Chosen, ...] = (NONE, (("a", 1.0),), (("b", 0.7),), (("b", 0.7),), (("a", 0.4), ("c", 1.3)))
"""LoRAs of each of `SPECS`: two neighbours have one set."""
SPECS = (
    Spec("none", grid=(3, 5), text_tokens=5, steps=4, seed=1),
    Spec("attention", grid=(6, 4), text_tokens=9, steps=7, seed=2),
    Spec("all", grid=(4, 4), text_tokens=33, steps=3, seed=3),
    Spec("all again", grid=(4, 5), text_tokens=7, steps=5, seed=4),
    Spec("two", grid=(5, 3), text_tokens=6, steps=4, seed=5),
)


def close(found: Tensor, wanted: Tensor) -> None:
    """Within :data:`EXACT` of the largest value."""
    assert distance(found, wanted) <= EXACT


def predicted(
    of: ModelFamily,
    rows: Sequence[Row],
    low_ranks: Sequence[SequenceLoras | None],
    uses: Sequence[BlockInputs] = (),
) -> list[Tensor]:
    """The network's output of each sequence: positive ones, then negative ones."""
    assembly = assemble(
        of, rows, [place_inputs(row, of, each) for row, each in zip(rows, low_ranks, strict=True)]
    )
    owners = [*rows, *(row for row in rows if len(row.inputs.prompts) > 1)]
    uses = with_low_ranks(uses or [BlockInputs()] * len(owners), rows, low_ranks)
    with torch.inference_mode():
        out = of.network.predict(
            assembly.batch,
            torch.cat([row.latent for row in owners]),
            assembly.conditioning,
            [row.step for row in owners],
            uses=uses,
        )
    return list(torch.split(out, [row.computed_tokens for row in owners]))


# Flux


@cache
def flux() -> tuple[ModelFamily, Loras]:
    return tiny_flux.family(dtype=torch.float64), Loras(
        torch.nn.Module.to(tiny_flux.transformer(), torch.float64)
    )


def flux_alone(row: Row, chosen: Chosen, negative: bool = False) -> Tensor:
    """The module's own forward under PEFT."""
    prompt: Any = row.inputs.prompts[-1 if negative else 0]
    ids = torch.zeros(row.image_tokens, 3)
    ids[:, 1] = torch.arange(row.grid[0]).repeat_interleave(row.grid[1])
    ids[:, 2] = torch.arange(row.grid[1]).repeat(row.grid[0])
    with flux()[1].alone(chosen) as model, torch.no_grad():
        out: Tensor = model(
            hidden_states=row.latent[None],
            encoder_hidden_states=prompt.embeds[None],
            pooled_projections=prompt.pooled[None],
            timestep=row.track.times[row.step : row.step + 1] / 1000,
            img_ids=ids,
            txt_ids=torch.zeros(len(prompt.embeds), 3),
            guidance=torch.tensor([prompt.guidance_scale]),
            return_dict=False,
        )[0][0]
    return out


def test_flux_rows_equal_peft_alone() -> None:
    """Rows under all LoRAs, and both sequences of a guided row."""
    of, loras = flux()
    specs = [replace(spec, true_cfg_scale=2.0 if spec.job_id in {"all", "two"} else 1.0) for spec in SPECS]
    rows = [replace(tiny_flux.row(of, spec), step=index % 3) for index, spec in enumerate(specs)]
    found = predicted(of, rows, loras.sets(CHOSEN))
    for row, chosen, out in zip(rows, CHOSEN, found, strict=False):
        close(out, flux_alone(row, chosen))
        if chosen:  # else nothing would be tested
            assert (out - flux_alone(row, NONE)).abs().max() > 100 * EXACT
    for index, out in zip((2, 4), found[len(rows) :], strict=True):
        close(out, flux_alone(rows[index], CHOSEN[index], negative=True))


@pytest.mark.parametrize("mode", [BlockMode.KV, BlockMode.HIDDEN])
def test_masked_flux_rows_equal_full_ones_under_their_loras(mode: BlockMode) -> None:
    """Outside tokens whose keys and values are projected again are projected under the row's LoRAs."""
    of, loras = flux()
    rows = [masked(of, spec, [1, 2, 7]) for spec in SPECS]
    sets = loras.sets(CHOSEN)
    seen = [Everything() for _ in rows]
    whole = predicted(
        of, [replace(row, region=None) for row in rows], sets, [BlockInputs(recorder=e) for e in seen]
    )
    uses = [
        BlockInputs(CachedTokens((BlockMode.FULL, mode, mode, mode), Recorded(kept, row.region)))
        for row, kept in zip(rows, seen, strict=True)
        if row.region is not None
    ]
    for row, part, full in zip(rows, predicted(of, rows, sets, uses), whole, strict=True):
        close(part, full[present(row.region).computed])


# Driven transformers


@cache
def driven(name: str) -> Loras:
    return Loras(tiny_driven.transformer(name))


@pytest.mark.parametrize(("name", "alike"), list(zip(DIFFERENT, cycle([False, True]), strict=False)))
def test_driven_rows_equal_peft_alone_and_masked_ones_those_in_full(name: str, alike: bool) -> None:
    of, loras = tiny_driven.family(name), driven(name)
    specs = [replace(SPECS[0], seed=spec.seed) for spec in SPECS] if alike else SPECS
    rows = [replace(tiny_driven.row(of, spec), step=index % 3) for index, spec in enumerate(specs)]
    sets, seen = loras.sets(CHOSEN), [Everything() for _ in rows]
    whole = predicted(of, rows, sets, [BlockInputs(recorder=each) for each in seen])
    for row, chosen, out in zip(rows, CHOSEN, whole, strict=True):
        with loras.alone(chosen) as model, torch.no_grad():
            close(out, FAMILIES[name].alone(model, row))
    regions = [region_of(row, (1, 2, 7)) for row in rows]
    modes = (BlockMode.HIDDEN, BlockMode.KV, BlockMode.HIDDEN, BlockMode.HIDDEN)
    uses = [
        BlockInputs(CachedTokens(modes, Recorded(kept, region)))
        for kept, region in zip(seen, regions, strict=True)
    ]
    some = [replace(row, region=region) for row, region in zip(rows, regions, strict=True)]
    for part, full, region in zip(predicted(of, some, sets, uses), whole, regions, strict=True):
        close(part, full[region.computed])


# UNets


SMALL: Mapping[str, Mapping[str, Any]] = {
    "sd": {
        "block_out_channels": (16, 32),
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    },
    "shallow": {},
}
"""Of two levels each, by shape."""


@cache
def unet(shape: str) -> tuple[Any, Loras]:
    model = tiny_unet.unet(shape, dtype=torch.float64, **SMALL[shape])
    return network_of(deepcopy(model)), Loras(model)


def unet_predicted(
    of: Any,
    rows: Sequence[Any],
    sets: Sequence[SequenceLoras | None],
    where: Sequence[Any],
    uses: Sequence[BlockInputs],
) -> list[Tensor]:
    sequences = [
        tiny_unet.inputs(of, row, region)._replace(
            prepared=of.prepare(
                of.text.prompt(row.text, row.grid, 1.0), row.times, row.conditioning, (), low_rank=each
            )
        )
        for row, region, each in zip(rows, where, sets, strict=True)
    ]
    with torch.inference_mode():
        out = of.predict(
            of.assemble(sequences),
            torch.cat([row.latent for row in rows]),
            [row.conditioning for row in rows],
            [row.step for row in rows],
            uses=[replace(use, low_rank=each) for use, each in zip(uses, sets, strict=True)],
        )
    lengths = [
        len(row.latent) if region is None else len(region.computed)
        for row, region in zip(rows, where, strict=True)
    ]
    return list(torch.split(out, lengths))


@pytest.mark.parametrize("shape", SMALL)
def test_unet_rows_equal_peft_alone_as_maps_and_as_tiles(shape: str) -> None:
    """Linear layers, convolutions, the timestep's layers, and what is made of text when a row joins."""
    of, loras = unet(shape)
    grids = ((4, 4), (4, 4), (3, 4), (3, 4), (4, 4))
    rows = [
        tiny_unet.picture(of, grid, words=3 + index, step=index % 2, seed=index)
        for index, grid in enumerate(grids)
    ]
    sets, seen = loras.sets(CHOSEN), [tiny_unet.Everything() for _ in rows]
    whole = unet_predicted(of, rows, sets, [None] * len(rows), [BlockInputs(recorder=each) for each in seen])
    for row, chosen, out in zip(rows, CHOSEN, whole, strict=True):
        with loras.alone(chosen) as model:
            close(out, tiny_unet.alone(model, of, row))
    lines = {3: ("#...", ".##.", "...."), 4: ("#...", ".##.", "....", "...#")}
    where = [tiny_unet.drawn(*lines[row.grid[0]]) for row in rows]
    uses = [
        BlockInputs(
            CachedTokens((BlockMode.KV,) * len(of.blocks), tiny_unet.RecordedUnetTokens(kept, region))
        )
        for kept, region in zip(seen, where, strict=True)
    ]
    parts = unet_predicted(of, rows, sets, where, uses)
    for part, full, region in zip(parts, whole, where, strict=True):
        close(part, full[region.computed])
