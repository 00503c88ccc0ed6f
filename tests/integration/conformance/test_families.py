"""What holds of every family, from prepost's bytes through the engine's steps to the decoded picture.

An edit or a generation in full equals diffusers' own pipeline; a masked row equals the row in full; a row beside others
equals the row alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any, Final

import numpy as np
import pytest
import torch
from safetensors.numpy import load

from giornata.packed.packing import Region, make_region, with_companions
from giornata.packed.packing import region_of as region_in
from giornata.planning.operations import BatchRow, LoadLink
from giornata.planning.plans import BatchPlan, BatchPlanner, evaluate_modes, plan_batch
from giornata.scheduling.batch import Capacity
from giornata.tensors import normalisation_of, pack, unpack
from giornata.wire.models import Sampler
from giornata.wire.requests import EditParameters, Reuse
from giornata.wire.values import BlockMode
from giornata_denoiser.attempts.inputs import TemplateReuse
from giornata_denoiser.choices import EXACT, CacheForm
from giornata_denoiser.engine.engine import Engine
from giornata_denoiser.rows.row import RecordingSpec, Row, Snapshot
from giornata_denoiser.rows.template import CachedTemplate
from giornata_lab.bench.compute.rows import changed
from giornata_prepost.encoding import template_row
from giornata_prepost.images.pictures import Size
from giornata_prepost.images.stages import PixelLimits, inspect
from tests.distances import distance
from tests.integration.conformance.families import CASES, REFERENCES, UNETS, Asked, OpenFamily, PaintedPicture
from tests.integration.conformance.reuse import COMPUTING_COSTS, FREE, NINE, ReusingEdit
from tests.integration.painting import ended, final_latent
from tests.integration.prepost.asking import png
from tests.integration.prepost.oracle import PROMPT, picture
from tests.present import present

CLOSE: Final = 3e-5
"""Largest difference of final latents, relative to the largest value. Rounding makes 1e-6."""
SAMPLED: Final = {
    "sd": (Sampler.EULER_ANCESTRAL, Sampler.DPMPP_2M),
    "sd-inpaint": (Sampler.EULER_ANCESTRAL, Sampler.HEUN),
    "sdxl": (Sampler.EULER_ANCESTRAL, Sampler.DPMPP_2M_SDE),
    "sdxl-inpaint": (Sampler.DPMPP_2M_SDE, Sampler.DPMPP_2M),
}
"""Two samplers of each UNet that draw or remember, beside the checkpoint's own."""
ONE_OF_EACH: Final = pytest.mark.parametrize(
    "of",
    [
        "flux-kontext", "flux-fill", "sd-inpaint", "sdxl", "sd3", "z-image", "chroma", "flux2-klein-kv",
        "qwen-image-edit-2511", "qwen-image-2.1",
    ],
    indirect=True,
)  # fmt: skip
"""Families whose networks, texts and pictures differ: for what no pipeline of the others changes."""


@pytest.fixture(scope="module", params=CASES)
def of(request: pytest.FixtureRequest, opened_family: Callable[[str], OpenFamily]) -> OpenFamily:
    return opened_family(request.param)


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.node.callspec.params["of"]
    return found


def assert_paints(of: OpenFamily, row: Row, theirs: PaintedPicture) -> None:
    """A row that is computed alone has the pipeline's latents, and their picture."""
    mine = final_latent(of.served, row)
    assert distance(mine, theirs.latents) <= CLOSE
    height, width, _ = theirs.picture.shape
    decoded = of.served.images.decode(mine, Size(width, height)).astype(int)
    assert np.abs(decoded - theirs.picture.astype(int)).max() <= 1
    assert theirs.picture.std() > 5


def guided(of: OpenFamily, **more: Any) -> Asked:
    return Asked(of.case.guided, **more)


def plain(of: OpenFamily, **more: Any) -> Asked:
    return Asked(of.case.plain, **more)


def test_a_guided_edit_equals_the_pipeline(of: OpenFamily) -> None:
    """Begun from noise, and looking at as many references as the pipeline takes."""
    asked = guided(of, references=of.case.references)
    row = of.edit(asked)
    assert len(row.inputs.prompts) == of.case.halves
    assert_paints(of, row, of.inpainted(asked, row))


def test_an_edit_below_full_strength_equals_the_pipeline(of: OpenFamily, name: str) -> None:
    """Guided by nothing; of a UNet by a sampler that remembers or draws."""
    sampler = SAMPLED.get(name, (None,))[0]
    asked = plain(of, steps=4, strength=0.5, sampler=sampler)
    row = of.edit(asked)
    assert (len(row.inputs.prompts), row.steps) == (1, 2)
    assert_paints(of, row, of.inpainted(asked, row))


def test_an_edit_of_a_whole_picture_equals_the_pipeline(of: OpenFamily, name: str) -> None:
    """The instruction pipeline's, or the image-to-image one's below full strength."""
    if of.case.whole is None:
        pytest.skip("diffusers has no such pipeline of this family")
    instructed = of.case.listed or "edit" in name or "kontext" in name
    asked = guided(
        of,
        steps=4,
        strength=1.0 if instructed else 0.5,
        references=int(of.case.listed),
        sampler=SAMPLED.get(name, (None,))[0],
    )
    assert_paints(of, of.edit(asked, whole=True), of.repainted(asked))


def test_a_generation_equals_the_pipeline(of: OpenFamily, name: str) -> None:
    """By default both guide as far as the pipeline does unasked; plain ones look at no reference, or draw noise."""
    if of.case.generates is None:
        assert of.served.card.tasks == ("edit",)
        return
    asked = Asked(of.case.unasked, references=of.case.references)
    row = of.generation(asked)
    assert row.inputs.conditioning.keys() == {"noise"} | ({"references"} if of.case.references else set())
    assert_paints(of, row, of.generated(asked))
    if of.case.references or name in SAMPLED:
        asked = plain(of, sampler=SAMPLED.get(name, (None,))[0])
        assert_paints(of, of.generation(asked), of.generated(asked))


@ONE_OF_EACH
def test_prompt_guidance_and_references_show(of: OpenFamily) -> None:
    """Otherwise the tests of equality would prove little."""
    alone = plain(of, steps=2)
    asked = [alone, replace(alone, prompt="a blue barn"), replace(alone, seed=8)]
    if of.case.guided != of.case.plain:
        asked.append(guided(of, steps=2))
    if of.case.references:
        asked += [replace(alone, references=count) for count in range(1, of.case.references + 1)]
    rows = [of.edit(each, str(number)) for number, each in enumerate(asked)]
    for one, other in combinations(ended(of.served.checkpoint, rows).values(), 2):
        assert distance(one.latent, other.latent) > 30 * CLOSE


def region_of(row: Row) -> tuple[Region, torch.Tensor]:
    """The region that the mask touches, and which tokens lie outside of it."""
    touched = row.inputs.conditioning["mask"].amax(dim=1).view(row.grid) > 0
    found = present(make_region(touched))
    return with_companions(found, row.inputs.companions), ~touched.view(-1)


def with_template(of: OpenFamily, row: Row, run: Row, form: CacheForm) -> tuple[Row, Row]:
    """A row that computes its region alone and takes the rest from what `run` records; and the end of `run`."""
    recording = replace(run, records=RecordingSpec(frozenset({form}), EXACT))
    full = ended(of.served.checkpoint, [recording])[run.key.job_id]
    template = CachedTemplate(row.key.job_id, row.grid, full.entries)
    return changed(row, region=region_of(row)[0], template=template, tolerance=0.0), full


def after_the_first_block(rows: Sequence[BatchRow], link: LoadLink, base_ms: float = 0.0) -> BatchPlan:
    """The plan of rows that compute their first block in full, and of the others take keys and values."""
    modes = [(BlockMode.FULL, *(BlockMode.KV,) * (len(row.blocks) - 1)) for row in rows]
    return evaluate_modes(rows, modes, link, base_ms)


@ONE_OF_EACH
def test_masked_rows_and_others_of_one_batch_equal_each_row_in_full_and_alone(
    of: OpenFamily, name: str
) -> None:
    """They differ in size, prompt, steps, strength, guidance, references, task and sampler.

    Where a family does not blend, a masked row ends with the picture's own latents outside of its region, and a row in
    full does not: it is held to its region.
    """
    sampler = SAMPLED.get(name, (None,))[-1]
    rows = [
        of.edit(guided(of, references=of.case.references), "guided"),
        of.edit(
            plain(of, prompt="a scarf", steps=4, strength=0.5, size=of.case.other, sampler=sampler), "small"
        ),
    ]
    if of.case.generates is not None:
        rows.append(
            of.generation(guided(of, steps=2, size=of.case.other, references=of.case.references), "made")
        )
    wanted = {row.key.job_id: final_latent(of.served, row) for row in rows}
    forms = (CacheForm.KV,) if of.case.family in UNETS else tuple(CacheForm)
    own = Sampler.DDIM if of.case.family in UNETS else None  # PNDM computes one level twice
    taken: dict[str, Row] = {}
    for form in forms:
        row = of.edit(plain(of, references=min(1, of.case.references), sampler=own), form)
        taken[form], full = with_template(of, row, row, form)
        assert taken[form].computed_tokens < row.computed_tokens
        wanted[form] = full.latent
    batches: list[tuple[list[Row], BatchPlanner]] = [([*taken.values(), *rows], plan_batch)]
    if of.case.family not in UNETS:  # these take all of their blocks, or none
        batches.append(([taken[CacheForm.KV]], after_the_first_block))
    for batch, planner in batches:
        for key, row in ended(of.served.checkpoint, batch, planner=planner).items():
            painted = slice(None) if of.case.blends or row.region is None else row.region.computed
            assert distance(row.latent[painted], wanted[key][painted]) <= CLOSE, (key, planner)


@ONE_OF_EACH
def test_a_masked_row_repaints_a_template_run_and_keeps_the_rest(of: OpenFamily) -> None:
    """The run has an empty mask; outside of its region the edit ends with the picture's own latents."""
    if not of.case.blends:
        pytest.skip("the family does not blend")
    edit = of.edit(plain(of), sampled=False)
    empty = changed(edit, conditioning=of.served.checkpoint.family.network.unmasked(edit.inputs.conditioning))
    taking, _ = with_template(of, edit, empty, CacheForm.KV)
    taken, outside = final_latent(of.served, taking), region_of(edit)[1]
    assert torch.equal(taken[outside], edit.inputs.conditioning["image_latents"][outside])
    assert distance(taken, final_latent(of.served, edit)) > CLOSE


def interrupted(of: OpenFamily, row: Row) -> Snapshot:
    """What travels of a row after two steps."""
    engine = Engine(of.served.checkpoint.family, Capacity(rows=1, tokens=1), lambda: 0.0)
    engine.batch.submit([row])
    reports = [engine.step() for _ in range(2)]
    return Snapshot.of(2, unpack(pack(present(reports[-1]).advanced[0].export().tensors)))


@ONE_OF_EACH
def test_a_row_resumes_where_it_was_interrupted(of: OpenFamily, name: str) -> None:
    """Most in an edit, one in a generation."""
    asked = guided(of, steps=4, references=min(1, of.case.references), sampler=SAMPLED.get(name, (None,))[0])
    make = of.generation if name == "sdxl" else of.edit
    row = make(asked)
    again = make(asked, resume=interrupted(of, row))
    assert (again.step, again.done) == (2, False)
    assert distance(final_latent(of.served, again), final_latent(of.served, row)) <= CLOSE


@pytest.mark.parametrize("of", ["flux-fill", "sd-inpaint", "sdxl-inpaint"], indirect=True)
def test_a_masked_row_resumes_where_it_was_interrupted(of: OpenFamily) -> None:
    """Elsewhere it computes a step in full, over the latent that it had: where a family does not blend, the run's."""
    asked = plain(of, steps=4, sampler=Sampler.DDIM if of.case.family in UNETS else None)
    row = of.edit(asked)
    taking, full = with_template(of, row, row, CacheForm.KV)
    left = interrupted(of, taking)
    again = changed(of.edit(asked, resume=left), region=taking.region, template=taking.reuse.template)
    painted = region_of(row)[0].computed
    assert distance(final_latent(of.served, again)[painted], full.latent[painted]) <= CLOSE


@ONE_OF_EACH
def test_prepost_announces_what_the_row_has(of: OpenFamily) -> None:
    """Tokens of its text, of the clean pictures beside it and of its prefix are counted before there is a row."""
    images, card = of.served.images, of.served.card
    rows = [of.edit(plain(of, references=of.case.references))]
    if of.case.generates is not None:
        rows.append(of.generation(plain(of)))
    for row in rows:
        edited = "image_latents" in row.inputs.conditioning
        sizes = [pixels.size // 3 // 256 for pixels in REFERENCES[: of.case.references]] if edited else []
        if edited and not row.inputs.prefix[0]:
            assert row.inputs.companions == card.companion_tokens(row.image_tokens, sizes)
        seen = [picture(of.case.size), *REFERENCES[: of.case.references]]
        text = images.encode_text(PROMPT, of.case.size, seen)
        assert images.text_tokens(text) == row.inputs.prompts[0].joint_tokens
        clean = row.image_tokens + sum(sizes) if edited else 0
        assert (images.prefix_tokens(text, clean),) == row.inputs.prefix


@ONE_OF_EACH
def test_the_compute_set_is_what_the_mask_touches(of: OpenFamily) -> None:
    """A strip of one pixel too: no family loses it between its cells."""
    size = of.case.size
    marked = np.zeros((2 * size.height, 2 * size.width), np.uint8)
    marked[40:71, 25:27] = 255
    marked[100, -40:] = 255
    scene = np.random.default_rng(2).integers(0, 256, (*marked.shape, 3), np.uint8)
    asked = EditParameters(prompt="x", mask_blur=0)
    found = inspect(png(scene), png(marked), asked, of.served.card, PixelLimits(1 << 20, 1 << 20))
    prepared = load(found.prepared)
    (row,) = of.served.images.encode_rows(prepared["image"], prepared["mask"], [0])
    touched = int((row["mask"].amax(dim=1) > 0).sum())
    assert found.measures.compute_tokens == touched < found.measures.tokens


@ONE_OF_EACH
def test_prepost_rehearses_it(of: OpenFamily) -> None:
    of.served.images.rehearse()


@ONE_OF_EACH
def test_previews_see_the_latent_pixels_that_are_decoded(of: OpenFamily) -> None:
    """The preview map is fitted to them."""
    latent = of.edit(plain(of)).inputs.conditioning["image_latents"]
    network, vae = of.served.checkpoint.family.network, of.pipeline.vae
    grid = of.edit(plain(of)).grid
    pixels = network.unpacked(latent, grid)
    with torch.no_grad():
        decoded = normalisation_of(vae).decoded(vae, pixels[None])
    seen = np.asarray(of.pipeline.image_processor.postprocess(decoded)[0].convert("RGB"))
    assert np.abs(seen.astype(int) - of.served.images.decode(latent, of.case.size).astype(int)).max() <= 1


# What `reuse` says changes no picture: a row has what full computation has, bit by bit, but for a template's noise.


REUSING: Final = pytest.mark.parametrize(
    "of",
    sorted(
        CASES.keys()
        - {"flux-schnell", "flux2", "qwen-image-edit", "qwen-image-edit-2511", "sd-inpaint", "sdxl"}
    ),
    indirect=True,
)
"""Of the others' pictures each is prepared by the code of one of these."""


@REUSING
def test_prepared_rows_are_those_of_full_computation(of: OpenFamily) -> None:
    card, family = of.served.card, of.case.family
    drawing = {"sampler": Sampler.EULER_ANCESTRAL} if Sampler.EULER_ANCESTRAL in card.samplers else {}
    variants: list[dict[str, Any]] = [{"strength": 1.0} | drawing, {"strength": 0.6}]
    for fields in variants:
        asked = ReusingEdit(of.served, fields)
        _, _, full = asked.encoded(Reuse.OFF)
        _, _, reusing = asked.encoded(Reuse.AUTO)
        template = unpack(template_row(of.served.images, asked.inspected(asked.job(Reuse.AUTO)).prepared))
        assert full.rows == reusing.rows
        first, second = map(unpack, reusing.rows)
        assert not torch.equal(first["noise"], second["noise"])
        moved = not torch.equal(first["image_latents"], template["image_latents"])
        assert moved == (family not in FREE and (family not in NINE or fields["strength"] < 1))


@REUSING
async def test_off_hit_and_miss_begin_with_the_same_latent_where_they_paint(of: OpenFamily) -> None:
    asked = ReusingEdit(of.served)
    taking = TemplateReuse(1.0, None, COMPUTING_COSTS)
    inspection, off = await asked.rows(Reuse.OFF, None)
    _, full = await asked.rows(Reuse.AUTO, None)
    _, miss = await asked.rows(Reuse.AUTO, replace(taking, renew_steps=7))
    recorded = replace(full[0], records=RecordingSpec(frozenset({CacheForm.KV}), 0))
    entries = ended(of.served.checkpoint, [recorded])["edit"].entries
    template = CachedTemplate("t", full[0].grid, entries)
    _, hit = await asked.rows(Reuse.AUTO, replace(taking, recording=template))
    assert [row.reuse.template is not None for row in (*off, *full, *miss, *hit)] == [False] * 6 + [True] * 2
    region = present(region_in(present(inspection.compute_set)[1]))
    for found, where in ((full, slice(None)), (miss, slice(None)), (hit, region.computed)):
        for row, own in zip(found, off, strict=True):  # outside a hit has the recorded noise
            assert torch.equal(row.latent[where], own.latent[where])
            assert "noise" in row.inputs.conditioning
            assert row.inputs.conditioning.keys() == own.inputs.conditioning.keys()
            for name, tensor in row.inputs.conditioning.items():
                assert torch.equal(tensor[where], own.inputs.conditioning[name][where]), name
