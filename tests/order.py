"""The order of a run on several workers: the longest groups of tests first, and one worker for the shared stack.

A group is what one worker runs: a file, or all tests that use the shared stack. Files keep the order of their tests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest
from xdist.scheduler import LoadGroupScheduling

RECORDED: Final = Path(__file__).with_name("longest.txt")
SHARED_STACK: Final = "stack"
"""Name of the fixture, and of the group of the tests that use it."""


def recorded(text: str) -> dict[str, float]:
    """Group → seconds, from lines ``seconds group``; a line that begins with # is a remark."""
    lines = (line.split() for line in text.splitlines() if not line.startswith("#"))
    return {group: float(seconds) for seconds, group in lines}


def longest_first(items: list[pytest.Item]) -> None:
    """Mark the tests that use the shared stack as one group, and sort all groups by their recorded seconds."""
    seconds = recorded(RECORDED.read_text(encoding="utf-8"))
    ranks: dict[pytest.Item, float] = {}
    for item in items:
        group = item.nodeid.partition("::")[0]
        if _is_shared(item):
            group = SHARED_STACK
            item.add_marker(pytest.mark.xdist_group(SHARED_STACK))
        ranks[item] = seconds.get(group, 0.0)
    items.sort(key=lambda item: -ranks[item])


def _is_shared(item: pytest.Item) -> bool:
    """Whether it uses the stack of the whole run; a file may give its own stack the same name."""
    if not isinstance(item, pytest.Function):
        return False
    definitions = item._fixtureinfo.name2fixturedefs.get(SHARED_STACK, ())
    return bool(definitions) and definitions[-1].scope == "session"


class ByGroup(LoadGroupScheduling):  # type: ignore[misc]  # xdist has no types
    """Hands out whole groups, in the order in which they were collected."""

    def _split_scope(self, nodeid: str) -> str:
        scope: str = super()._split_scope(nodeid)
        return scope.partition("::")[0]
