"""Folders of processes that are killed: the next process of any kind removes them, and none that is in use."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from giornata.scratch import PREFIX, scratch_folder
from tests.patience import HUNG_S

ROOT = Path(__file__).parents[2]
OWNER = """
import sys
from pathlib import Path
from giornata.scratch import scratch_folder
with scratch_folder(sys.argv[1]) as folder:
    (folder / "lora").write_bytes(bytes(1 << 20))
    print(folder, flush=True)
    sys.stdin.read()
"""
POOL = """
import asyncio, sys, tempfile
from giornata.scratch import keep_process_sockets, scratch_folder
from giornata_prepost.worker_pools import ImagePool
async def main():
    with scratch_folder() as folder:
        keep_process_sockets(folder)
        async with ImagePool(1):
            print(folder, flush=True)
            await asyncio.to_thread(sys.stdin.read)
if __name__ == "__main__":
    asyncio.run(main())
"""


@contextmanager
def owner(
    program: str | Path, *arguments: str, **environment: str
) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process of its own, and its folder."""
    what = ("-c", program) if isinstance(program, str) else (program,)
    child = subprocess.Popen(
        [sys.executable, *what, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )
    assert child.stdout is not None
    try:
        yield child, Path(child.stdout.readline().strip())
    finally:
        child.kill()
        child.communicate()


def killed(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.wait(HUNG_S)


def test_what_a_killed_process_left_goes_with_the_next_and_a_living_ones_stays(tmp_path: Path) -> None:
    other = tmp_path / "giornata-of-somebody-else"
    other.mkdir()
    with owner(OWNER, str(tmp_path)) as (dead, left), owner(OWNER, str(tmp_path)) as (living, used):
        killed(dead)
        assert (left / "lora").exists()
        with scratch_folder(tmp_path) as own:
            assert not left.exists()
            assert (used / "lora").stat().st_size == 1 << 20
            assert own.stat().st_mode & 0o777 == 0o700
        assert not own.exists()
        living.communicate("")
        assert (living.returncode, used.exists(), other.exists()) == (0, False, True)


def test_many_that_begin_at_once_remove_none_of_each_others(tmp_path: Path) -> None:
    def use(number: int) -> bool:
        with scratch_folder(tmp_path) as folder:
            (folder / "own").write_text(str(number))
            return (folder / "own").read_text() == str(number)

    with ThreadPoolExecutor(16) as threads:
        assert all(threads.map(use, range(400)))
    assert list(tmp_path.glob(f"{PREFIX}*")) == []


def test_the_sockets_of_image_processes_go_with_the_next_prepost(tmp_path: Path, server_folder: Path) -> None:
    program = tmp_path / "pool.py"
    program.write_text(POOL)
    temporary = Path(tempfile.mkdtemp("", "t", server_folder))  # short, for sockets
    with owner(program, TMPDIR=str(temporary)) as (child, folder):
        assert list(temporary.iterdir()) == [folder]
        assert list(folder.glob("listener-*"))
        killed(child)
    with scratch_folder(temporary):
        assert not folder.exists()


def test_no_other_folder_is_temporary() -> None:
    """Folders below another that is removed, or that hold a file for a moment, are named here."""
    known = {
        "scratch.py": "the one that makes them",
        "canonical.py": "in a folder of its own",
        "models.py": "beside what is built, and renamed",
        "keys.py": "beside the file that is written",
    }
    made = [
        path
        for part in ("services", "shared", "deploy/tools")
        for path in (ROOT / part).rglob("*.py")
        if re.search("TemporaryDirectory|mkdtemp", path.read_text(encoding="utf-8"))
    ]
    assert made
    assert [path for path in made if path.name not in known] == []
