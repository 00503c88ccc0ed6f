"""Processes that compute simulations side by side."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager


@contextmanager
def side_by_side(count: int) -> Iterator[ProcessPoolExecutor]:
    """So many processes, which end with the block; what libraries in them print goes to standard error."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, context, initializer=_redirect) as pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _redirect() -> None:
    """HiGHS prints lines of its own to standard output, where tables are read from."""
    sys.stdout.flush()
    os.dup2(2, 1)
