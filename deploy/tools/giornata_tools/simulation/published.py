"""Workers whose step times were published: NVIDIA H800 with Flux, 1024 x 1024; from ``published.json``. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from giornata.planning.costs import StepCosts
from giornata_tools.simulation.jobs import PictureSetting
from giornata_tools.simulation.machines import Machine

FIGURES: Final[Mapping[str, Any]] = json.loads(
    Path(__file__).with_name("published.json").read_text(encoding="utf-8")
)
FLUX: Final = FIGURES["models"]["flux"]
FLUX_PICTURE: Final = PictureSetting(FLUX["text_tokens"], FLUX["image_tokens"])
DECODE_MS: Final = float(FLUX["decode_ms"][0])
"""Decoding of one picture at a time."""


def h800_flux(rows: int = 8) -> Machine:
    """One H800 with Flux; `rows` share a step at most.

    The times of full batches are fitted by a constant a step and a constant a picture (relative least squares). The
    time of a picture is then split as its operations are, at one speed for all of them. A token costs 2 FLOP for each
    of the weights that it meets in a block: 12 width² in either kind of block (double: queries, keys and values 3,
    projection 1, feed-forward 8; single: 7 in and 5 out). A pair of query and key costs 4 width (both products). To
    project a token's keys and values again costs 4 width².
    """
    step_ms, picture_ms = _line(FIGURES["batches"], FLUX["step_ms"])
    tokens = FLUX["image_tokens"] + FLUX["text_tokens"]
    per_token, per_pair = 2 * FLUX["token_weights"] * FLUX["width"] ** 2, 4 * FLUX["width"]
    per_projection = 4 * FLUX["width"] ** 2
    flop_ms = picture_ms / FLUX["blocks"] / (tokens * per_token + tokens**2 * per_pair)
    weights = (step_ms, 0.0, flop_ms * per_token, flop_ms * per_projection, flop_ms * per_pair)
    return Machine(StepCosts(weights), FLUX["blocks"], "NVIDIA H800", rows)


def _line(sizes: Sequence[float], times: Sequence[float]) -> tuple[float, float]:
    """Constant and slope with the least squares of residuals as shares of `times`."""
    ones = sum(1 / t**2 for t in times)
    xs, xx = (sum(x**power / t**2 for x, t in zip(sizes, times, strict=True)) for power in (1, 2))
    ys, xy = sum(1 / t for t in times), sum(x / t for x, t in zip(sizes, times, strict=True))
    slope = (ones * xy - xs * ys) / (ones * xx - xs**2)
    return (ys - slope * xs) / ones, slope
