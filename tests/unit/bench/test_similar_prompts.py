"""What the measure of the approximate prompt cache makes of edits."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from giornata.approximate.table import SkipTable
from giornata_tools.model.scenes import COLOURS, SHAPES
from tests.bench.compute import similar_prompts as similar
from tests.bench.compute.similar_prompts import Begun
from tests.bench.prompt_cache import written
from tests.bench.prompt_lookup import look_up, prompts, questions


def begun(cosine: float, share: float, lost: int, of: int = 100, source: str = "other colour") -> list[Begun]:
    """Edits of which `lost` are wrong that were right in full."""
    return [Begun(source, cosine, share, number >= lost, True, 0.9) for number in range(of)]


def test_a_group_saves_the_largest_share_that_loses_one_point_at_most() -> None:
    edits = [*begun(0.96, 0.1, 0), *begun(0.97, 0.2, 1), *begun(0.98, 0.3, 2)]
    assert similar.chosen(edits) == 0.2


def test_what_is_fine_again_after_a_loss_is_chance() -> None:
    edits = [*begun(0.96, 0.1, 0), *begun(0.96, 0.2, 2), *begun(0.96, 0.3, 0)]
    assert similar.chosen(edits) == 0.1


def test_edits_that_only_came_right_by_chance_count_against_those_that_were_lost() -> None:
    gained = [Begun("other colour", 0.96, 0.1, True, False, 0.9)] * 2
    assert similar.chosen([*begun(0.96, 0.1, 3), *gained]) == 0.1
    assert similar.line("all", gained)["points lost"] == -100


def test_few_edits_tell_nothing() -> None:
    assert similar.chosen(begun(0.96, 0.1, 0, of=similar.LEAST_EDITS - 1)) == 0
    assert similar.chosen([]) == 0


def test_the_same_prompt_loses_nothing_and_does_not_hide_what_others_lose() -> None:
    same = begun(1.0, 0.1, 0, of=1000, source=similar.SAME)
    assert similar.chosen(same) == 0
    assert similar.chosen([*same, *begun(0.96, 0.1, 2)]) == 0


def test_shares_do_not_grow_as_cosines_fall() -> None:
    edits = [*begun(0.96, 0.1, 0), *begun(0.9, 0.1, 0), *begun(0.9, 0.2, 0), *begun(0.8, 0.1, 0)]
    assert similar.table(edits) == [
        {"cosine": 0.95, "share": 0.1},
        {"cosine": 0.85, "share": 0.1},
        {"cosine": 0.75, "share": 0.1},
    ]


def test_the_table_ends_with_the_first_group_that_may_save_nothing() -> None:
    edits = [*begun(0.96, 0.1, 0), *begun(0.9, 0.1, 9), *begun(0.8, 0.1, 0), *begun(0.2, 0.1, 0)]
    assert similar.table(edits) == [{"cosine": 0.95, "share": 0.1}]
    assert similar.table(begun(0.2, 0.1, 0)) == []


def test_other_edits_judge_the_share_that_was_chosen() -> None:
    lines = [{"cosine": 0.95, "share": 0.2}]
    others = [*begun(0.96, 0.1, 50), *begun(0.96, 0.2, 3), *begun(0.9, 0.2, 50)]
    (told,) = similar.judged(others, lines)
    assert (told["latent of"], told["points lost"], told["edits"]) == (">= 0.95", 3, 100)


@pytest.mark.parametrize(
    ("cosine", "name"),
    [(1.0, ">= 0.95"), (0.95, ">= 0.95"), (0.949, "0.85-0.95"), (0.75, "0.75-0.85"), (-0.5, "< 0.75")],
)
def test_groups_by_cosine(cosine: float, name: str) -> None:
    assert similar.group_name(similar.floor_of(cosine)) == name


@pytest.mark.parametrize(
    ("source", "colour", "shape"),
    [
        (similar.SAME, True, True),
        ("paraphrase", True, True),
        ("other colour", False, True),
        ("other shape", True, False),
        ("both other", False, False),
    ],
)
def test_sources_differ_in_what_they_say(source: str, colour: bool, shape: bool) -> None:
    for wanted in COLOURS:
        words = similar.sources(wanted, "star", random.Random(3))[source].split()  # noqa: S311 - a workload
        assert (wanted in words, "star" in words) == (colour, shape)
        assert any(each in words for each in COLOURS)
        assert any(each in words for each in SHAPES)
    asked = similar.sources("red", "star", random.Random(3))  # noqa: S311
    assert asked["paraphrase"] != asked[similar.SAME] == "a red star"


def test_a_table_of_edits_is_read_by_the_cache_and_of_no_edits_none_is_left(tmp_path: Path) -> None:
    path = tmp_path / "approximate.json"
    written(path, [{"cosine": 0.95, "share": 0.2}], {"edits": 100})
    assert SkipTable.model_validate_json(path.read_bytes()).share(0.96) == 0.2
    written(path, [], {"edits": 100})
    assert not path.exists()


def test_a_look_up_near_a_prompt_finds_it() -> None:
    chance = np.random.default_rng(0)
    known = prompts(50, chance)
    asked = questions(known, 20, chance)
    assert np.allclose(np.linalg.norm(asked, axis=1), 1, atol=1e-5)
    assert (known @ asked.T).max(axis=0).min() > 0.9


def test_product_and_cache_are_told_side_by_side() -> None:
    lines = look_up(30, 10, 0)
    assert [(line["by"], line["recall"]) for line in lines] == [("product", 1.0), ("cache", 1.0)]
