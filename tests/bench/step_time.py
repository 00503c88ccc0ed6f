"""One step with reuse beside one in full: the engine alone, entries on the device.

``python -m tests.bench.step_time`` prints the ratio full ÷ masked for several mask ratios and both forms, beside the
limit (T + L) / (T + M): T text tokens, L image tokens, M computed ones, halo included. Baseline and ours take turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import isqrt
from typing import Any, Final

import torch
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel

from giornata_denoiser.assembly import assemble
from giornata_denoiser.batch import RowKey
from giornata_denoiser.families.flux_inpaint import FluxInpaint
from giornata_denoiser.reuse.recording import EntryRecorder
from giornata_denoiser.reuse.region import region
from giornata_denoiser.reuse.served import preferred
from giornata_denoiser.reuse.slabs import Slabs
from giornata_denoiser.reuse.template import Form, Template
from giornata_denoiser.reuse.uses import Reuse
from giornata_denoiser.row import Row, build_row
from giornata_denoiser.sigmas import sigma_grid
from giornata_denoiser.stepping import denoise_step
from tests.bench.report import write
from tests.fakes.tiny_flux import SCHEDULER

RATIOS: Final = (0.05, 0.11, 0.2, 0.35, 0.5)
CHANNELS: Final = 64


def mid_size(dtype: torch.dtype, device: torch.device) -> FluxInpaint:
    """About 160 M parameters: 4 double and 8 single blocks of width 768, random weights."""
    torch.manual_seed(0)
    kind: Any = FluxTransformer2DModel
    model = kind(
        patch_size=1,
        in_channels=CHANNELS,
        num_layers=4,
        num_single_layers=8,
        attention_head_dim=64,
        num_attention_heads=12,
        joint_attention_dim=256,
        pooled_projection_dim=128,
        guidance_embeds=True,
        axes_dims_rope=(16, 24, 24),
    )
    return FluxInpaint(model.to(device, dtype).eval().requires_grad_(requires_grad=False))


def row_of(family: FluxInpaint, side: int, text_tokens: int) -> Row:
    """A row of noise, `side` tokens a side; its values do not matter."""
    joint_dim, pooled_dim = family.prompt_channels
    tokens = side * side
    return build_row(
        family,
        RowKey("bench", 1, 0),
        grid=(side, side),
        sigmas=sigma_grid(SCHEDULER, steps=4, strength=1.0, image_tokens=tokens),
        text={
            "prompt_embeds": torch.randn(text_tokens, joint_dim),
            "pooled_prompt_embeds": torch.randn(pooled_dim),
        },
        conditioning={name: torch.randn(tokens, width) for name, width in family.conditioning.items()},
        guidance_scale=3.5,
    )


def masked(row: Row, ratio: float, halo: int, template: Template) -> Row:
    """`row` with a square mask of `ratio` in its middle."""
    side = row.grid[0]
    width = max(1, round(side * ratio**0.5))
    touched = torch.zeros(row.grid, dtype=torch.bool)
    start = (side - width) // 2
    touched[start : start + width, start : start + width] = True
    where = region(touched, halo, row.latent.device)
    return replace(row, key=RowKey(f"{ratio}", 1, 0), region=where, template=template)


def main() -> None:
    """Measure, print, write ``out/bench/step_time.json``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "--tokens", type=int, default=4096, help="of the picture, a square number (default 4096)"
    )
    parser.add_argument("--text", type=int, default=512, help="text tokens (default 512)")
    parser.add_argument("--halo", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32", "float16"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    device = torch.device(options.device)
    family = mid_size(getattr(torch, options.dtype), device)
    row = row_of(family, isqrt(options.tokens), options.text)
    steps: dict[tuple[str, float], Callable[[], object]] = {("full", 1.0): lambda: _step(family, [row], None)}
    computed: dict[float, int] = {}
    with torch.inference_mode():
        for form in Form:
            recorder = EntryRecorder(row.sigma, family.blocks, [form], 0)
            denoise_step(family, assemble(family, [row]), [row], [recorder])
            template = Template(form, row.grid, (recorder.entry(),))
            for ratio in RATIOS:
                edit = masked(row, ratio, options.halo, template)
                computed[ratio] = edit.computed_tokens
                steps[str(form), ratio] = _prepared(family, edit)
        times: dict[tuple[str, float], list[float]] = {key: [] for key in steps}
        for repeat in range(options.repeats + 1):
            for key, step in steps.items():
                began = time.perf_counter()
                step()
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                if repeat:  # the first one warms up
                    times[key].append((time.perf_counter() - began) * 1e3)
    full = times["full", 1.0]
    rows = [
        _line(form, ratio, computed[ratio], full, times[form, ratio], options)
        for form, ratio in steps
        if form != "full"
    ]
    write("step_time", rows, workload={**vars(options), "parameters": "160 M Flux, 4 + 8 blocks, width 768"})


def _prepared(family: FluxInpaint, row: Row) -> Callable[[], object]:
    """A step whose slabs are kept from call to call, as an engine does."""
    if row.region is None or row.template is None:
        raise ValueError("the row takes from no template")
    (entry,) = row.template.entries
    use = Reuse(preferred(entry), Slabs(entry, row.region, row.own_tokens[0], family))
    assembly = assemble(family, [row])
    return lambda: denoise_step(family, assembly, [row], [use])


def _step(family: FluxInpaint, rows: Sequence[Row], assembly: Any) -> object:
    return denoise_step(family, assembly or assemble(family, rows), rows)


def _line(
    form: str, ratio: float, computed: int, full: list[float], ours: list[float], options: argparse.Namespace
) -> dict[str, Any]:
    text, tokens = options.text, options.tokens
    ratios = [a / b for a, b in zip(full, ours, strict=True)]
    limit = (text + tokens) / (text + computed)
    return {
        "form": form,
        "mask": ratio,
        "computed": computed,
        "full / masked": round(statistics.median(ratios), 3),
        "spread": f"{min(ratios):.2f}-{max(ratios):.2f}",
        "limit": round(limit, 3),
        "of the limit": round(statistics.median(ratios) / limit, 3),
        "full ms": round(statistics.median(full), 1),
        "masked ms": round(statistics.median(ours), 1),
    }


if __name__ == "__main__":
    main()
