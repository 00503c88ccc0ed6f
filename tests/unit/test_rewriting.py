"""Compiled tests of a run of several workers."""

from __future__ import annotations

import sys

import pytest
from _pytest.assertion import rewrite

from tests.rewriting import compile_tests


def test_what_a_run_collects_is_compiled_for_its_workers_and_what_it_ignores_is_not(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    names = ("tests/test_it", "tests/helping", "tests/test_wrong", "tests/lab/test_that")
    pytester.makepyfile(**dict.fromkeys(names, "def") | dict.fromkeys(names[:2], "assert 7 == 8"))
    config = pytester.parseconfig("tests", "none/test_it.py", "--ignore", "tests/lab")
    compile_tests(config)
    kept = {path.name.partition(".")[0]: path for path in pytester.path.rglob("*.pyc")}
    assert kept.keys() == {"test_it", "helping"}
    code = rewrite._read_pyc(pytester.path / "tests/test_it.py", kept["test_it"])
    assert code is not None, "pytest makes it again"
    assert "@pytest_ar" in code.co_names, "its asserts tell nothing"
    made = kept["test_it"].stat().st_mtime_ns
    compile_tests(config)
    assert kept["test_it"].stat().st_mtime_ns == made
