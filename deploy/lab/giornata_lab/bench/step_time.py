"""One step with reuse beside one in full: the engine's step alone, one row, its slabs on the device.

``python -m giornata_lab.bench.step_time`` prints the ratio full ÷ masked for several mask ratios and both forms,
beside the limit by operations. Where keys and values are taken that is (T + L) / (T - P + M): T text tokens, P of
them padding that is kept, L tokens of the picture and its companions, M computed ones, halo included. `hidden`
projects the tokens outside again. Baseline and ours take turns. The real shape: ``--model real --device cuda``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import click
import torch

from giornata.packed.attention import CachedKVRecorder
from giornata.packed.packing import BlockInputs, CachedTokens
from giornata.planning.operations import taking_modes
from giornata.wire.values import BlockMode
from giornata_denoiser.choices import CacheForm
from giornata_denoiser.engine.batch_tensors import assemble
from giornata_denoiser.engine.denoise_step import denoise_step
from giornata_denoiser.engine.loading import device_for
from giornata_denoiser.engine.recorders import EntryRecorder, OwnKeysValues
from giornata_denoiser.engine.slabs import Slabs
from giornata_denoiser.engine.step_budget import own_bits
from giornata_denoiser.families.network import ModelFamily
from giornata_denoiser.rows.row import RecordingSpec, Row
from giornata_denoiser.rows.template import CachedTemplate
from giornata_lab.bench.compute.engines import DEFAULT, BenchSetting
from giornata_lab.bench.compute.models import described
from giornata_lab.bench.compute.rows import Rows, changed, tera_operations
from giornata_lab.bench.compute.workload import WorkloadEdit, operation_limit
from giornata_lab.bench.harness import clock_of, compared, in_turns, median_ms, write
from giornata_lab.bench.options import family_option, padding_option, rows_of, shared
from giornata_lab.flags import Several, option, parsed

RATIOS: Final = (0.05, 0.11, 0.2, 0.35, 0.5)
FULL: Final = ("full", 1.0)


@torch.inference_mode()
def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write ``out/bench/step_time.json``."""
    options = parsed(
        __doc__,
        [
            *shared(tokens=1024, text=128, repeats=5),
            padding_option(),
            family_option(),
            option("--ratios", type=Several(float), default=list(RATIOS), help="of the mask"),
            option(
                "--forms", type=Several(click.Choice([*map(str, CacheForm)])), default=[*map(str, CacheForm)]
            ),
            option("--halo", type=int, default=DEFAULT.halo),
            option("--bits", type=int, default=DEFAULT.bits),
        ],
        arguments,
    )
    rows = rows_of(options)
    rows.setting = BenchSetting(bits=options.bits, halo=options.halo)
    family = rows.family
    whole = rows.row(_edit(1.0), reuse=False)
    assembly = assemble(family, [whole])
    steps: dict[tuple[str, float], Callable[[], object]] = {
        FULL: lambda: denoise_step(family, assembly, [whole])
    }
    kept = {
        form: BlockMode(form)
        for form in map(CacheForm, options.forms)
        if BlockMode(form) in taking_modes(family.specs)
    }
    masked = {ratio: rows.masked(_edit(ratio)) for ratio in options.ratios}
    for form in kept:
        recorder = EntryRecorder(whole.level, family.depth, RecordingSpec(frozenset({form}), options.bits))
        denoise_step(family, assembly, [whole], [BlockInputs(recorder=recorder)])
        template = CachedTemplate(form, whole.grid, (recorder.entry(),))
        for ratio, row in masked.items():
            steps[str(form), ratio] = _prepared(rows, changed(row, template=template))
    times = in_turns(steps, options.repeats, clock=clock_of(options), device=family.device)
    lines = [
        _line(family, form, mode, ratio, row, times)
        for form, mode in kept.items()
        for ratio, row in masked.items()
    ]
    workload = {
        **vars(options),
        "model": described(family),
        "text_share": round(options.text / (options.text + rows.tokens), 3),
        "rows": 1,
    }
    write("step_time", lines, workload=workload)


def _edit(ratio: float) -> WorkloadEdit:
    """Its mask lies in the middle."""
    return WorkloadEdit(round(100 * ratio), 0, ratio, 0.5, 0.5, steps=4)


def _prepared(rows: Rows, row: Row) -> Callable[[], object]:
    """A step whose slabs are kept from call to call, as an engine does."""
    family = rows.family
    if row.region is None or row.reuse.template is None:
        raise ValueError("the row takes from no template")
    (entry,) = row.reuse.template.entries
    slabs = Slabs(entry, row.region, row.own_tokens[0], family, device=device_for(family.device, 0))
    use = BlockInputs(CachedTokens(entry.modes, slabs))
    assembly = assemble(family, [row])
    if row.padding[0]:
        kept = OwnKeysValues(None, 0, None if slabs.keeps else own_bits(rows.setting.correction_bits))
        denoise_step(family, assembly, [row], [replace(use, padding_recorder=CachedKVRecorder(kept))])
        use = replace(use, padding=kept)
    return lambda: denoise_step(family, assembly, [row], [use])


def _line(
    family: ModelFamily,
    form: CacheForm,
    mode: BlockMode,
    mask: float,
    row: Row,
    times: dict[tuple[str, float], list[float]],
) -> dict[str, Any]:
    full, ours = times[FULL], times[str(form), mask]
    (shape,) = row.shaped(padding_kept=True)
    limit = operation_limit(family.specs, shape, mode)
    found = compared("full ÷ masked", full, ours)
    return {
        "form": form,
        "mask": mask,
        **found,
        "limit": round(limit, 3),
        "of the limit": round(found["full ÷ masked"] / limit, 3),
        "computed": shape.computed,
        "text share": round(shape.live_text / (shape.live_text + shape.computed), 3),
        "full ms": median_ms(full),
        "masked ms": median_ms(ours),
        "full TFLOP/s": round(1e3 * tera_operations(family, [row], BlockMode.FULL) / median_ms(full), 3),
        "masked TFLOP/s": round(1e3 * tera_operations(family, [row], mode) / median_ms(ours), 3),
    }


if __name__ == "__main__":
    main()
