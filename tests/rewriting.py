"""Compiled tests, made once for all workers: in a new checkout each would spend ten seconds on all of them.

Pytest rewrites the asserts of a test module where it imports it, and keeps the code. Workers import the same modules at
the same time, and so none would find what another has made.
"""

from __future__ import annotations

import compileall
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from _pytest.assertion import rewrite


def compile_tests(config: pytest.Config) -> None:
    """Keep the code of what a run collects, and of all else in folders of tests, where that is not there already.

    A module that has no valid syntax is left to who imports it. Nothing is kept where Python is told so.
    """
    state = config.stash.get(rewrite.assertstate_key, None)
    if state is None or sys.dont_write_bytecode:
        return
    for path in sources(config):
        if path.name != "conftest.py" and not path.name.startswith("test_"):
            compileall.compile_file(path, quiet=2)
            continue
        kept = rewrite.get_cache_dir(path) / (path.stem + rewrite.PYC_TAIL)
        if rewrite._read_pyc(path, kept) is None:
            kept.parent.mkdir(parents=True, exist_ok=True)
            with suppress(SyntaxError):
                digest, code = rewrite._rewrite_test(path, config)
                rewrite._write_pyc(state, code, digest, kept)


def sources(config: pytest.Config) -> Iterator[Path]:
    """Modules in the folders and files that a run is asked for, but for those that it ignores.

    Pytest tells of what is not there.
    """
    here = config.invocation_params.dir
    ignored = {here / each for each in config.getoption("ignore") or ()}
    for argument in config.args:
        place = here / argument.partition("::")[0]
        for path in sorted(place.rglob("*.py")) if place.is_dir() else (place,):
            if path.is_file() and ignored.isdisjoint((path, *path.parents)):
                yield path
