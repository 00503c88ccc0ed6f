"""Which rows of a step are computed, and what step caches remember of it: between rows and their forward. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from giornata.packed.first_block import FirstBlockCache, Remembered
from giornata.packed.uses import Use, by_sequence
from giornata.wire.values import Mode
from giornata_denoiser.families.protocol import ModelFamily
from giornata_denoiser.rows.row import Row
from giornata_denoiser.rows.step_cache import Cached, Expansion, FirstBlockRule, TaylorRule, expanded


def extrapolated(row: Row, *, learns: bool) -> Expansion | None:
    """What the next step of `row` takes its output from; None where the network computes it.

    What others or later steps take is always computed: keys and values that are renewed, recordings, and corrections
    where the engine `learns` them.
    """
    rule, known = row.step_cache, row.cached
    if not isinstance(rule, TaylorRule) or not isinstance(known, Expansion) or _forgotten(row):
        return None
    teaches = learns and row.template is not None and row.region is not None and row.corrections is None
    renews = row.renews and not row.masked
    if teaches or renews or row.records is not None or rule.steps.computes(row.step - known.began):
        return None
    return known


def skipped_steps(row: Row) -> int:
    """How many of its remaining steps `row` will extrapolate."""
    if not isinstance(row.step_cache, TaylorRule):
        return 0
    began = row.cached.began if isinstance(row.cached, Expansion) else row.step
    here = row.step_cache.steps
    return here.skipped(row.steps - began) - here.skipped(row.step - began)


def caching(uses: Sequence[Use], rows: Sequence[Row]) -> tuple[Use, ...]:
    """The `uses` of a batch's sequences with the first-block caches of their rows."""
    caches = by_sequence([_caches(row) for row in rows])
    return tuple(
        use if cache is None else replace(use, first_block=cache)
        for use, cache in zip(uses, caches, strict=True)
    )


def of_rows(uses: Sequence[Use], rows: Sequence[Row]) -> list[tuple[FirstBlockCache, ...]]:
    """By row: the first-block caches of its sequences, from the uses of the batch's; empty where it has none."""
    negative = iter(uses[len(rows) :])
    found = []
    for row, use in zip(rows, uses, strict=False):
        of = [use, *([next(negative)] if len(row.prompts) > 1 else [])]
        found.append(tuple(each.first_block for each in of if each.first_block is not None))
    return found


def remembered(row: Row, caches: Sequence[FirstBlockCache], outputs: Tensor | None) -> Cached | None:
    """What `row` remembers behind a step that was computed.

    `outputs` are (sequences, computed, channels), what the network answered; None where nothing is extrapolated.
    """
    rule = row.step_cache
    if isinstance(rule, FirstBlockRule):
        return tuple(cache.last for cache in caches if cache.last is not None)
    if isinstance(rule, TaylorRule) and outputs is not None:
        known = None if _forgotten(row) or not isinstance(row.cached, Expansion) else row.cached
        return expanded(known, row.step, outputs, rule.order)
    return None


def cache_bytes(row: Row, family: ModelFamily) -> int:
    """The most bytes that a row remembers for its step cache."""
    rule, sequences = row.step_cache, len(row.prompts)
    if isinstance(rule, FirstBlockRule):
        tokens = row.block_tokens if row.region is None else row.computed_tokens
        width = max((spec.channels([Mode.HIDDEN]) for spec in family.specs), default=0)
        return 2 * sequences * tokens * width * family.dtype.itemsize
    if isinstance(rule, TaylorRule):
        return sequences * row.latent.shape[-1] * row.computed_tokens * 4 * (rule.order + 1)
    return 0


def _caches(row: Row) -> tuple[FirstBlockCache | None, ...]:
    """The first-block cache of each sequence; None where the row has none."""
    rule = row.step_cache
    if not isinstance(rule, FirstBlockRule):
        return (None,) * len(row.prompts)
    known: tuple[Remembered | None, ...] = (None,) * len(row.prompts)
    if isinstance(row.cached, tuple) and not _forgotten(row):
        known = row.cached
    return tuple(FirstBlockCache(rule.threshold, last) for last in known)


def _forgotten(row: Row) -> bool:
    """Whether what `row` remembers says nothing of its next step."""
    return row.joins_loras or not row.begun
