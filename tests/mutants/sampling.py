"""Faults drawn at random in modules that only compute: what a comparison, a number or a branch may get wrong.

Kept tools do not fit here: mutmut 3 reads sources below ``./``, ``src/`` or ``source/`` alone, and cosmic-ray changes
type annotations and has one test command for all modules.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Final, NamedTuple

from tests.mutants.trees import ROOT, Mutant


class Package(NamedTuple):
    """Modules without input and output, and their tests."""

    folder: str
    """Or one module."""
    tests: tuple[str, ...]
    """Folders with tests, the nearest first."""
    whole: tuple[str, ...] = ()
    """Test files that use the package as a whole: they are run on every module of it."""


OTHERS: Final = ("tests/unit", "tests/contract", "tests/integration")
"""Where tests are that name what they test, whatever they import."""


PURE: Final = {
    "scheduling": Package(
        "shared/giornata/scheduling",
        ("tests/unit/scheduling",),
        ("tests/unit/scheduling/test_placement.py",),
    ),
    "planning": Package("shared/giornata/planning", ("tests/unit/planning", "tests/unit/denoiser/engine")),
    "packed": Package(
        "shared/giornata/packed",
        ("tests/unit/packed", "tests/unit/denoiser/engine", "tests/unit/denoiser/families"),
        ("tests/unit/denoiser/engine/test_masked.py", "tests/integration/denoiser/parallel/test_forward.py"),
    ),
    **{
        name: Package(
            f"services/router/giornata_router/{name}.py",
            ("tests/unit/router",),
            ("tests/integration/router/test_stages.py",),
        )
        for name in ("admission", "fleet_reports", "job_records", "prepost")
    },
    "wire": Package(
        "shared/giornata/wire", ("tests/contract", "tests/unit"), ("tests/contract/test_codec.py",)
    ),
}
MOST_FILES: Final = 4
"""So many test files that import a module are run on it, and so many more that name what has the fault."""
OPPOSITES: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
DEFINITIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
UNSEEN: Final = frozenset({"annotation", "returns", "decorator_list", "type_params"})
"""Fields of syntax trees whose values the tests cannot notice."""
UNSEEN_KEYWORD: Final = "strict"
"""As these: :func:`zip` refuses with it what no caller gives."""


class Edit(NamedTuple):
    """Other text in the place of a node."""

    node: ast.expr
    text: str


def edits(source: str) -> list[Edit]:
    """Every fault that a module may be given, in the order of its text."""
    return [edit for node in _nodes(ast.parse(source)) for edit in _edits(node)]


def applied(source: str, edit: Edit) -> str:
    """The module with one fault."""
    lines = source.encode().splitlines(keepends=True)
    node = edit.node
    first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
    before, after = lines[first][: node.col_offset], lines[last][node.end_col_offset :]
    return b"".join([*lines[:first], before, edit.text.encode(), after, *lines[last + 1 :]]).decode()


def sample(size: int, seed: int, packages: Sequence[str], root: Path = ROOT) -> list[Mutant]:
    """`size` different faults in `packages`, or all that there are; a seed draws the same ones from the same code."""
    places = [
        (path, package, edit)
        for package in (PURE[name] for name in packages)
        for path in sorted({*root.glob(package.folder), *(root / package.folder).rglob("*.py")})
        if path.suffix == ".py"
        for edit in edits(path.read_text())
    ]
    drawn = Random(seed).sample(places, min(size, len(places)))  # noqa: S311 - a sample, no secret
    return [_mutant(path, edit, package, root) for path, package, edit in drawn]


def nearest_tests(path: Path, names: Sequence[str], package: Package, root: Path = ROOT) -> tuple[str, ...]:
    """The test files to run on a fault of a module, in the definitions with these `names` (the innermost first).

    Those that import the module, first the package's own, and of them the ones that name most; those of the package
    as a whole; and the first ones that only name one of the two innermost definitions. Where none imports it, all of
    its package's; where none names the innermost definition, those of the modules that use it, too.
    """
    near, far = (
        sorted(
            _importing(path, folders, root),
            key=lambda test: (-_naming(test, names), path.stem not in test.name),
        )
        for folders in (package.tests, OTHERS)
    )
    importing = [*dict.fromkeys((*near, *far))]
    own = [f"{package.tests[0]}/{path.parent.name}", package.tests[0]]
    chosen = [str(test.relative_to(root)) for test in importing[:MOST_FILES]]
    chosen = chosen or [*package.whole, next(folder for folder in own if (root / folder).exists())]
    naming = [test for test in _tests((*package.tests, *OTHERS), root) if _naming(test, names[:2])]
    naming.sort(key=lambda test: -_naming(test, names[:2]))
    if not any(_naming(test, names[:1]) for test in (*importing, *naming)):
        naming = [*_of_users(path, names[:1], root), *naming]
    others = [str(test.relative_to(root)) for test in naming]
    others = [test for test in others if test not in chosen and not test.startswith(tuple(chosen))]
    return tuple(dict.fromkeys((*chosen, *package.whole, *others[:MOST_FILES])))


def _importing(path: Path, folders: tuple[str, ...], root: Path) -> list[Path]:
    """The test files that import a module."""
    parts = path.relative_to(root).with_suffix("").parts
    parts = parts[next(i for i, part in enumerate(parts) if part.startswith("giornata")) :]
    module, folder, name = ".".join(parts), ".".join(parts[:-1]), parts[-1]
    imports = (f"from {module} import", f"import {module}\n", f"from {folder} import {name}")
    return [test for test in _tests(folders, root) if any(text in _text_of(test) for text in imports)]


def _of_users(path: Path, names: Sequence[str], root: Path) -> list[Path]:
    """The test files that import a module which names what another one defines, those that bear its name first."""
    users = [user for user in _modules(root) if user != path and _naming(user, names)]
    found = [(user.stem not in test.name, test) for user in users for test in _importing(user, OTHERS, root)]
    return [test for _, test in sorted(found, key=lambda pair: pair[0])]


@cache
def _modules(root: Path) -> list[Path]:
    return sorted(path for top in ("shared", "services") for path in (root / top).rglob("giornata*/**/*.py"))


@cache
def _tests(folders: tuple[str, ...], root: Path) -> list[Path]:
    return [*dict.fromkeys(test for one in folders for test in sorted((root / one).rglob("test_*.py")))]


@cache
def _text_of(test: Path) -> str:
    return test.read_text()


@cache
def _words_of(test: Path) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", _text_of(test)))


def _naming(test: Path, names: Sequence[str]) -> int:
    """How many of these words are in a file."""
    return len(_words_of(test).intersection(names))


def _definitions(tree: ast.Module, node: ast.expr) -> list[str]:
    """Names by which tests may know where a node is: of the functions and classes around it, the innermost first.

    Behind a constant and a private definition stand those that use it.
    """
    found: dict[str, None] = {}
    for outer in reversed([outer for outer in _named(tree) if _within(node, outer)]):
        name = _name(outer)
        found[name] = None
        if not found.keys() - {name} and (name.startswith("_") or not isinstance(outer, DEFINITIONS)):
            found |= dict.fromkeys(_name(one) for one in _named(tree) if name in _words(one))
    return [name for name in found if not name.startswith("_")]


def _named(tree: ast.Module) -> list[ast.stmt]:
    """Functions, classes and constants of a module, the outer ones first."""
    return [one for one in ast.walk(tree) if isinstance(one, ast.stmt) and _name(one)]


def _name(statement: ast.stmt) -> str:
    match statement:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return name
        case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
            return name if statement.col_offset == 0 else ""
        case _:
            return ""


def _words(statement: ast.stmt) -> set[str]:
    nodes = [*ast.walk(statement)]
    return {one.id for one in nodes if isinstance(one, ast.Name)} | {
        one.attr for one in nodes if isinstance(one, ast.Attribute)
    }


def _within(node: ast.expr, outer: ast.stmt) -> bool:
    return outer.lineno <= node.lineno and (node.end_lineno or 0) <= (outer.end_lineno or 0)


def _mutant(path: Path, edit: Edit, package: Package, root: Path) -> Mutant:
    source, file = path.read_text(), str(path.relative_to(root))
    was = ast.get_source_segment(source, edit.node) or ""
    name = f"line {edit.node.lineno}: {' '.join(was.split())} -> {edit.text}"
    names = _definitions(ast.parse(source), edit.node)
    return Mutant(name, file, applied(source, edit), nearest_tests(path, names, package, root))


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """A node and all below it, without annotations, decorators, docstrings, what f-strings hold and `strict`."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in UNSEEN or isinstance(node, ast.JoinedStr):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and getattr(child, "arg", "") != UNSEEN_KEYWORD:
                yield from _nodes(child)


def _edits(node: ast.AST) -> Iterator[Edit]:
    match node:
        case ast.Compare(ops=[op]) if type(op) in OPPOSITES:
            yield Edit(node, _text(ast.Compare(node.left, [OPPOSITES[type(op)]()], node.comparators)))
        case ast.BoolOp(op=op):
            yield Edit(
                node, _text(ast.BoolOp(ast.And() if isinstance(op, ast.Or) else ast.Or(), node.values))
            )
        case ast.UnaryOp(op=ast.Not()):
            yield Edit(node, _text(node.operand))
        case ast.BinOp(op=ast.Add() | ast.Sub() as op):
            other = ast.Sub() if isinstance(op, ast.Add) else ast.Add()
            yield Edit(node, _text(ast.BinOp(node.left, other, node.right)))
        case ast.Constant(value=bool() as value):
            yield Edit(node, str(not value))
        case ast.Constant(value=int() as number):
            yield Edit(node, f"({number} + 1)")
        case ast.Return(value=ast.expr() as returned) if ast.unparse(returned) not in {"None", "False"}:
            yield Edit(returned, "None")
        case _:
            pass


def _text(node: ast.expr) -> str:
    return f"({ast.unparse(node)})"
