"""Networks whose operations are easily counted by hand, as the benches have them."""

from __future__ import annotations

from giornata_lab.bench.systems.networks import (
    PLAIN,
    PLAIN_4,
    plain,
)

__all__ = ["PLAIN", "PLAIN_4", "plain"]
