"""Files of a folder within a budget: whole or not there, the least recently used out first, pinned ones kept."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from giornata.residency.tiers import FolderTier

SUFFIX = ".thing.safetensors"


def write(tier: FolderTier, name: str, size_bytes: int = 4) -> None:
    with tier.writing(name) as path:
        path.write_bytes(bytes(size_bytes))


def files(folder: Path) -> set[str]:
    return {path.name.removesuffix(SUFFIX) for path in folder.iterdir()}


def test_the_least_recently_used_file_goes_and_a_pinned_one_stays(tmp_path: Path) -> None:
    tier = FolderTier(tmp_path, 8, SUFFIX)
    for name in "ab":
        write(tier, name)
    assert tier.use("a")
    write(tier, "c")
    assert set(tier) == files(tmp_path) == {"a", "c"}
    with tier.pinned("a"):
        write(tier, "d")
        write(tier, "e", 9)
        assert files(tmp_path) == {"a", "d"}, "what is larger than all goes alone, and at once"
    assert (tier.evicted, tier.size_bytes, tier.size_of("d")) == (3, 8, 4)


def test_a_file_that_could_not_be_written_leaves_nothing_and_the_earlier_one(tmp_path: Path) -> None:
    tier = FolderTier(tmp_path, 8, SUFFIX)
    write(tier, "a")

    def fail() -> None:
        with tier.writing("a") as path:
            path.write_bytes(b"half")
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        fail()
    assert files(tmp_path) == {"a"}
    assert tier.path("a").read_bytes() == bytes(4)


def test_files_of_an_earlier_process_are_taken_over_in_the_order_of_their_use(tmp_path: Path) -> None:
    for age, name in enumerate("cab"):
        path = tmp_path / f"{name}{SUFFIX}"
        path.write_bytes(bytes(4))
        os.utime(path, (1000 + age, 1000 + age))
    (tmp_path / "x.thing.part").write_bytes(b"half")
    (tmp_path / "y").write_bytes(b"another's")
    tier = FolderTier(tmp_path, 8, SUFFIX)
    assert list(tier) == ["a", "b"]
    assert files(tmp_path) == {"a", "b", "y"}


def test_a_removed_file_is_gone_and_a_tier_without_a_folder_holds_nothing(tmp_path: Path) -> None:
    tier = FolderTier(tmp_path, 8, SUFFIX)
    write(tier, "a")
    assert tier.remove("a")
    assert not tier.remove("a")
    assert not list(tmp_path.iterdir())
    empty = FolderTier(None, 8, SUFFIX)
    assert not empty.use("a")
    assert "a" not in empty
