"""Step caches and quantised weights on a device: rows are those of the CPU, and equal each row alone."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from giornata_denoiser.choices import CacheForm, WeightQuantization
from giornata_denoiser.families.flux import FluxInpaint
from giornata_denoiser.families.weights import quantize, quantized_layers
from giornata_denoiser.rows.parts import TaylorRule
from giornata_denoiser.rows.row import Row
from giornata_lab.bench.compute import tiny_flux
from giornata_lab.bench.compute.tiny_flux import Spec
from tests.fakes.step_caches import taylor
from tests.lab.gpu.engines import FLOAT32, GRID, edit, family, finished, latents, template

CPU = torch.device("cpu")
ALLOCATED = 512
"""The least that torch's allocator takes for a tensor."""
RULES: list[TaylorRule | None] = [taylor(2, 2, 3), None, taylor(3, 1, 2)]


def rows_of(where: torch.device, *, takes: bool) -> tuple[list[Row], dict[str, Tensor]]:
    of = family(where)
    specs = [Spec(f"r{n}", grid=GRID, steps=5 + n, seed=n) for n in range(len(RULES))]
    taken = template(of, frozenset({CacheForm.KV}), steps=3, bits=0) if takes else None
    plain = [edit(of, taken, spec) if takes else tiny_flux.row(of, spec) for spec in specs]
    rows = [replace(row, step_cache=rule) for row, rule in zip(plain, RULES, strict=True)]
    # Exact corrections: in 8 bits a level may round the other way, which is 0.002.
    return rows, latents(finished(of, rows, correction_bits=0))


@pytest.mark.parametrize("takes", [False, True])
def test_rows_with_caches_are_those_of_the_cpu(device: torch.device, *, takes: bool) -> None:
    _, wanted = rows_of(CPU, takes=takes)
    _, found = rows_of(device, takes=takes)
    for name, latent in wanted.items():
        torch.testing.assert_close(found[name], latent, atol=FLOAT32, rtol=0)


@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
@pytest.mark.parametrize("how", [WeightQuantization.INT8, WeightQuantization.FLOAT8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantised_weights_lie_on_the_device_and_take_half(
    cuda: torch.device, how: WeightQuantization, dtype: torch.dtype
) -> None:
    model = tiny_flux.transformer().to(dtype)
    paths = quantized_layers(model, 1)
    before = sum(model.get_submodule(path).weight.nbytes for path in paths)
    everything = sum(tensor.nbytes + ALLOCATED for tensor in model.parameters())  # all of it goes there
    held = torch.cuda.memory_allocated(cuda)
    quantize(model, how, cuda, least=1)
    assert torch.cuda.memory_allocated(cuda) - held < everything - before * (1 - 1.5 / dtype.itemsize)
    of = tiny_flux.family(FluxInpaint(model.to(cuda)))
    rows = [tiny_flux.row(of, Spec(f"r{n}", grid=(3, 4 + n), steps=3, seed=n)) for n in range(2)]
    together = latents(finished(of, rows))
    exact = latents(finished(family(cuda, dtype), rows))
    for row in rows:
        name = row.key.job_id
        alone = latents(finished(of, [row]))[name]
        atol = FLOAT32 if dtype == torch.float32 else 0.1
        torch.testing.assert_close(together[name], alone, atol=atol, rtol=0)
        assert (exact[name] - alone).float().abs().mean() < 0.3
