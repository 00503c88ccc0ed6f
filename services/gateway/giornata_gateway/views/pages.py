"""Pages of lists."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from giornata.wire.errors import InvalidField

T = TypeVar("T")


def page_of(
    items: Sequence[T], name_of: Callable[[T], str], limit: int, after: str | None
) -> tuple[Sequence[T], bool]:
    """At most `limit` of the sorted `items`, from the one that follows `after`; and whether there are more.

    InvalidField where none has this name.
    """
    first = 0
    if after is not None:
        first = next((place for place, item in enumerate(items, 1) if name_of(item) == after), 0)
    if after is not None and not first:
        raise InvalidField(
            "There is nothing with this id to go on after.",
            field="after",
            received=after,
            accepted="an id of the list",
        )
    return items[first : first + limit], first + limit < len(items)
