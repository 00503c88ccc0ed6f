"""Which templates are recorded: registered ones, and templates that are edited again. Pure."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

REMEMBERED: Final = 100_000
"""Templates whose edits are counted."""


class RecordingRule:
    """Counts edits by template; a template that comes a second time is worth a run.

    FlashPS's production trace (section 2) has 970 templates for 34 million requests: few templates come, and often.

    Args:
        edits: which edit of a template, counted from 1, has it recorded.
    """

    def __init__(self, edits: int = 2) -> None:
        self._edits = edits
        self._seen: OrderedDict[str, int] = OrderedDict()

    def see(self, template_id: str, *, registered: bool = False) -> bool:
        """Count an edit that found no recording; return whether one is to be made: of a registered template, always."""
        count = self._seen.pop(template_id, 0) + 1
        self._seen[template_id] = count
        while len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)
        return registered or count >= self._edits
