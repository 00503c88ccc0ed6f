"""What ``giornata simulate`` simulates, made from its options and the files that they name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from giornata_lab.cli.workload import read_trace
from giornata_lab.loadgen import workload
from giornata_lab.loadgen.workload import (
    AdapterSizes,
    AdapterWorkload,
    ArrivalBursts,
    MaskShape,
    Workload,
    zipf,
)
from giornata_lab.simulation import machines
from giornata_lab.simulation.adapters import AdapterDemand, held_controls
from giornata_lab.simulation.jobs import PictureSetting, template_name
from giornata_lab.simulation.machines import Machine, TemplateStorage
from giornata_lab.simulation.options import StageSetting
from giornata_lab.simulation.residency import AdapterSetting
from giornata_lab.simulation.scenario import ArrivalSetting, Scenario, popular
from giornata_lab.simulation.templates import TemplateSetting


def scenario_of(given: Mapping[str, Any]) -> Scenario:
    """Return what the options say.

    Raises:
        ValueError: a file holds something else than it should.
    """
    if given["padding_tokens"] > max(0, given["text_tokens"] - 1):
        raise ValueError(
            f"received {given['padding_tokens']} padding tokens of {given['text_tokens']} text tokens; "
            "accepted are fewer than all"
        )
    weights = zipf(given["templates"], given["zipf"])
    names = frozenset(map(template_name, weights))
    controls = held_controls(round(given["controlnet_gb"] * 1e9)) if given["controlnet_gb"] else ()
    return Scenario(
        machines=tuple(replace(machine, controls=controls) for machine in _machines(given)),
        workload=Workload(
            given["masks"], given["steps"], given["n"], weights, MaskShape.SQUARE, _adapters(given)
        ),
        arriving=_arriving(given),
        picture=PictureSetting(
            given["text_tokens"],
            given["tokens"],
            given["halo"],
            given["corrects"],
            given["padding_tokens"],
        ),
        templates=TemplateSetting(
            size_bytes=given["template_gb"] * 1e9,
            kv_bytes=given["step_gb"] * 1e9,
            registered=names if given["registered"] else frozenset(),
            preloaded=() if given["cold"] else popular(weights),
        ),
        stages=StageSetting(
            given["encode_ms"], given["finish_ms"], given["prepost"], given["hops_ms"], given["relay_ms"]
        ),
        asked=AdapterDemand(
            AdapterSizes.between(*given["lora_mb"]) if given["lora_mb"] else AdapterSizes(),
            workload.ADAPTERS[given["adapters"]]["controlnets"] if given["adapters"] else {0: 1.0},
            given["lora_joins_within"],
        ),
        adapters=AdapterSetting(
            given["lora_device_gb"] * 1e9,
            given["lora_memory_gb"] * 1e9,
            given["lora_disk_gb"] * 1e9,
            given["store_gb_per_s"] * 1e9,
            given["disk_gb_per_s"] * 1e9,
            given["link_gb_per_s"] * 1e9,
            store_latency_s=given["store_latency_s"],
            link_latency_s=given["link_latency_s"],
            workers_a_host=given["workers_a_host"],
        ),
        reuse=given["reuse"],
        slo_s=given["slo"],
        cores=given["cores"] or math.inf,
    )


def _machines(given: Mapping[str, Any]) -> list[Machine]:
    path: Path | None = given["cluster"]
    if path is not None:
        try:
            return machines.read(
                path.read_text(encoding="utf-8"),
                path.suffix,
                lambda name: (path.parent / name).read_text(encoding="utf-8"),
            )
        except (OSError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from error
    named = given["machine"] in machines.PUBLISHED
    group = machines.WorkerGroup(
        machine=given["machine"] if named else None,
        profile=None if named else given["machine"],
        rows=given["rows"],
        noise=given["noise"],
        link_gb_per_s=given["link_gb_per_s"] if given["step_gb"] else None,
    )
    try:
        machine = group.of(lambda name: Path(name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        known = ", ".join(machines.PUBLISHED)
        raise ValueError(f"--machine is {known} or a file of `giornata profile`; {error}") from error
    storage = TemplateStorage(given["memory_gb"] * 1e9, given["disk_gb"] * 1e9, given["disk_gb_per_s"] * 1e9)
    return [replace(machine, storage=storage)] * int(given["workers"])


def _arriving(given: Mapping[str, Any]) -> ArrivalSetting:
    path: Path | None = given["trace"]
    try:
        lines = tuple(read_trace(path)) if path else ()
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
    return ArrivalSetting(
        given["duration"],
        given["warmup"],
        given["cv"],
        ArrivalBursts(given["crowds"]) if given["crowds"] > 1 else None,
        lines,
        given["speed"],
    )


def _adapters(given: Mapping[str, Any]) -> AdapterWorkload | None:
    """LoRAs of jobs; None where jobs have none."""
    if given["adapters"] is None:
        return None
    return replace(
        AdapterWorkload.of(given["adapters"], given["loras"]),
        zipf=given["lora_zipf"],
        repetition=given["lora_repetition"],
        drift_s=given["lora_drift_s"],
    )
