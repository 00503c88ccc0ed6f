"""How many steps a cosine saves, and after which steps latents are kept."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from giornata.approximate.steps import kept_steps, step_of
from giornata.approximate.table import Table, Tables, Threshold


@pytest.mark.parametrize(
    ("steps", "kept"),
    [(20, (2, 4, 6, 8, 10)), (50, (5, 10, 15, 20, 25)), (28, (2, 5, 8, 11, 14)), (4, (1, 2)), (1, ())],
)
def test_latents_are_kept_after_tenths_of_the_steps_up_to_half(steps: int, kept: tuple[int, ...]) -> None:
    assert kept_steps(steps) == kept


@given(steps=st.integers(1, 1000), tenths=st.integers(1, 10))
def test_shares_of_whole_steps_are_whole_again(steps: int, tenths: int) -> None:
    assert step_of(tenths / 10, steps) == steps * tenths // 10


def test_a_cosine_saves_what_its_threshold_tells() -> None:
    table = Table(thresholds=(Threshold(cosine=0.95, share=0.5), Threshold(cosine=0.8, share=0.1)))
    assert [table.share(cosine) for cosine in (1.0, 0.95, 0.949, 0.8, 0.79, -1.0)] == [
        0.5,
        0.5,
        0.1,
        0.1,
        0,
        0,
    ]
    assert table.least_cosine == 0.8


@pytest.mark.parametrize(
    "pairs", [((0.8, 0.2), (0.9, 0.5)), ((0.9, 0.2), (0.8, 0.2)), ((0.9, 0.2), (0.9, 0.1))]
)
def test_thresholds_that_do_not_fall_are_refused(pairs: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(ValidationError, match="must fall"):
        Table(thresholds=tuple(Threshold(cosine=cosine, share=share) for cosine, share in pairs))


@pytest.mark.parametrize("given_one", [{"cosine": 0, "share": 0.2}, {"cosine": 0.9, "share": 0.6}])
def test_more_than_half_of_the_steps_and_any_prompt_at_all_are_refused(given_one: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        Threshold.model_validate(given_one)


def test_a_model_is_known_by_its_digest_before_its_name() -> None:
    one, other = Table(thresholds=(), told="one"), Table(thresholds=(), told="other")
    tables = Tables({"fresco": one, "dd": other})
    assert (tables.of("fresco", "dd"), tables.of("fresco", "ee"), tables.of("x", "ee")) == (other, one, None)
    assert one.share(1.0) == 0
