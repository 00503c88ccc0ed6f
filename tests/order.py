"""The order of a run on several workers: the longest groups of tests first, and one worker for each shared stack.

A group is what one worker runs: a file, or all tests that use one shared stack. Files keep the order of their tests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest
from xdist.scheduler import LoadGroupScheduling

RECORDED: Final = Path(__file__).with_name("longest.txt")
SHARED_STACKS: Final = ("stack", "shipped", "pairs")
"""Names of the fixtures, and of the groups of the tests that use them."""


def recorded(text: str) -> dict[str, float]:
    """Group → seconds, from lines ``seconds group``; a line that begins with # is a remark."""
    lines = (line.split() for line in text.splitlines() if not line.startswith("#"))
    return {group: float(seconds) for seconds, group in lines}


def longest_first(items: list[pytest.Item]) -> None:
    """Name the group in the ids of tests that use a shared stack, and sort all groups by their recorded seconds."""
    seconds = recorded(RECORDED.read_text(encoding="utf-8"))
    ranks: dict[pytest.Item, float] = {}
    for item in items:
        group = item.nodeid.partition("::")[0]
        if stack := shared_stack(item):
            group = stack
            if item.config.getoption("loadgroup", default=False):  # of a worker
                # as xdist 3.8 means to name it: what it sets for a mark is no part of a test's id since pytest 9.2
                item._id = type(item._id).parse(f"{item.nodeid}@{stack}")
        ranks[item] = seconds.get(group, 0.0)
    items.sort(key=lambda item: -ranks[item])


def shared_stack(item: pytest.Item) -> str | None:
    """The name of the stack of the whole run that it uses; a file may give its own stack the same name."""
    fixtures = item._fixtureinfo.name2fixturedefs if isinstance(item, pytest.Function) else {}
    shared = (name for name in SHARED_STACKS if name in fixtures and fixtures[name][-1].scope == "session")
    return next(shared, None)


class ByGroup(LoadGroupScheduling):  # type: ignore[misc]  # xdist has no types
    """Hands out whole groups, in the order in which they were collected."""

    def _split_scope(self, nodeid: str) -> str:
        scope: str = super()._split_scope(nodeid)
        return scope.partition("::")[0]
