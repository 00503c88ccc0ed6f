"""``python -m tests.lab.fuzz.worker TARGET FLAGS FOLDERS``: libFuzzer on one target, which ends this process."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable

import atheris

with atheris.instrument_imports(
    include=["PIL", "giornata", "giornata_gateway", "giornata_tools", "giornata_lora_store"]
):
    from tests.lab.fuzz.targets import TARGETS

from tests.lab.fuzz.cost import check_memory, check_time
from tests.lab.fuzz.seeds import seeds

ONE_IN = 4
"""One input in so many has its memory measured, too, which takes three times as long."""


def tried(name: str) -> Callable[[bytes], None]:
    """A target that fails on what takes too long or too much memory, too."""
    target, numbers = TARGETS[name], itertools.count()
    for data in seeds()[name]:
        target(data)  # imports what it needs

    def run(data: bytes) -> None:
        check_time(target, data)
        if next(numbers) % ONE_IN == 0:
            check_memory(target, data)

    return run


if __name__ == "__main__":
    program, target, *flags = sys.argv
    atheris.Setup([program, *flags], tried(target))
    atheris.Fuzz()
