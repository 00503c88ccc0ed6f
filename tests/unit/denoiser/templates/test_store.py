"""Recordings in memory, pinned, and on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from giornata.wire.workers import LoadSample, Tier
from giornata_denoiser.choices import BITS
from giornata_denoiser.rows.template import CachedBlock, CachedTemplate, Entry, store
from giornata_denoiser.templates import store as template_store
from giornata_denoiser.templates.store import PINNED, TemplateStore
from tests.present import present
from tests.unit.denoiser.templates.desk import same, template

# The store of recordings: two tiers, each within its budget.


def test_a_store_goes_from_memory_to_disk_to_nothing(tmp_path: Path) -> None:
    one = template("one")
    template_store.write_recording(one, tmp_path / "x")
    room = (tmp_path / "x").stat().st_size * 3 + 100  # names are of different lengths
    tiers = TemplateStore(one.size_bytes * 2, tmp_path, disk_bytes=room)
    (tmp_path / "x").unlink()
    for name in ("one", "two", "three", "four"):
        tiers.put(template(name))
    here = [tiers.size_of(name) is not None for name in ("one", "two", "three", "four")]
    assert here == [False, True, True, True]
    assert tiers.counted().memory_bytes == one.size_bytes * 2
    assert tiers.find("one") is None
    found = present(tiers.find("two"))
    assert same(found, template("two"))
    assert tiers.find("four") is not None
    assert dict(tiers.counters) == {"misses": 1, "hits_disk": 1, "hits_memory": 1}
    assert (tiers.counted().evicted_memory, tiers.counted().evicted_disk) == (3, 1)
    assert len(list(tmp_path.iterdir())) == 3


def test_a_restart_keeps_what_is_on_disk(tmp_path: Path) -> None:
    TemplateStore(0, tmp_path, 10**6).put(template("one"))
    found = present(TemplateStore(10**6, tmp_path, 10**6).find("one"))
    assert same(found, template("one"))
    assert TemplateStore(10**6, tmp_path, 0).size_of("one") is None
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_no_template_is_a_miss_and_removed(tmp_path: Path) -> None:
    TemplateStore(0, tmp_path, 10**6).put(template("one"))
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-3])
    tiers = TemplateStore(10**6, tmp_path, 10**6)
    assert tiers.find("one") is None
    assert list(tmp_path.iterdir()) == []
    template_store.write_recording(template("other"), path)
    assert TemplateStore(10**6, tmp_path, 10**6).find("one") is None
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_read_into_memory_is_a_miss_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    TemplateStore(0, tmp_path, 10**6).put(template("one"))
    tiers = TemplateStore(10**6, tmp_path, 10**6, host=PINNED)

    def no_memory(self: CachedTemplate) -> CachedTemplate:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(CachedTemplate, "pinned", no_memory)
    assert tiers.find("one") is None
    tiers.prefetch("one")
    assert len(list(tmp_path.iterdir())) == 1
    monkeypatch.setattr(CachedTemplate, "pinned", lambda self: self)
    assert tiers.find("one") is not None


def test_a_removed_template_is_in_no_tier(tmp_path: Path) -> None:
    tiers = TemplateStore(10**6, tmp_path, 10**6)
    tiers.put(template("one"))
    assert tiers.remove("one")
    assert not tiers.remove("one")
    assert tiers.find("one") is None
    assert list(tmp_path.iterdir()) == []


def test_a_template_is_whole_for_whoever_has_it_whatever_becomes_of_its_file(tmp_path: Path) -> None:
    """Rows that run hold mapped tensors: neither a removal nor another file of the same name may change them."""
    TemplateStore(0, tmp_path, 10**6).put(template("one"))
    tiers = TemplateStore(10**6, tmp_path, 10**6)
    held = present(tiers.find("one"))
    tiers.put(template("one", seed=1))
    tiers.put(template("two"))
    assert same(held, template("one"))
    tiers.remove_all("one")
    assert list(tmp_path.glob("one*")) == []
    assert same(held, template("one"))
    assert tiers.find("one") is None
    assert tiers.find("two") is not None


def test_a_file_is_checked_once_and_again_when_it_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers = TemplateStore(0, tmp_path, 10**6)
    tiers.put(template("one"))
    checks: list[bool] = []
    read = template_store.read_recording

    def watched(path: Path, recording_id: str, *, checked: bool = False) -> CachedTemplate:
        checks.append(checked)
        return read(path, recording_id, checked=checked)

    monkeypatch.setattr(template_store, "read_recording", watched)
    for _ in range(2):
        found = present(tiers.find("one"))
        assert same(found, template("one"))
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    path.unlink()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert tiers.find("one") is None
    assert checks == [False, True, False]
    assert list(tmp_path.iterdir()) == []


def test_what_was_prefetched_is_in_memory_for_its_edit(tmp_path: Path) -> None:
    TemplateStore(0, tmp_path, 10**6).put(template("one"))
    told: list[LoadSample] = []
    tiers = TemplateStore(10**6, tmp_path, 10**6, told=told.append)
    assert tiers.size_of("none") is None
    assert (tiers.size_of("one") or 0) > template("one").size_bytes  # its file
    for name in ("one", "one", "none"):
        tiers.prefetch(name)
    assert tiers.size_of("one") == template("one").size_bytes
    assert tiers.find("one") is not None
    assert [(read.tier, read.size_bytes) for read in told] == [(Tier.DISK, template("one").size_bytes)]
    counted = tiers.counted()
    assert (counted.prefetched, counted.hits_memory, counted.hits_disk, counted.misses) == (1, 0, 1, 0)
    assert tiers.find("one") is not None
    assert tiers.counted().hits_memory == 1, "its second edit found it in memory"
    assert counted.memory_bytes == template("one").size_bytes
    assert counted.disk_bytes == sum(path.stat().st_size for path in tmp_path.iterdir()) > 0


# Files of recordings: whole or not there, and nothing wrong is ever read.


@pytest.mark.parametrize("bits", BITS)
def test_a_file_gives_back_the_template(tmp_path: Path, bits: int) -> None:
    made = template("t", bits)
    template_store.write_recording(made, tmp_path / "f")
    assert (tmp_path / "f").stat().st_size >= made.size_bytes
    assert same(template_store.read_recording(tmp_path / "f", "t"), made)
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_no_changed_byte_of_a_file_goes_unnoticed(tmp_path: Path) -> None:
    path = tmp_path / "f"
    template_store.write_recording(template("t", tokens=2), path)
    whole = path.read_bytes()
    for index in range(0, len(whole), 11):
        path.write_bytes(whole[:index] + bytes([whole[index] ^ 4]) + whole[index + 1 :])
        with pytest.raises(template_store.TemplateFileInvalid):
            template_store.read_recording(path, "t")
    for length in (0, 3, 8, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(template_store.TemplateFileInvalid):
            template_store.read_recording(path, "t")
    save_file({"weight": torch.zeros(2)}, path)
    with pytest.raises(template_store.TemplateFileInvalid):
        template_store.read_recording(path, "t")


def test_a_full_disk_is_an_error_of_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(template_store, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        template_store.write_recording(template("one"), tmp_path / "f")
    assert list(tmp_path.iterdir()) == []


# Templates in pinned memory, of which torch gives blocks of powers of two: they take little more than their
# bytes.


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The pinned blocks that are made, in bytes as torch makes them."""
    made: list[int] = []

    def rounded(size_bytes: int) -> None:
        made.append(1 << (size_bytes - 1).bit_length())

    def empty(*shape: int, _of: Any = torch.empty, pin_memory: bool = False, **how: Any) -> Tensor:
        found: Tensor = _of(*shape, **how)
        if pin_memory:
            rounded(found.nbytes)
        return found

    def pin_memory(self: Tensor) -> Tensor:
        rounded(self.nbytes)
        return self.clone()

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
    return made


@pytest.mark.parametrize(("bits", "tokens"), [*zip(BITS, (1, 33, 70), strict=True)])
def test_an_entry_in_pinned_memory_is_the_same_and_takes_a_tenth_more_at_most(
    blocks: list[int], bits: int, tokens: int
) -> None:
    def kept(seed: int) -> CachedBlock:
        made = torch.Generator().manual_seed(seed)
        return CachedBlock(*(store(torch.randn(tokens, 1024, generator=made), bits) for _ in range(2)))

    recording = CachedTemplate("t", (1, 1), (Entry(0.5, tuple(map(kept, range(24)))),))
    pinned = recording.pinned()
    before, after = ([*each.entries[0].blocks] for each in (recording, pinned))
    for one, other in zip(before, after, strict=True):
        for part, twin in zip(one.parts, other.parts, strict=True):
            for tensor, copy in zip(part.tensors, twin.tensors, strict=True):
                assert torch.equal(tensor, copy)
                assert copy.data_ptr() % 16 == 0
                assert copy.is_contiguous()
    assert pinned.size_bytes == recording.size_bytes
    assert sum(blocks) <= 1.1 * recording.size_bytes
