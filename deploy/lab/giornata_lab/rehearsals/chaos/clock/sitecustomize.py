"""Lets the wall clock of a Python process jump; Python imports this module at its start, where its path has it.

The file that ``CHAOS_CLOCK`` names holds the seconds that the clock is ahead. Monotonic clocks stay as they are.
"""

import os
import threading
import time

import time_machine

SECONDS = 0.5
"""Between two looks at the file."""


def _follow(path: str) -> None:
    told, traveller = 0.0, time_machine.travel(time.time(), tick=True)
    clock = traveller.start()
    while True:
        with open(path, encoding="utf-8") as file:  # noqa: PTH123 - pathlib is slow to import
            ahead = float(file.read() or told)
        if ahead != told:
            clock.shift(ahead - told)
            told = ahead
        threading.Event().wait(SECONDS)


threading.Thread(target=_follow, args=(os.environ["CHAOS_CLOCK"],), daemon=True).start()
