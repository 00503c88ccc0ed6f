"""Folders that the workers of a run share."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.patience import HUNG_S
from tests.shared_files import SharedFolders


def write(folder: Path) -> None:
    (folder / "part").mkdir()
    (folder / "part" / "weights").write_text("made")


def refuse(folder: Path) -> None:
    pytest.fail("it was made twice")


def test_one_worker_makes_a_folder_and_all_have_it(tmp_path: Path) -> None:
    folder = SharedFolders(tmp_path).folder("tiny/flux", write)
    assert folder.name == "flux"
    for worker in (SharedFolders(tmp_path), SharedFolders(tmp_path)):
        assert worker.folder("tiny/flux", refuse) == folder
        worker.check()


def test_a_worker_waits_until_another_has_made_it(tmp_path: Path) -> None:
    entered, going = threading.Event(), threading.Event()

    def slowly(folder: Path) -> None:
        entered.set()
        assert going.wait(HUNG_S)
        write(folder)

    first = threading.Thread(target=SharedFolders(tmp_path).folder, args=("tiny", slowly))
    first.start()
    assert entered.wait(HUNG_S)
    found: list[Path] = []
    second = threading.Thread(target=lambda: found.append(SharedFolders(tmp_path).folder("tiny", refuse)))
    second.start()
    assert not found
    going.set()
    for thread in (first, second):
        thread.join(HUNG_S)
    assert (found[0] / "part" / "weights").read_text() == "made"


def test_what_a_killed_worker_has_left_is_made_again(tmp_path: Path) -> None:
    def half(folder: Path) -> None:
        (folder / "half").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        SharedFolders(tmp_path).folder("tiny", half)
    folder = SharedFolders(tmp_path).folder("tiny", write)
    assert [path.name for path in folder.iterdir()] == ["part"]


@pytest.mark.parametrize(
    "harm", [Path.unlink, lambda path: path.write_text("other"), lambda path: path.with_name("new").touch()]
)
def test_a_test_that_changed_files_of_others_is_told(tmp_path: Path, harm: object) -> None:
    folders = SharedFolders(tmp_path)
    folder = folders.folder("tiny", write)
    folders.check()
    harm(folder / "part" / "weights")  # type: ignore[operator]  # one of the functions above
    with pytest.raises(AssertionError, match="files that others read"):
        folders.check()
