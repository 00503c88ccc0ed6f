"""Faults as data: each of the list can still be put in, and those that are drawn are faults of the code as it is."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

import pytest

from tests.mutants.sampling import PURE, applied, edits, sample
from tests.mutants.trees import ROOT, Fault, StaleFaultError, listed


@pytest.mark.parametrize("fault", listed(), ids=lambda fault: fault.name)
def test_a_fault_of_the_list_can_be_put_in(fault: Fault) -> None:
    faulty = fault.mutant().text
    ast.parse(faulty)
    assert faulty != (ROOT / fault.file).read_text()
    assert [test for test in fault.tests if not (ROOT / test).is_file()] == []


@pytest.mark.parametrize("text", ["a = 1\n", "a = 2\nb = 2\na = 2\n", None])
def test_a_fault_whose_code_has_changed_says_so(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "m.py").write_text(text)
    with pytest.raises(StaleFaultError, match=r'"two".* occurs [02] times in m\.py'):
        Fault("two", "m.py", "a = 2\n", "a = 3\n", ()).mutant(tmp_path)


def test_what_a_module_may_get_wrong() -> None:
    source = '''"""Text is 1 thing."""


@register(1)
def f(n: Literal[1], flag: bool = True) -> int | None:
    """Counts 2."""
    if n < 3 and not flag:
        return f"é {n + 1}"
    assert "é" in (n -
                   1)
    if flag:
        return False
    flag = zip(n, strict=True)
    return None
'''
    found = edits(source)
    assert [(edit.node.lineno, edit.text) for edit in found] == [
        (5, "False"),
        (7, "(n < 3 or not flag)"),
        (7, "(n <= 3)"),
        (7, "(3 + 1)"),
        (7, "(flag)"),
        (8, "None"),
        (9, "('é' not in n - 1)"),
        (9, "(n + 1)"),
        (10, "(1 + 1)"),
        (12, "True"),
    ]
    number = found[-3]
    assert applied(source, number) == source.replace("(n -\n                   1)", "((n + 1))")
    assert '"é" in (n -\n                   (1 + 1))' in applied(source, found[-2])
    assert all(ast.dump(ast.parse(applied(source, edit))) != ast.dump(ast.parse(source)) for edit in found)


def test_a_seed_draws_the_same_faults_again_and_no_fault_twice(tmp_path: Path) -> None:
    """In a tree of one module and its tests: to read all tests takes seconds."""
    for name in (PURE["job_records"].folder, "tests/unit/router/test_job_records.py"):
        (tmp_path / name).parent.mkdir(parents=True)
        shutil.copy(ROOT / name, tmp_path / name)
    drawn, again, other = (sample(8, seed, ["job_records"], tmp_path) for seed in (7, 7, 8))
    assert drawn == again != other
    assert len({(one.file, one.text) for one in drawn}) == 8
    for one in drawn:
        compile(one.text, one.file, "exec")
        assert one.tests
