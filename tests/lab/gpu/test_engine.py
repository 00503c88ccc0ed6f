"""The engine on a device computes what it computes on the CPU, and lives through a lack of memory."""

from __future__ import annotations

import pytest
import torch

from giornata_denoiser.choices import CacheForm
from giornata_denoiser.engine.loading import device_for
from giornata_denoiser.rows.row import Row
from giornata_lab.bench.compute import tiny_flux
from giornata_lab.bench.compute.engines import BenchSetting, engine_with
from giornata_lab.bench.compute.models import TINY, flux
from giornata_lab.bench.compute.rows import Rows, changed
from giornata_lab.bench.compute.tiny_flux import Spec
from giornata_lab.bench.compute.workload import WorkloadEdit
from tests.lab.gpu.engines import FLOAT32, GRID, edit, family, finished, latents, template
from tests.unit.denoiser.engine import edits
from tests.unit.denoiser.engine.edits import FORMS

CPU = torch.device("cpu")


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_rows_in_full_are_those_of_the_cpu(device: torch.device, scale: float) -> None:
    specs = [
        Spec(name, grid=grid, steps=steps, true_cfg_scale=scale, seed=seed)
        for seed, (name, grid, steps) in enumerate([("a", (3, 4), 4), ("b", GRID, 5), ("c", (6, 5), 3)])
    ]
    found = []
    for where in (CPU, device):
        of = family(where)
        found.append(latents(finished(of, [tiny_flux.row(of, spec) for spec in specs])))
    for name in "abc":
        torch.testing.assert_close(found[1][name], found[0][name], atol=FLOAT32, rtol=0)


@pytest.mark.parametrize("forms", FORMS[:3], ids=["kv", "hidden", "both"])
@pytest.mark.parametrize("bits", [None, 0, 8])
def test_masked_rows_are_those_of_the_cpu(
    device: torch.device, forms: frozenset[CacheForm], bits: int | None
) -> None:
    """With corrections in so many bits, or without; what templates keep is exact, so that nothing rounds apart."""
    found = []
    for where in (CPU, device):
        of = family(where)
        taken = template(of, forms, steps=3, bits=0)
        rows = [
            edit(of, taken, Spec(name, steps=steps, seed=seed, true_cfg_scale=scale))
            for seed, (name, steps, scale) in enumerate([("a", 5, 1.0), ("b", 4, 2.0)])
        ]
        found.append(latents(finished(of, rows, correction_bits=bits)))
    atol = 10 * FLOAT32 if bits == 8 else FLOAT32  # a level of a correction may round the other way
    for name in "ab":
        torch.testing.assert_close(found[1][name], found[0][name], atol=atol, rtol=0)


@pytest.mark.parametrize("hit", [False, True])
def test_rows_that_keep_padding_are_near_those_of_the_cpu(device: torch.device, hit: bool) -> None:
    """A GPU keeps it in 8 bits, as it does what a miss makes of the picture outside of its mask."""
    found = []
    for where in (CPU, device):
        of = family(where)
        made = edit(
            of, template(of, frozenset({CacheForm.KV}), steps=3, bits=0), Spec("a", steps=5, padding_tokens=3)
        )
        row = made if hit else changed(made, template=None, renewed_every=3)
        found.append(latents(finished(of, [changed(row, keeps_padding=True)], correction_bits=8))["a"])
    assert (found[1] - found[0]).abs().max() < 0.05


def test_half_precision_stays_near_single(device: torch.device) -> None:
    """In bfloat16, a GPU attends with another kernel than in float32: packed, of variable lengths."""
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        of = family(device, dtype)
        taken = template(of, frozenset({CacheForm.KV}), steps=2)
        rows = [edit(of, taken, Spec(name, steps=2, seed=seed)) for seed, name in enumerate("ab")]
        found.append(latents(finished(of, rows, correction_bits=8)))
    for name in "ab":
        assert (found[1][name] - found[0][name]).abs().mean() < 0.05
        assert (found[0][name] - found[0]["a" if name == "b" else "b"]).abs().mean() > 0.5


def test_steps_give_the_device_work_without_waiting_for_it(cuda: torch.device) -> None:
    """Rows that join, and steps that go on: torch raises where a call would wait for what the stream has to do."""
    of = family(cuda, torch.bfloat16)
    taken = template(of, frozenset({CacheForm.KV}), steps=2)
    rows = [edit(of, taken, Spec(name, steps=9, seed=seed)) for seed, name in enumerate("ab")]
    engine = edits.engine(of, device=device_for(cuda, 1 << 30))
    engine.batch.submit(rows[:1])
    for _ in range(4):  # kernels are compiled, and the first row has its correction
        engine.step()
    engine.batch.submit([changed(rows[1], template=None, region=None)])
    torch.cuda.set_sync_debug_mode("error")
    try:
        reports = [engine.step() for _ in range(3)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(report is not None and not report.failed for report in reports)
    assert [len(report.advanced) for report in reports if report is not None] == [2, 2, 2]


def test_rows_that_do_not_fit_together_are_computed_alone(cuda: torch.device) -> None:
    """The process may have no more memory than lies between one row's step and that of eight."""
    shape = {**TINY, "num_attention_heads": 16, "attention_head_dim": 64, "axes_dims_rope": (16, 24, 24)}
    rows = Rows(
        flux(shape, torch.float32, cuda), side=48, text_tokens=32, setting=BenchSetting(corrected=False)
    )
    every = [rows.row(WorkloadEdit(index, 0, 0.2, 0.5, 0.5, steps=2), reuse=False) for index in range(8)]
    wanted, few = _stepped(rows, every[:1])
    _, many = _stepped(rows, every)
    torch.cuda.empty_cache()
    limit = torch.cuda.memory_reserved(cuda) + (few + many) // 2
    total = torch.cuda.get_device_properties(cuda).total_memory
    torch.cuda.set_per_process_memory_fraction(limit / total)
    failures = torch.cuda.memory_stats(cuda).get("num_ooms", 0)
    found, _ = _stepped(rows, every)
    assert torch.cuda.memory_stats(cuda)["num_ooms"] > failures, "memory was out"
    assert len(found) == len(every)
    torch.testing.assert_close(found[0].latent, wanted[0].latent, atol=FLOAT32, rtol=0)


def _stepped(rows: Rows, made: list[Row]) -> tuple[list[Row], int]:
    """The rows after a step, and the bytes that it took at most."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with engine_with(rows.family, rows=len(made)) as engine:
        engine.batch.submit(made)
        report = engine.step()
    assert report is not None
    assert report.failed == ()
    return list(report.advanced), torch.cuda.max_memory_allocated() - before
