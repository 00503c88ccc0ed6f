"""Networks whose operations are easily counted by hand."""

from __future__ import annotations

from typing import Final

from giornata.planning.operations import NetworkOperations
from giornata.wire.models import BlockSpec


def plain(count: int) -> tuple[BlockSpec, ...]:
    """So many equal blocks: one operation a computed or projected token, and one a pair of query and key."""
    block = BlockSpec(heads=1, linear=1.0, text=1.0, outside=1.0, pair=1.0, text_pair=1.0, count=count)
    return (block,)


PLAIN: Final = NetworkOperations(plain(1))
PLAIN_4: Final = NetworkOperations(plain(4))
