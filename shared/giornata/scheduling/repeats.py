"""Pictures and LoRAs that come again: which pictures are recorded, and how often edits have known ones. Pure."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

SMOOTHING: Final = 0.02
"""Weight of the latest edit."""


class _EditCounts:
    """Counts edits by template; of `most` templates, the latest."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._counts: OrderedDict[str, int] = OrderedDict()

    def count(self, template: str) -> int:
        """The number of edits of `template`, with the one that comes now."""
        count = self._counts[template] = self._counts.pop(template, 0) + 1
        if len(self._counts) > self._most:
            self._counts.popitem(last=False)
        return count


class TemplateRunPolicy:
    """A template that comes a second time is worth a run.

    FlashPS's production trace (section 2) has 970 templates for 34 million requests: few templates come, and often.
    `edits` says which edit of a template, counted from 1, has it recorded; `served` says so where what an earlier edit
    left serves them, so that a run gains less.
    """

    def __init__(self, edits: int = 2, served: int = 4) -> None:
        self._least, self._served, self._edits = edits, served, _EditCounts(100_000)

    def see(self, template_id: str, *, registered: bool = False, served: bool = False) -> bool:
        """Count an edit that found no recording; return whether one is to be made: of a registered template, always."""
        count = self._edits.count(template_id)
        return registered or count >= (self._served if served else self._least)


class ReuseRate:
    """Where all pictures, or all LoRAs, are new, keeping one in one place is worth nothing.

    Where few pictures come again and again, as in FlashPS's production trace, one more hit is almost certain.
    """

    def __init__(self) -> None:
        self._edits = _EditCounts(10_000)
        self.share = 0.5
        """Share of recent edits whose picture or LoRA was used before; a half before the first edit."""

    def see(self, key: str) -> None:
        """Take in that an edit was placed whose template, or LoRA, has this key."""
        self.share += SMOOTHING * ((self._edits.count(key) > 1) - self.share)
