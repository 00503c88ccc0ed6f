"""Files of recordings: whole or not there, and nothing wrong is ever read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from giornata_denoiser.choices import BITS
from giornata_denoiser.templates import disk
from tests.unit.denoiser.templates.recordings import same, template


@pytest.mark.parametrize("bits", BITS)
def test_a_file_gives_back_the_template(tmp_path: Path, bits: int) -> None:
    made = template("t", bits)
    size = disk.write(made, tmp_path / "f")
    assert size == (tmp_path / "f").stat().st_size >= made.size_bytes
    assert same(disk.read(tmp_path / "f", "t"), made)
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_no_changed_byte_of_a_file_goes_unnoticed(tmp_path: Path) -> None:
    path = tmp_path / "f"
    disk.write(template("t", tokens=2), path)
    whole = path.read_bytes()
    for index in range(0, len(whole), 7):
        path.write_bytes(whole[:index] + bytes([whole[index] ^ 4]) + whole[index + 1 :])
        with pytest.raises(disk.TemplateFileInvalid):
            disk.read(path, "t")
    for length in (0, 3, 8, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(disk.TemplateFileInvalid):
            disk.read(path, "t")
    save_file({"weight": torch.zeros(2)}, path)
    with pytest.raises(disk.TemplateFileInvalid):
        disk.read(path, "t")


def test_a_full_disk_is_an_error_of_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(disk, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        disk.write(template("one"), tmp_path / "f")
    assert list(tmp_path.iterdir()) == []
