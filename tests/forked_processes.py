"""Processes that compute with torch, forked from a server of this process that has imported what they run.

Production starts Python for each. That takes seconds of a processor, and a test asks for what the process does then.
"""

from __future__ import annotations

from multiprocessing import active_children, context, forkserver, popen_forkserver
from multiprocessing.process import BaseProcess
from typing import Any, Final
from unittest.mock import patch

PRELOADED: Final = (
    "giornata_denoiser.profiling.ranks",
    "giornata_denoiser.families.flux",
    "giornata_denoiser.families.unet.checkpoints",
    "diffusers.models.auto_model",
    "diffusers.models.autoencoders.autoencoder_kl",
    "hypothesis",
    "pytest",
    "tests.fakes.control_instance",
    "tests.fakes.forked_rank",
    "tests.fakes.tiny_driven",
    "giornata_lab.bench.compute.tiny_unet",
    "tests.integration.denoiser.parallel.steps",
)

_SERVER: Final = forkserver.ForkServer()  # apart from the one of image processes, which must not import torch
_SERVER.set_forkserver_preload(list(PRELOADED))


class _Forking(popen_forkserver.Popen):
    """Starts a process from :data:`_SERVER`."""

    def _launch(self, process_obj: BaseProcess) -> None:
        with patch.object(forkserver, "connect_to_new_process", _SERVER.connect_to_new_process):
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


def end() -> None:
    """End what was forked and the server, and wait for that: they would outlive this process, some by a moment."""
    for process in active_children():
        if isinstance(process, TorchProcess):  # of a run that was interrupted
            process.kill()
            process.join()
    _SERVER._stop()  # type: ignore[attr-defined]  # made for tests, and the only way
