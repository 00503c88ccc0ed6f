"""A class's name says what it is without its file: no two have one name, and none is a lone word that says nothing."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
WORDS: Final = """
Alike Another Asked Away Begun Beside Brought Came Chosen Closed Computed Done Drawn Due Ended Found Given Gone Heard
Held Here Joined Kept Left Made Moment Needed Opened Own Placed Prepared Ready Received Recorded Said Seen Sent Sheet
Shown Some Sparing Stay Taken Thing Told Wanted Way Wish Written
Asking Carrying Computing Holding Hosting Joining Keeping Making Placing Telling Waiting Wanting Weighing
"""


CLASS: Final = re.compile(r"^class (\w+)", re.MULTILINE)
"""A class at the top of a module."""
DOCUMENTED: Final = re.compile(r'(?:\A|^ *class [^:]+?:\n *)"""(\w+)', re.MULTILINE)
"""The first word of the docstring of a module or a class."""
QUESTIONS: Final = {"What", "How", "Whether", "Those", "Where", "Which", "Who", "When", "By", "Of"}


@cache
def texts() -> Mapping[Path, str]:
    """Every file of the services, the shared code and what deploys them."""
    paths = [path for folder in ("shared", "services", "deploy") for path in (ROOT / folder).rglob("*.py")]
    return {path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in sorted(paths)}


def test_no_two_classes_have_one_name_and_none_a_word_that_says_nothing() -> None:
    found = defaultdict(list)
    for path, text in texts().items():
        for name in CLASS.findall(text):
            found[name].append(str(path))
    assert len(found) > 500
    assert {name: files for name, files in found.items() if len(files) > 1} == {}
    assert {name.lstrip("_"): found[name] for name in found if name.lstrip("_") in WORDS.split()} == {}


def test_the_docstring_of_a_class_or_a_module_begins_with_what_it_is() -> None:
    """It does not begin with a question: "What …", "How …" and "Those …" alone are no sentences."""
    parts = [path for path in texts() if path.parts[:2] == ("deploy", "tools") or path.parts[0] != "deploy"]
    words = {path: DOCUMENTED.findall(texts()[path]) for path in parts}
    assert sum(map(len, words.values())) > 1000
    assert {str(path): asked for path, told in words.items() if (asked := QUESTIONS & set(told))} == {}
