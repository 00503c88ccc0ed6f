"""``giornata up``: finds the checkout and hands everything to its launcher."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from giornata_tools.cli import checkout
from giornata_tools.cli.handing_over import module

LAUNCHER = """\
import os, sys
print(sys.argv[1:], os.getcwd(), __file__, flush=True)
sys.exit(7)
"""


def a_checkout(folder: Path) -> Path:
    package = folder / "deploy" / "launcher"
    package.mkdir(parents=True)
    (folder / "deploy" / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(LAUNCHER)
    return folder


def test_the_checkout_of_the_installation_is_found_before_the_working_directory(tmp_path: Path) -> None:
    mine, other = a_checkout(tmp_path / "mine"), a_checkout(tmp_path / "other")
    package = mine / "shared" / "giornata" / "__init__.py"
    assert checkout.first(checkout.places(package, other)) == mine
    installed = tmp_path / "lib" / "giornata" / "__init__.py"
    assert checkout.first(checkout.places(installed, other / "deploy")) == other
    assert checkout.first(checkout.places(installed, tmp_path)) is None


def test_this_checkout_is_found() -> None:
    assert checkout.find() == Path(__file__).parents[3]


def test_flags_and_working_directory_reach_the_launcher_whatever_lies_there(tmp_path: Path) -> None:
    root, here = a_checkout(tmp_path / "root"), tmp_path / "here"
    (here / "deploy").mkdir(parents=True)
    (here / "deploy" / "__init__.py").write_text("raise RuntimeError('another package of this name')")
    command, env = module(root, ("giornata_tools.launcher", "up", "--denoisers", "2", "--help"), os.environ)
    done = subprocess.run(command, env=env, cwd=here, capture_output=True, text=True, check=False)
    assert done.returncode == 7, done.stderr
    main = root / "deploy" / "launcher" / "__main__.py"
    assert done.stdout.strip() == f"['up', '--denoisers', '2', '--help'] {here} {main}"


def test_an_existing_search_path_is_kept(tmp_path: Path) -> None:
    assert module(tmp_path, (), {"PYTHONPATH": "x"})[1]["PYTHONPATH"] == f"{tmp_path}{os.pathsep}x"
    assert module(tmp_path, (), {})[1] == {"PYTHONPATH": str(tmp_path)}


def test_help_is_the_launchers() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "giornata_tools.cli", "up", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "--denoisers N" in done.stdout


def test_without_a_checkout_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "from pathlib import Path; from giornata_tools.cli import checkout; checkout.find = lambda: None; "
        "from giornata_tools.cli.up import up; up.main([], prog_name='giornata up')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "Clone the repository" in done.stderr
    assert "docker compose" in done.stderr
