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
    names = [name_of(item) for item in items]
    if after is not None and after not in names:
        raise InvalidField(
            "There is nothing with this id to go on after.",
            field="after",
            received=after,
            accepted="an id of the list",
        )
    first = 0 if after is None else names.index(after) + 1
    return items[first : first + limit], first + limit < len(items)
