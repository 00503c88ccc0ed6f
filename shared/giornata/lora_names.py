"""Names of a LoRA's tensors, as any trainer writes them. Free of torch."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

ALPHA: Final = ".alpha"
_FACTOR: Final = re.compile(
    r"(?P<module>.+?)(?:\.lora_|\.lora\.|\.lora_linear_layer\.|_lora(?P<number>\d?)\.)"
    r"(?P<side>A|B|down|up)(?:\.default)?\.weight\Z"
)


class FactorName(NamedTuple):
    """The parts of the name of a factor."""

    module: str
    """As the file names it; XLabs has two pairs a module, which are told apart by `#1` and `#2`."""
    is_down: bool
    """Whether it is the first factor, which maps down to the rank."""


def read_factor_name(name: str) -> FactorName | None:
    """Return what the name of a tensor says; None if it is no factor's."""
    found = _FACTOR.match(name)
    if found is None:
        return None
    number = f"#{found['number']}" if found["number"] else ""
    return FactorName(found["module"] + number, found["side"] in {"A", "down"})
