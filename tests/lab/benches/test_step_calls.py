"""How many Python functions of ours a step of the engine may call."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from giornata_denoiser.choices import CacheForm
from giornata_denoiser.families.network import ModelFamily
from giornata_lab.bench.step_calls import FAMILIES, CalledFunctions, counted_step

MOST = {
    ("flux", CacheForm.KV, 1): 237,
    ("flux", CacheForm.KV, 4): 309,
    ("flux", CacheForm.HIDDEN, 4): 404,
    ("flux", None, 4): 301,
    ("sd3", CacheForm.KV, 1): 354,
    ("sd3", CacheForm.KV, 4): 426,
    ("sd3", CacheForm.HIDDEN, 4): 631,
    ("unet", CacheForm.KV, 1): 596,
    ("unet", CacheForm.KV, 4): 680,
}
"""Calls of a step of so many rows, each with a mask of its own, by Python 3.11; later ones inline comprehensions. The
aim of 700 of four masked rows is reached: whoever needs fewer lowers these."""
FILES = 21
"""That they may stand in."""


@cache
def family(name: str) -> ModelFamily:
    """Kept for the tests of a process."""
    return FAMILIES[name]()


@pytest.mark.parametrize(("name", "form", "rows"), list(MOST))
def test_a_step_calls_few_functions_in_few_files(name: str, form: CacheForm | None, rows: int) -> None:
    with torch.random.fork_rng():
        calls = counted_step(family(name), form, rows, masks=rows)
    assert calls.total <= MOST[name, form, rows], calls.functions.most_common(20)
    assert len(calls.files) <= FILES, sorted(calls.files)


def test_functions_of_ours_are_counted_and_no_others() -> None:
    calls, of = CalledFunctions(), family("flux")
    vars(of).pop("depth", None)  # it is computed once, and kept
    calls.count(lambda: [torch.nn.functional.relu(torch.ones(2)), of.depth])
    assert calls.functions == {"families/network.py:ModelFamily.depth": 1}
