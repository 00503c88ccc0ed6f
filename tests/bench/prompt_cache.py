"""What beginning with another prompt's latent costs in picture, and the table of cosines that follows from it.

Edits of held-out scenes begin at a step with the latent, in 16 bits, that an edit of the same picture and mask with
another prompt had there. Each is compared with the same edit from scratch that began with the same noise.
``python -m tests.bench.prompt_cache --help``; ``--write`` puts the table where the router finds it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import click
import numpy as np
import torch
from diffusers import FluxFillPipeline
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from numpy.typing import NDArray
from PIL import Image

from giornata.approximate.entries import embedding_of
from giornata.approximate.nearest import Embedding
from giornata.approximate.steps import SHARES, step_of
from giornata.approximate.table import Table, Tables, Threshold
from giornata.model_cards import read_model_card
from giornata.wire.requests import Approximate, EditParameters
from giornata_prepost.checkpoint import FAMILIES
from giornata_prepost.encoding import prompt_embedding
from giornata_prepost.images.geometry import Size
from giornata_tools.model.scenes import COLOURS, SHAPES
from giornata_tools.quality.cases import Case, draw, slots, spread
from giornata_tools.quality.checker import check
from giornata_tools.quality.metrics import ssim

MODEL: Final = Path("deploy/model/fresco")
TABLES: Final = Path("services/router/giornata_router/prompt_tables.json")
SHEET: Final = Path("docs/pictures/approximate.png")
STEPS: Final = 20
SIDE: Final = 128
LOST: Final = 0.01
"""The most adherence that a share of the steps may cost."""
PAIRS: Final = 8
"""Fewer tell nothing."""
GRID: Final = tuple(round(0.99 - 0.01 * index, 2) for index in range(50))
"""Cosines that a threshold may be."""
SHOWN: Final = 6
"""Cases of the contact sheet."""

Pixels = NDArray[np.uint8]


class Sample(NamedTuple):
    """One edit that began with another prompt's latent, and the same one from scratch."""

    kind: str
    """How the other prompt differs."""
    share: float
    cosine: float
    right: bool
    """Whether the picture shows what was asked for."""
    scratch: bool
    """Whether that from scratch does."""
    ssim: float
    """SSIM of the picture and of that from scratch, inside the mask."""


class Painter:
    """The checkpoint's own pipeline, with the picture's posterior at its mode, as edits with `reuse` take it."""

    def __init__(self, model: Path) -> None:
        self._pipeline: Any = FluxFillPipeline.from_pretrained(model, dtype=torch.float32)
        self._pipeline.set_progress_bar_config(disable=True)
        card = read_model_card(model)
        self._tokens = card.max_text_tokens
        self._images = FAMILIES[card.family](model, card, torch.device("cpu"), torch.float32)

    def paint(
        self, case: Case, prompt: str, seed: int, start: int = 0, latents: torch.Tensor | None = None
    ) -> tuple[Pixels, dict[int, torch.Tensor]]:
        """The picture, and its latents by steps computed; from `start` on with `latents`."""
        kept: dict[int, torch.Tensor] = {}

        def keep(_pipeline: Any, step: int, _time: Any, values: dict[str, torch.Tensor]) -> dict[str, Any]:
            kept[start + step + 1] = values["latents"].half().float()
            return {}

        picture = self._pipeline(
            prompt=prompt,
            image=Image.fromarray(case.bare),
            mask_image=Image.fromarray((case.scene.mask * 255).astype(np.uint8)),
            height=case.slot.side,
            width=case.slot.side,
            num_inference_steps=STEPS - start,
            sigmas=np.linspace(1.0, 1 / STEPS, STEPS)[start:].tolist(),
            latents=latents,
            guidance_scale=30.0,
            max_sequence_length=self._tokens,
            generator=torch.Generator().manual_seed(seed),
            callback_on_step_end=keep,
            output_type="np",
        ).images[0]
        return (picture * 255).round().astype(np.uint8), kept

    def embedding(self, prompt: str) -> Embedding:
        """What prepost tells of a prompt, (numbers,) of length 1."""
        text = self._images.encode_text(prompt, Size(SIDE, SIDE))
        asked = EditParameters(prompt=prompt, approximate=Approximate.AUTO)
        found = embedding_of(prompt_embedding(self._images, asked, text) or b"")
        if found is None:
            raise click.ClickException(f"the prompt {prompt!r} has no embedding")
        return found


def prompts(case: Case, rng: random.Random) -> tuple[str, dict[str, str]]:
    """What a case asks for, and prompts whose latents it may begin with, by how they differ."""
    colour, shape = case.slot.colour, case.slot.shape
    another = rng.choice([each for each in COLOURS if each != colour])
    other = rng.choice([each for each in SHAPES if each != shape])
    return f"a {colour} {shape}", {
        "paraphrase": f"put a {colour} {shape} here",
        "other colour": f"a {another} {shape}",
        "other shape": f"a {colour} {other}",
        "both other": f"a {another} {other}",
    }


def measured(painter: Painter, case: Case, rng: random.Random) -> Iterator[tuple[Sample, Pixels, Pixels]]:
    """Every kind and share of one case: the sample, its picture, and the picture from scratch."""
    slot, mask, seed = case.slot, case.scene.mask, case.slot.index + 100_000
    wanted, others = prompts(case, rng)
    embedding = painter.embedding(wanted)
    scratch, _ = painter.paint(case, wanted, seed)
    good = check(scratch, case.bare, mask).is_a(slot.colour, slot.shape)
    for kind, prompt in others.items():
        cosine = float(painter.embedding(prompt) @ embedding)
        _, kept = painter.paint(case, prompt, seed)
        for share in SHARES:
            step = step_of(share, STEPS)
            made, _ = painter.paint(case, wanted, seed, step, kept[step])
            right = check(made, case.bare, mask).is_a(slot.colour, slot.shape)
            yield Sample(kind, share, cosine, right, good, float(ssim(made, scratch, mask))), made, scratch


def fitted(samples: Sequence[Sample]) -> Table:
    """The lowest cosine for each share at which edits at least so alike lose at most :data:`LOST` of adherence.

    Some pair is just so alike, and more alike edits lose no more either, or a single picture. A share for which
    a lower cosine would do than for a smaller share makes that one needless.
    """
    found: list[Threshold] = []
    for share in sorted(SHARES, reverse=True):
        least = _least_cosine([each for each in samples if each.share == share])
        if least is not None and (not found or least < found[-1].cosine):
            found.append(Threshold(cosine=least, share=share))
    return Table(thresholds=tuple(found))


def _least_cosine(samples: Sequence[Sample]) -> float | None:
    least = None
    for cosine in GRID:
        alike = [each for each in samples if each.cosine >= cosine]
        lost = sum(each.scratch for each in alike) - sum(each.right for each in alike)
        if lost > max(1, LOST * len(alike)):
            break
        enough = len(alike) >= PAIRS and min(each.cosine for each in alike) < cosine + 0.01
        if enough and lost <= LOST * len(alike):
            least = cosine
    return least


def report(samples: Sequence[Sample], table: Table) -> Iterator[str]:
    """Lines of Markdown."""
    yield (
        "| the latent is of | cosine | "
        + " | ".join(f"{step_of(share, STEPS)} steps: right, SSIM" for share in SHARES)
        + " |"
    )
    yield "|---" * (2 + len(SHARES)) + "|"
    for kind in dict.fromkeys(each.kind for each in samples):
        cells = []
        for share in SHARES:
            some = [each for each in samples if (each.kind, each.share) == (kind, share)]
            cells.append(
                f"{np.mean([each.right for each in some]):.0%}, {np.mean([each.ssim for each in some]):.3f}"
            )
        cosines = [each.cosine for each in samples if each.kind == kind]
        yield (
            f"| {kind} | {np.mean(cosines):.2f} ({min(cosines):.2f}-{max(cosines):.2f}) | "
            + " | ".join(cells)
            + " |"
        )
    yield f"\nFrom scratch {np.mean([each.scratch for each in samples]):.0%} are right.\n"
    yield "| prompts at least so alike | steps saved | pairs | right | from scratch | SSIM |"
    yield "|---|---|---|---|---|---|"
    for each in table.thresholds:
        some = [one for one in samples if one.share == each.share and one.cosine >= each.cosine]
        right, scratch = np.mean([one.right for one in some]), np.mean([one.scratch for one in some])
        likeness = np.mean([one.ssim for one in some])
        yield f"| {each.cosine} | {each.share:.0%} | {len(some)} | {right:.1%} | {scratch:.1%} | {likeness:.3f} |"


def sheet(rows: Sequence[Sequence[Pixels]]) -> Image.Image:
    """Pictures side by side, a case a row."""
    gap = 4
    height, width = len(rows) * (SIDE + gap) - gap, len(rows[0]) * (SIDE + gap) - gap
    whole = np.full((height, width, 3), 255, np.uint8)
    for y, row in enumerate(rows):
        for x, picture in enumerate(row):
            top, left = y * (SIDE + gap), x * (SIDE + gap)
            whole[top : top + SIDE, left : left + SIDE] = picture
    return Image.fromarray(whole)


def write(table: Table, digest: str, told: str, path: Path = TABLES) -> None:
    """Put a checkpoint's table beside the others."""
    held: Mapping[str, Table] = Tables.model_validate_json(path.read_text(encoding="utf-8")).root
    tables = {**held, digest: table.model_copy(update={"told": told})}
    path.write_text(
        json.dumps({key: each.model_dump() for key, each in tables.items()}, indent=2) + "\n",
        encoding="utf-8",
    )


@click.command()
@click.option("--cases", default=24, show_default=True, help="Scenes.")
@click.option("--draw", "draws", default=0, show_default=True, help="Seed of the other prompts.")
@click.option(
    "--join",
    "joined",
    multiple=True,
    type=click.Path(path_type=Path, exists=True),
    help="samples.json of an earlier run, which counts, too.",
)
@click.option(
    "--out", type=click.Path(path_type=Path), default=None, help="Folder for samples and contact sheet."
)
@click.option("--write", "writes", is_flag=True, help="Put table and contact sheet into the checkout.")
def main(cases: int, draws: int, joined: Sequence[Path], out: Path | None, *, writes: bool) -> None:
    """Measure the shipped model."""
    torch.set_num_threads(1)
    # the pipeline would draw the posterior from the noise's generator, which given latents leave at its beginning
    DiagonalGaussianDistribution.sample = lambda self, generator=None: self.mode()
    painter, rng = Painter(MODEL), random.Random(draws)  # noqa: S311 - prompts, no secrets
    samples: list[Sample] = []
    rows: list[list[Pixels]] = []
    for slot in spread([each for each in slots() if each.task == "add" and each.side == SIDE], cases):
        case = draw(slot)
        shown: dict[tuple[str, float], Pixels] = {}
        for sample, made, scratch in measured(painter, case, rng):
            samples.append(sample)
            shown["scratch", 0.0] = scratch
            shown[sample.kind, sample.share] = made
        rows.append(
            [
                case.bare,
                scratch,
                shown["paraphrase", 0.5],
                shown["other shape", 0.2],
                shown["both other", 0.5],
            ]
        )
        click.echo(".", nl=False, err=True)
    own = list(samples)
    samples += [Sample(**each) for path in joined for each in json.loads(path.read_text(encoding="utf-8"))]
    table = fitted(samples)
    click.echo("\n".join(report(samples, table)))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "samples.json").write_text(json.dumps([each._asdict() for each in own]), encoding="utf-8")
        sheet(rows[:SHOWN]).save(out / "approximate.png")
    if writes:
        told = f"tests.bench.prompt_cache: {len(samples)} edits of {SIDE} pixels, {STEPS} steps"
        write(table, read_model_card(MODEL).digest, told)
        sheet(rows[:SHOWN]).save(SHEET, optimize=True)


if __name__ == "__main__":
    main()
