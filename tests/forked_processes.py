"""Processes that compute with torch, forked from the worker's server, which has imported what they run.

Production starts Python for each. That takes seconds of a processor, and a test asks for what the process does then.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from multiprocessing import context, forkserver, popen_forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any, Final
from unittest.mock import patch

from tests.forked_programs import PROCESS, server


def fork_process(descriptors: Sequence[int]) -> tuple[int, int]:
    """As :func:`multiprocessing.forkserver.connect_to_new_process`."""
    told, tells = os.pipe()
    reads, writes = os.pipe()
    tracker = resource_tracker.getfd()
    assert tracker is not None
    try:
        server().ask(PROCESS, reads, tracker, *descriptors, tells)
    finally:
        os.close(reads)
        os.close(tells)
    return told, writes


class _Forking(popen_forkserver.Popen):
    """Starts a process from the worker's server."""

    def _launch(self, process_obj: BaseProcess) -> None:
        with patch.object(forkserver, "connect_to_new_process", fork_process):
            super()._launch(process_obj)  # type: ignore[misc]  # the standard library's stubs lack it


class TorchProcess(context.ForkServerProcess):
    """A process as :mod:`multiprocessing` has them."""

    @staticmethod
    def _Popen(process_obj: BaseProcess) -> Any:  # noqa: N802 - the standard library's name
        return _Forking(process_obj)


class TorchForkContext(context.ForkServerContext):
    """Stands for what :func:`multiprocessing.get_context` returns."""

    Process = TorchProcess


FORKS: Final = TorchForkContext()
