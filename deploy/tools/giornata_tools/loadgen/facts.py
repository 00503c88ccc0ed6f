"""What is known of edits in production. Pure; the figures are in ``workload_facts.json``, with their source."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final

from giornata_tools.loadgen.distributions import Mix

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
