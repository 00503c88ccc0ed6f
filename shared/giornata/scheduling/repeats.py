"""How likely a picture comes back, judged by the latest ones. Pure."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

REMEMBERED: Final = 10_000
"""Pictures."""
SMOOTHING: Final = 0.02
"""Weight of the latest edit."""


class Repeats:
    """Counts the templates of edits.

    Where all pictures are new, keeping a template in one place is worth nothing; where few come again and again, as in
    FlashPS's production trace, one more hit is almost certain.
    """

    def __init__(self) -> None:
        self._seen: OrderedDict[str, None] = OrderedDict()
        self.share = 0.5
        """Share of recent edits whose picture was edited before; a half before the first edit."""

    def see(self, template: str) -> None:
        """Take in that an edit of `template` was placed."""
        again = template in self._seen
        self._seen[template] = None
        self._seen.move_to_end(template)
        if len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)
        self.share += SMOOTHING * (again - self.share)
