"""What ``giornata bench serve`` is to do, from its options and the files that they name."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click

from giornata_lab.cli.bench.run import BenchPlan, BenchTarget
from giornata_lab.cli.workload import read_trace, trace_suffix
from giornata_lab.loadgen import traces, workload
from giornata_lab.loadgen.driver import ApiDialect
from giornata_lab.loadgen.pictures import TemplatePicture, given
from giornata_lab.loadgen.schedule import OfferedLoad, drawn, replayed
from giornata_lab.loadgen.workload import AdapterWorkload, MaskShape, Workload, zipf
from giornata_tools.cli.options import gateway_of, usage_errors
from giornata_tools.clients.edits import without_password
from giornata_tools.lora_profiler.probes import SUFFIXES

OWN: Final = ("image", "mask", "n", "num_inference_steps", "prompt", "seed")
"""Fields that options of their own stand for, or that requests differ in."""
SIDES: Final = range(16, 4097)
"""Accepted width and height of a generated picture, in pixels."""

Options = Mapping[str, Any]
"""Values by name; :mod:`giornata_lab.cli.workload` reads some of them as `Given`."""


def size(text: str) -> tuple[int, int]:
    """WIDTHxHEIGHT in pixels.

    Raises:
        ValueError: it is no such size.
    """
    found = re.fullmatch(r"(\d{1,5})x(\d{1,5})", text)
    sides = tuple(map(int, found.groups())) if found else ()
    if not sides or not all(side in SIDES for side in sides):
        raise ValueError(f"{text} is no size such as 512x512, of sides from {SIDES[0]} to {SIDES[-1]} pixels")
    return sides[0], sides[1]


def plan_of(options: Options, typed: Collection[str]) -> BenchPlan:
    """The plan; a trace that is to be saved is written. `typed` are the options that were typed.

    Raises:
        click.UsageError: options that contradict each other, or a file that cannot be read.
    """
    loads = _loads(options, typed)
    if options["save_trace"]:
        _save(options["save_trace"], loads)
    return BenchPlan(
        targets=_targets(options),
        api=ApiDialect(options["api"]),
        api_key=_api_key(options["api_key_file"]),
        loads=tuple(loads),
        templates=_given(options["images"], loads),
        size=options["picture_size"].value,
        fields=_fields(options),
        slo_s=options["slo"],
        in_flight=options["in_flight"],
        timeout_s=options["timeout"],
        seed=options["seed"],
        out=options["out"],
        options={name: _told(name, value) for name, value in options.items()},
    )


def _loads(options: Options, typed: Collection[str]) -> list[OfferedLoad]:
    bursty = options["arrivals"] == "bursty"
    if options["cv"] is not None and not bursty:
        raise click.UsageError("--cv belongs to --arrivals bursty.")
    if options["trace"] and (by_chance := {"rate", "arrivals", "duration"} & set(typed)):
        raise click.UsageError(f"--trace says when requests are due; leave out --{min(by_chance)}.")
    if "steps" in typed and options["api"] == ApiDialect.OPENAI:
        raise click.UsageError(
            "--api openai has no field for steps; leave out --steps, or say --api giornata."
        )
    if "speed" in typed and not options["trace"]:
        raise click.UsageError("--speed belongs to --trace.")
    cv = options["cv"] if options["cv"] is not None else workload.BURSTS
    shared = {"warmup_s": options["warmup"], "seed": options["seed"]}
    with usage_errors(options["trace"] or "No load"):
        if options["trace"]:
            lines = read_trace(options["trace"])
            return [replayed(lines, _workload(options), speed=options["speed"], **shared)]
        return drawn(
            options["rate"].value,
            _workload(options),
            cv=cv if bursty else 1.0,
            seconds=options["duration"],
            **shared,
        )


def _workload(options: Options) -> Workload:
    pictures = len(_files(options["images"])) if options["images"] else options["templates"]
    masks, steps, images = (options[name].value for name in ("masks", "steps", "n"))
    steps = None if options["api"] == ApiDialect.OPENAI else steps
    ids = tuple(options["lora"])
    loras = AdapterWorkload(options["loras"].value, zipf=options["lora_zipf"], names=ids) if ids else None
    return Workload(
        masks, steps, images, zipf(pictures, options["zipf"]), MaskShape(options["mask_shape"]), loras
    )


def _targets(options: Options) -> tuple[BenchTarget, ...]:
    names = options["names"].split(",")
    if len(names) != 2 or len({*names, ""}) != 3:
        raise click.UsageError(
            f"--names are two with a comma between them, not alike; received {options['names']}."
        )
    urls = [options["url"], *([options["against"]] if options["against"] else [])]
    return tuple(BenchTarget(name, gateway_of(url)) for name, url in zip(names, urls, strict=False))


def _api_key(path: Path | None) -> str | None:
    """The key in the file, else in the environment; it is never an argument, which others on the machine could read."""
    key = path.read_text(encoding="utf-8") if path else os.environ.get("GIORNATA_API_KEY", "")
    return key.strip() or None


def _fields(options: Options) -> dict[str, str]:
    found: dict[str, str] = {}
    with usage_errors("--field"):
        for text in options["fields"]:
            name, equals, value = text.partition("=")
            if not equals or not re.fullmatch(r"\w+", name):
                raise ValueError(f"{text} is not of the form NAME=VALUE")
            if name in OWN or name in found:
                raise ValueError(
                    f"{name} is set twice, or has an option of its own; set other fields, each once"
                )
            found[name] = value
    model = {"model": options["model"]} if options["model"] else {}
    return {"prompt": options["prompt"], **model, **found}


def _files(folder: Path) -> list[Path]:
    found = sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)
    if not found:
        raise click.UsageError(f"--images: no file in {folder} ends with {', '.join(SUFFIXES)}.")
    return found


def _given(folder: Path | None, loads: Sequence[OfferedLoad]) -> dict[int, TemplatePicture] | None:
    if folder is None:
        return None
    with usage_errors("--images"):
        found = given([path.read_bytes() for path in _files(folder)])
    last = max(request.template for load in loads for request in load.requests)
    if last not in found:
        raise click.UsageError(
            f"--images: the trace edits template {last}; the folder's last is {len(found) - 1}."
        )
    return found


def _save(path: Path, loads: Sequence[OfferedLoad]) -> None:
    if len(loads) > 1:
        raise click.UsageError("--save-trace writes one run; give one rate.")
    with usage_errors("--save-trace"):
        path.write_text(traces.write(loads[0].requests, trace_suffix(path)), encoding="utf-8")


def _told(name: str, value: Any) -> Any:
    """An option for the report."""
    if name in {"url", "against"} and value:
        return without_password(value)
    return value if isinstance(value, int | float | None) else list(value) if name == "fields" else str(value)
