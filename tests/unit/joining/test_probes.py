"""The probes that are built in, and those of a folder."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from giornata_tools.lora_profiler.probes import ProbesError, built_in, photographs, read_folder
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
