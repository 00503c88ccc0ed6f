"""Quantised weights: which layers have them, who is refused, and what rows make of them where torchao is installed."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from giornata.wire.errors import Failed
from giornata_denoiser.checkpoint import open_checkpoint
from giornata_denoiser.choices import WeightQuantization
from giornata_denoiser.config import DenoiserConfig
from giornata_denoiser.families import weights
from giornata_denoiser.families.flux import FluxInpaint
from giornata_denoiser.families.weights import check, quantize, quantized_layers
from giornata_lab.bench.compute import tiny_flux
from giornata_lab.bench.compute.rows import changed
from giornata_lab.bench.compute.tiny_flux import Spec
from tests.fakes import tiny_driven
from tests.unit.denoiser.engine.edits import engine, finished
from tests.unit.denoiser.families.test_driven import edit, masked_row

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")
DRIVEN = ["sd3", "chroma", "qwen-image", "qwen-image-2.1", "flux2", "flux2-klein", "z-image"]
KINDS = [WeightQuantization.INT8, WeightQuantization.FLOAT8]
torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")


def test_layers_of_blocks_that_tokens_pass_are_chosen() -> None:
    model = tiny_flux.transformer()
    assert quantized_layers(model, 1) == (
        *(
            f"transformer_blocks.{n}.{layer}"
            for n in range(2)
            for layer in (
                *(f"attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0")),
                *(f"attn.{name}" for name in ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")),
                *("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2"),
            )
        ),
        *(
            f"single_transformer_blocks.{n}.{layer}"
            for n in range(2)
            for layer in ("proj_mlp", "proj_out", "attn.to_q", "attn.to_k", "attn.to_v")
        ),
    )
    width = model.inner_dim
    assert quantized_layers(model, width) == quantized_layers(model, 1)
    assert quantized_layers(model, width + 1) == ()


@pytest.mark.parametrize("name", DRIVEN)
def test_what_enters_leaves_and_modulates_is_not_chosen(name: str) -> None:
    model = tiny_driven.transformer(name)
    paths = quantized_layers(model, 1)
    blocks = {path.split(".")[1] for path in paths}
    lists = [part for part in ("transformer_blocks", "layers") if hasattr(model, part)]
    assert len(blocks) >= len(getattr(model, lists[0])), "some layers of every block"
    assert not [path for path in paths if "mod" in path or "norm" in path or "embed" in path]
    assert not {"proj_out", "x_embedder", "img_in", "context_embedder"}.intersection(paths)


@pytest.mark.parametrize("how", KINDS)
def test_a_processor_is_refused_before_anything_is_loaded(how: WeightQuantization) -> None:
    with pytest.raises(
        Failed, match=rf"GIORNATA_QUANTIZE={how} needs a CUDA device.*Received: cpu. Accepted: off"
    ):
        open_checkpoint(DenoiserConfig(model=".", device="cpu", quantize=how))


def test_a_denoiser_without_torchao_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "find_spec", lambda _: None)
    with pytest.raises(
        Failed, match=r"`quantize`.*constraints.txt torchao.*EXTRAS=\[quantize\].*Received: no torchao"
    ):
        check(WeightQuantization.INT8, GPU)
    check(WeightQuantization.OFF, GPU)
    check(WeightQuantization.OFF, CPU)
    monkeypatch.setattr(weights, "find_spec", lambda _: object())
    check(WeightQuantization.FLOAT8, GPU)


def quantized(model: Any, how: WeightQuantization) -> Any:
    found = deepcopy(model)
    quantize(found, how, CPU, least=1)
    return found


@torchao
@pytest.mark.parametrize("how", KINDS)
def test_rows_over_quantised_flux_are_near_and_equal_each_row_alone(how: WeightQuantization) -> None:
    model = tiny_flux.transformer()
    fewer = quantized(model, how)
    assert type(fewer.transformer_blocks[0].ff.net[2].weight) is not type(fewer.proj_out.weight)
    plain, of = (tiny_flux.family(FluxInpaint(each)) for each in (model, fewer))
    rows = [tiny_flux.row(of, Spec(f"r{n}", grid=(3, 4 + n), steps=3, seed=n)) for n in range(2)]
    made = engine(of)
    made.batch.submit(rows)
    together = finished(made)
    for row in rows:
        alone, exact = engine(of), engine(plain)
        alone.batch.submit([row])
        exact.batch.submit([replace(row)])
        found = finished(alone)[row.key.job_id].latent
        torch.testing.assert_close(together[row.key.job_id].latent, found, atol=1e-5, rtol=0)
        far = (finished(exact)[row.key.job_id].latent - found).abs().mean()
        assert 0 < far < 0.2, "the weights are others, and near"


@torchao
@pytest.mark.parametrize("name", DRIVEN)
def test_quantised_driven_families_compute_masked_rows_too(name: str) -> None:
    model = torch.nn.Module.to(tiny_driven.transformer(name), torch.float32)
    kind = tiny_driven.FAMILIES[name].network
    network = kind(quantized(model, WeightQuantization.INT8))
    of = replace(tiny_driven.family(name), network=network, text=network.text)
    made = engine(of)
    row = changed(masked_row(edit(of, Spec(steps=3))), renewed_every=3)
    made.batch.submit([row])
    assert all(row.latent.isfinite().all() for row in finished(made).values())
