"""What is known of edits in production. Pure; the figures are in ``workload_facts.json``, with their source."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final

from giornata_lab.loadgen.distributions import Mix

FACTS: Final[Mapping[str, Any]] = json.loads(
    Path(__file__).with_name("workload_facts.json").read_text(encoding="utf-8")
)
MASK_RATIOS: Final[Mapping[str, Sequence[float]]] = {
    **FACTS["mask_ratio_percentiles"],
    "mixed": sorted(chain.from_iterable(FACTS["mask_ratio_percentiles"].values())),
}
"""The ratio of masked to all pixels at equal distances from 0 to 100 %, by trace; `mixed` is all of them together."""
STEPS: Final[Mix] = {int(steps): weight for steps, weight in FACTS["steps"].items()}
"""Denoising steps of a request."""
IMAGES: Final[Mix] = {int(images): weight for images, weight in FACTS["images_per_request"].items()}
"""Pictures that a request asks for."""
ZIPF: Final = float(FACTS["template_zipf_exponent"])
"""Exponent of the popularity of templates."""
BURSTS: Final = float(FACTS["inter_arrival_cv"])
"""Coefficient of variation of inter-arrival times; a Poisson process has 1."""
_ADAPTERS: Final[Mapping[str, Any]] = FACTS["adapters"]
ADAPTERS: Final[Mapping[str, Mapping[str, Mix]]] = {
    service: {kind: {int(number): share for number, share in mix.items()} for kind, mix in told.items()}
    for service, told in _ADAPTERS["services"].items()
}
"""By service: how many `loras` and `controlnets` a request has."""
LORAS: Final = int(_ADAPTERS["lora_count"])
"""Distinct LoRAs."""
LORA_ZIPF: Final = float(_ADAPTERS["lora_zipf_exponent"])
"""Exponent of their popularity."""
LORA_BYTES: Final[Sequence[int]] = _ADAPTERS["lora_bytes"]
"""Sizes of LoRAs."""
PEAK: Final = float(_ADAPTERS["peak_minute_over_mean"])
"""Requests with and without LoRAs in the busiest minute, over the mean of all minutes."""


def controlnets() -> Mix:
    """Popularity of ControlNets by number: a few serve nearly all requests, and each of these as many."""
    count, (most_used, share) = _ADAPTERS["controlnet_count"], _ADAPTERS["controlnet_most_used"]
    rest = (1 - share) / (count - most_used)
    return {number: share / most_used if number < most_used else rest for number in range(count)}
