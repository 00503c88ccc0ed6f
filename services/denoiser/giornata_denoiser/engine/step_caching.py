"""Which rows of a step are computed, and what step caches remember of it: between rows and their forward. Pure."""

from __future__ import annotations

from torch import Tensor

from giornata_denoiser.rows.row import Row
from giornata_denoiser.rows.step_cache import TaylorExpansion, expanded


def extrapolated(row: Row, *, learns: bool) -> TaylorExpansion | None:
    """What the next step of `row` takes its output from; None where the network computes it.

    What others or later steps take is always computed: keys and values that are renewed, recordings, and corrections
    where the engine `learns` them.
    """
    rule, known = row.step_cache, row.cached
    if rule is None or known is None or _forgotten(row):
        return None
    teaches = learns and row.template is not None and row.region is not None and row.corrections is None
    renews = row.renews and not row.masked
    if teaches or renews or row.records is not None or rule.steps.computes(row.step - known.began):
        return None
    return known


def skipped_steps(row: Row) -> int:
    """How many of its remaining steps `row` will extrapolate."""
    if row.step_cache is None:
        return 0
    began = row.step if row.cached is None else row.cached.began
    here = row.step_cache.steps
    return here.skipped(row.steps - began) - here.skipped(row.step - began)


def remembered(row: Row, outputs: Tensor | None) -> TaylorExpansion | None:
    """What `row` remembers behind a step that was computed.

    `outputs` are (sequences, computed, channels), what the network answered; None where nothing is extrapolated.
    """
    if row.step_cache is None or outputs is None:
        return None
    return expanded(None if _forgotten(row) else row.cached, row.step, outputs, row.step_cache.order)


def cache_bytes(row: Row) -> int:
    """The most bytes that a row remembers for its step cache."""
    orders = 0 if row.step_cache is None else row.step_cache.order + 1
    return len(row.prompts) * row.latent.shape[-1] * row.computed_tokens * 4 * orders


def _forgotten(row: Row) -> bool:
    """Whether what `row` remembers says nothing of its next step."""
    return row.joins_loras or not row.begun
