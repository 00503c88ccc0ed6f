"""A family is one folder and one table entry: a toy one is loaded, rehearsed, batched, recorded and reused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path

import pytest
import torch
from diffusers import FluxPipeline
from torch import Tensor

from giornata.families import Family as FamilyName
from giornata.packed.compute_set import make_region
from giornata.scheduling.batch import Capacity, RowKey
from giornata.tensors import pack, unpack
from giornata.wire.errors import SchemaMismatch
from giornata.wire.models import Sampler
from giornata_denoiser import checkpoint as checkpoints
from giornata_denoiser.checkpoint import Checkpoint
from giornata_denoiser.choices import EXACT, CacheForm
from giornata_denoiser.engine.batch_tensors import place_inputs
from giornata_denoiser.engine.engine import Engine
from giornata_denoiser.engine.rehearsal import rehearse
from giornata_denoiser.engine.step_plan import ReuseOptions
from giornata_denoiser.families.rows import build_row, text_shapes
from giornata_denoiser.rows.row import GENERATOR, RecordingSpec, Row, Snapshot
from giornata_denoiser.rows.template import CachedTemplate
from tests.fakes.toy_family import ADDED, TwoStep, load_toy

FLOAT32 = 1e-5
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint: Callable[[FamilyName], Path]) -> Checkpoint:
    folder = tiny_checkpoint(FamilyName.FLUX_INPAINT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "LOADERS", {FamilyName.FLUX_INPAINT: load_toy})
        return checkpoints.load(folder, dtype=torch.float32, device=CPU)


def row_of(
    checkpoint: Checkpoint,
    name: str,
    grid: tuple[int, int] = (3, 4),
    *,
    steps: int = 4,
    seed: int = 0,
    depth: float = 1.0,
    sampler: Sampler = Sampler.DEIS,
    resume: Snapshot | None = None,
) -> Row:
    generator = torch.Generator().manual_seed(seed)
    family, tokens = checkpoint.family, grid[0] * grid[1]
    channels = family.network.conditioning
    fields = {field: torch.randn(tokens, width, generator=generator) for field, width in channels.items()}
    return build_row(
        family,
        RowKey(name, 1, 0),
        grid=grid,
        track=family.schedule.track(sampler=sampler, steps=steps, strength=1.0, cells=tokens),
        text={
            field: torch.randn(*shape, generator=generator) for field, shape in text_shapes(family, 5).items()
        },
        conditioning={**fields, "mask": (fields["mask"] > 0).float(), "depth": fields["depth"] * depth}
        | {GENERATOR: torch.Generator().manual_seed(seed).get_state()},
        guidance_scale=3.5,
        resume=resume,
    )


def engine_of(checkpoint: Checkpoint, *, corrects: bool = True) -> Engine:
    ticks = count()
    options = ReuseOptions(correction_bits=EXACT if corrects else None)
    return Engine(
        checkpoint.family,
        Capacity(8, 10_000),
        lambda: float(next(ticks)),
        checkpoint.preview_map,
        reusing=options,
    )


def finished(checkpoint: Checkpoint, rows: Sequence[Row]) -> dict[str, Row]:
    engine, done = engine_of(checkpoint), dict[str, Row]()
    engine.batch.submit(rows)
    while (report := engine.step()) is not None:
        assert report.failed == ()
        done |= {row.key.job_id: row for row in report.advanced if row.done}
    return done


def test_it_is_rehearsed_like_any_other(checkpoint: Checkpoint) -> None:
    assert isinstance(checkpoint.family.schedule, TwoStep)
    rehearse(checkpoint)


def test_its_rows_are_batched_and_read_their_own_channel(checkpoint: Checkpoint) -> None:
    made = [
        row_of(checkpoint, "a"),
        row_of(checkpoint, "b", (2, 5), steps=6, seed=1),
        replace(row_of(checkpoint, "c", (4, 4), seed=2), partial_images=2),
    ]
    together = finished(checkpoint, made)
    for row in made:
        alone = finished(checkpoint, [row])[row.key.job_id]
        torch.testing.assert_close(together[row.key.job_id].latent, alone.latent, atol=FLOAT32, rtol=0)
    flat = finished(checkpoint, [row_of(checkpoint, "a", depth=0.0)])["a"]
    assert (flat.latent - together["a"].latent).abs().max() > 1e-3


def written_out(checkpoint: Checkpoint, row: Row, seed: int | None = None) -> Tensor:
    """The row's final latent by the textbook's formula, one row and one step at a time.

    With a `seed`, noise is added in each step but the last, drawn for (1, channels, height, width) latent pixels.
    """
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    network = checkpoint.family.network
    sequences = place_inputs(row, checkpoint.family).sequences
    sigmas = row.track.levels.tolist()
    picture, noise, mask = (row.conditioning[name] for name in ("image_latents", "noise", "mask"))
    latent, last = row.latent, torch.zeros_like(row.latent)
    for step, (now, then) in enumerate(pairwise(sigmas)):
        batch = network.assemble(sequences)
        velocity = network.predict(batch, latent, [row.conditioning], [step])
        length = then - now
        before = length if step == 0 else now - sigmas[step - 1]
        change = velocity if step == 0 else velocity + length / (2 * before) * (velocity - last)
        latent, last = latent + length * change, velocity
        if generator is not None and then > 0:
            pixels = torch.randn(1, 16, 2 * row.grid[0], 2 * row.grid[1], generator=generator)
            latent = latent + ADDED * FluxPipeline._pack_latents(pixels, 1, *pixels.shape[1:])[0]
        latent = (1 - mask) * (then * noise + (1 - then) * picture) + mask * latent
    return latent


@torch.inference_mode()
def test_its_solver_remembers_between_steps_and_processes(checkpoint: Checkpoint) -> None:
    row = row_of(checkpoint, "a", steps=5)
    wanted = written_out(checkpoint, row)
    torch.testing.assert_close(finished(checkpoint, [row])["a"].latent, wanted, atol=FLOAT32, rtol=0)
    engine = engine_of(checkpoint)
    engine.batch.submit([row])
    for _ in range(2):
        engine.step()
    (taken,) = engine.batch.take_all()
    snapshot = taken.export()
    assert sorted(snapshot.tensors) == ["latents", "memory"]
    resumed = row_of(checkpoint, "a", steps=5, resume=snapshot)
    torch.testing.assert_close(finished(checkpoint, [resumed])["a"].latent, wanted, atol=FLOAT32, rtol=0)


@torch.inference_mode()
def test_a_sampler_draws_on_from_the_seeds_generator_in_the_pipelines_order(checkpoint: Checkpoint) -> None:
    ancestral = row_of(checkpoint, "a", steps=5, seed=3, sampler=Sampler.EULER_ANCESTRAL)
    plain = row_of(checkpoint, "b", (2, 5), steps=5)
    together = finished(checkpoint, [ancestral, plain])
    wanted = written_out(checkpoint, ancestral, seed=3)
    torch.testing.assert_close(together["a"].latent, wanted, atol=FLOAT32, rtol=0)
    assert (wanted - written_out(checkpoint, ancestral)).abs().max() > ADDED
    alone = finished(checkpoint, [plain])["b"]
    torch.testing.assert_close(together["b"].latent, alone.latent, atol=FLOAT32, rtol=0)


@pytest.mark.parametrize("sampler", TwoStep.samplers)
@pytest.mark.parametrize("steps", [1, 3])
def test_a_row_that_goes_on_elsewhere_ends_bit_for_bit_as_one_that_stayed(
    checkpoint: Checkpoint, sampler: Sampler, steps: int
) -> None:
    stayed = finished(checkpoint, [row_of(checkpoint, "a", steps=5, sampler=sampler)])["a"]
    engine = engine_of(checkpoint)
    engine.batch.submit([row_of(checkpoint, "a", steps=5, sampler=sampler)])
    for _ in range(steps):
        engine.step()
    (taken,) = engine.batch.take_all()
    travelled = Snapshot.of(taken.step, unpack(pack(taken.export().tensors)))
    went = finished(checkpoint, [row_of(checkpoint, "a", steps=5, sampler=sampler, resume=travelled)])["a"]
    assert torch.equal(went.latent, stayed.latent)


@pytest.mark.parametrize(
    ("state", "received"),
    [
        (None, "none"),
        (torch.zeros(16, dtype=torch.uint8), r"\(16,\) torch.uint8"),
        (torch.Generator().get_state().float(), "float32"),
        (torch.full_like(torch.Generator().get_state(), 255), "other bytes"),
    ],
)
def test_what_is_no_state_of_a_generator_is_refused(
    checkpoint: Checkpoint, state: Tensor | None, received: str
) -> None:
    row = row_of(checkpoint, "a", steps=5, sampler=Sampler.EULER_ANCESTRAL)
    resume = Snapshot(1, row.latent, torch.zeros(1, *row.latent.shape), state)
    with pytest.raises(SchemaMismatch, match=received):
        row_of(checkpoint, "a", steps=5, sampler=Sampler.EULER_ANCESTRAL, resume=resume)


def test_a_row_does_not_go_on_without_what_its_solver_remembers(checkpoint: Checkpoint) -> None:
    row = row_of(checkpoint, "a", steps=5)
    with pytest.raises(SchemaMismatch, match="memory"):
        row_of(checkpoint, "a", steps=5, resume=Snapshot(1, row.latent))


def test_it_is_recorded_and_reused(checkpoint: Checkpoint) -> None:
    """From the template run's own latent, prompt and level, a masked step equals the run's step on the compute set."""
    row = row_of(checkpoint, "edit")
    recording = RecordingSpec(frozenset({CacheForm.KV}), EXACT)
    run = engine_of(checkpoint)
    run.batch.submit([replace(row, records=recording)])
    whole = run.step()
    assert whole is not None
    cells = torch.zeros(row.grid, dtype=torch.bool)
    cells[:2, :2] = True
    template = CachedTemplate("t", row.grid, whole.advanced[0].entries)
    edit = engine_of(checkpoint, corrects=False)
    edit.batch.submit([replace(row, region=make_region(cells), template=template)])
    masked = edit.step()
    assert masked is not None
    assert masked.sample is not None
    assert masked.sample.image_tokens == 4
    latents = [report.advanced[0].latent for report in (masked, whole)]
    inside = cells.flatten()
    torch.testing.assert_close(*(latent[inside] for latent in latents), atol=FLOAT32, rtol=0)
    memory, wanted = (report.advanced[0].memory for report in (masked, whole))
    assert memory is not None
    assert wanted is not None
    memory, wanted = memory[0], wanted[0]
    torch.testing.assert_close(memory[inside], wanted[inside], atol=FLOAT32, rtol=0)
    assert not memory[~inside].any()
