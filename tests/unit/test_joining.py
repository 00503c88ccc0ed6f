"""How the share of steps before a LoRA joins is found: the probes, the steps tried, the share chosen."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from giornata_tools.lora_profiler.probes import ProbesError, built_in, photographs, read_folder
from giornata_tools.lora_profiler.profiler import FINE, LEAST_SSIM, JoinStepTrial, candidates, joins_within
from tests.fakes.fleet import CARD


def write(folder: Path, name: str, *, mask: tuple[int, int] = (8, 6), prompt: str = "a hat") -> None:
    Image.new("RGB", (8, 6), "teal").save(folder / f"{name}.png")
    marked = Image.new("L", mask, 0)
    marked.putpixel((2, 1), 255)
    marked.putpixel((4, 3), 255)
    marked.save(folder / f"{name}-mask.png")
    (folder / f"{name}.txt").write_text(f"{prompt}\n")


def test_a_model_of_small_pictures_is_given_scenes_and_another_photographs() -> None:
    small, large = (built_in(CARD.model_copy(update={"native_size": size})) for size in (128, 1024))
    assert len(small) == 8
    assert [probe.name for probe in large] == [probe.name for probe in photographs()]
    for probe in (*small, *large):
        with Image.open(io.BytesIO(probe.image)) as image, Image.open(io.BytesIO(probe.mask)) as mask:
            assert image.size == mask.size == probe.box.shape[::-1]
            marked = np.asarray(mask) >= 128
        assert marked.any()
        assert not (marked & ~probe.box).any()
        assert probe.prompt
    assert len({probe.seed for probe in small}) == len(small)
    assert built_in(CARD.model_copy(update={"native_size": 128}))[0].image == small[0].image


def test_a_folder_holds_pictures_with_masks_and_prompts(tmp_path: Path) -> None:
    for name in ("b", "a"):
        write(tmp_path, name, prompt=f"a hat for {name}")
    (tmp_path / "notes.md").write_text("of another kind")
    probes = read_folder(tmp_path)
    assert [(probe.name, probe.prompt, probe.seed) for probe in probes] == [
        ("a", "a hat for a", 0),
        ("b", "a hat for b", 1),
    ]
    rows, columns = np.nonzero(probes[0].box)
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (1, 3, 2, 4)
    assert probes[0].box.sum() == 9


def test_a_folder_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProbesError, match="holds no picture"):
        read_folder(tmp_path)
    write(tmp_path, "a")
    (tmp_path / "a.txt").write_text(" \n")
    with pytest.raises(ProbesError, match="is empty"):
        read_folder(tmp_path)
    (tmp_path / "a.txt").unlink()
    with pytest.raises(ProbesError, match=r"a\.txt"):
        read_folder(tmp_path)
    write(tmp_path, "a", mask=(8, 8))
    with pytest.raises(ProbesError, match="received 8x8 pixels, 2 of them white; accepted 8x6"):
        read_folder(tmp_path)
    write(tmp_path, "a")
    (tmp_path / "a-mask.png").write_bytes(b"no picture")
    with pytest.raises(ProbesError, match="is no probe"):
        read_folder(tmp_path)


# Which steps are tried, and which share of the steps is chosen after what was seen.


CURVES = st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=6).map(tuple), min_size=0, max_size=12)
"""SSIMs of the probes, by step."""


def tried(curve: list[tuple[float, ...]], steps: int = 20) -> list[JoinStepTrial]:
    return [JoinStepTrial(step, steps, ssims) for step, ssims in enumerate(curve, 1)]


@given(CURVES)
def test_all_up_to_the_chosen_share_is_alike_and_the_next_is_not(curve: list[tuple[float, ...]]) -> None:
    seen = tried(curve)
    step = round(joins_within(seen) * 20)
    assert all(one.alike for one in seen[:step])
    assert step == len(seen) or not seen[step].alike


@given(CURVES, st.integers(0, 11), st.floats(0, 1))
def test_pictures_that_are_more_alike_never_shorten_it(
    curve: list[tuple[float, ...]], where: int, better: float
) -> None:
    raised = [
        tuple([max(better, *ssims)] * len(ssims)) if step == where else ssims
        for step, ssims in enumerate(curve)
    ]
    assert joins_within(tried(raised)) >= joins_within(tried(curve))


@given(CURVES, st.integers(0, 11))
def test_what_follows_the_first_that_is_not_alike_does_not_count(
    curve: list[tuple[float, ...]], where: int
) -> None:
    broken = [*curve[:where], (LEAST_SSIM - 0.01,), *curve[where:]]
    assert joins_within(tried(broken)) == joins_within(tried([*curve[:where]]))


@pytest.mark.parametrize(
    ("ssims", "alike"),
    [
        ((0.95,), True),
        ((0.949,), False),
        ((0.97, 0.97, 0.97), True),
        ((1.0, 1.0, 1.0, 0.9), False),  # mean 0.975, standard error 0.025
        ((1.0, 1.0, 1.0, 0.94), True),
    ],
)
def test_few_probes_that_differ_prove_less(ssims: tuple[float, ...], *, alike: bool) -> None:
    assert JoinStepTrial(1, 20, ssims).alike is alike


@given(steps=st.integers(1, 200), at_most=st.floats(0.01, 0.99))
def test_steps_rise_from_the_first_and_end_before_the_last(steps: int, at_most: float) -> None:
    found = list(candidates(steps, at_most))
    assert found == sorted(set(found))
    assert found[:FINE] == [step for step in range(1, steps) if step <= at_most * steps][:FINE]
    assert all(one < steps and one <= at_most * steps for one in found)
    assert len(found) <= FINE + 20, "a model of many steps takes little longer"


@given(steps=st.integers(2, 200), data=st.data())
def test_the_share_of_a_step_leads_to_that_step_again(steps: int, data: st.DataObject) -> None:
    step = data.draw(st.integers(1, steps - 1))
    share = joins_within([JoinStepTrial(step, steps, (1.0,))])
    assert int(share * steps + 1e-9) == step, "as denoisers count"
