"""A class's name says what it is without its file: no two have one name, and none is a lone word that says nothing."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
WORDS: Final = """
Alike Another Asked Away Begun Beside Brought Came Chosen Closed Computed Done Drawn Due Ended Found Given Gone Heard
Held Here Joined Kept Left Made Moment Needed Opened Own Placed Prepared Ready Received Recorded Said Seen Sent Sheet
Shown Some Sparing Stay Taken Thing Told Wanted Way Wish Written
Asking Carrying Computing Holding Hosting Joining Keeping Making Placing Telling Waiting Wanting Weighing
"""


def names() -> dict[str, list[str]]:
    """The files of every class at the top of a module, by its name."""
    found = defaultdict(list)
    for folder in ("shared", "services", "deploy"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef):
                    found[node.name].append(str(path.relative_to(ROOT)))
    return found


def test_no_two_classes_have_one_name_and_none_a_word_that_says_nothing() -> None:
    found = names()
    assert {name: files for name, files in found.items() if len(files) > 1} == {}
    assert {name.lstrip("_"): found[name] for name in found if name.lstrip("_") in WORDS.split()} == {}


def test_the_docstring_of_a_class_or_a_module_begins_with_what_it_is() -> None:
    """It does not begin with a question: "What …", "How …" and "Those …" alone are no sentences."""
    found = []
    for folder in ("shared", "services", "deploy/tools"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, (ast.ClassDef, ast.Module)):
                    first, _, _ = (ast.get_docstring(node) or "").partition(" ")
                    if first in {
                        "What",
                        "How",
                        "Whether",
                        "Those",
                        "Where",
                        "Which",
                        "Who",
                        "When",
                        "By",
                        "Of",
                    }:
                        found.append(f"{path.relative_to(ROOT)}: {getattr(node, 'name', 'module')}")
    assert found == []
