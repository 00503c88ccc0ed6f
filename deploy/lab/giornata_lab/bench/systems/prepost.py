"""What happens before and after denoising: the autoencoder, here or in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from multiprocessing import get_context
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from diffusers import FluxInpaintPipeline

from giornata_lab.bench.compute.models import LATENT_CHANNELS, autoencoder

Array = npt.NDArray[np.float32]
PIPELINE: Any = FluxInpaintPipeline


class Coder:
    """The autoencoder of the benchmarks, packing as the pipeline does."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self.model = autoencoder(dtype, device)

    @torch.inference_mode()
    def encode(self, pixels: Array) -> Array:
        """(3, height, width) in 0..1 → (tokens, channels) latents, the posterior's mode."""
        config = self.model.config
        picture = torch.from_numpy(pixels)[None].to(self._device, self._dtype) * 2 - 1
        mode = self.model.encode(picture).latent_dist.mode()
        latents = (mode - config.shift_factor) * config.scaling_factor
        height, width = latents.shape[-2:]
        packed = PIPELINE._pack_latents(latents, 1, LATENT_CHANNELS, height, width)
        return np.asarray(packed[0].float().cpu())

    @torch.inference_mode()
    def decode(self, latents: Array, pixels: int) -> npt.NDArray[np.uint8]:
        """(tokens, channels) of a square picture of `pixels` a side → (pixels, pixels, 3)."""
        config = self.model.config
        packed = torch.from_numpy(latents)[None].to(self._device, self._dtype)
        unpacked = PIPELINE._unpack_latents(packed, pixels, pixels, 8)
        scaled = unpacked / config.scaling_factor + config.shift_factor
        picture = self.model.decode(scaled, return_dict=False)[0][0]
        levels = ((picture.float() / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8)
        return np.asarray(levels.permute(1, 2, 0).cpu())


class CoderProcess:
    """A :class:`Coder` in another process; work is done one piece after the other."""

    def __init__(self, pool: ProcessPoolExecutor, dtype: torch.dtype, device: torch.device) -> None:
        self._pool, self._dtype, self._device = pool, dtype, device

    def encode(self, pixels: Array, then: Callable[[Array], object]) -> None:
        """Call `then`, in a thread of the pool, with what :meth:`Coder.encode` returns."""
        work = self._pool.submit(_encode, self._dtype, str(self._device), pixels)
        work.add_done_callback(lambda done: then(done.result()))

    def decode(self, latents: Array, pixels: int, then: Callable[[object], object]) -> Future[Any]:
        """Likewise for :meth:`Coder.decode`."""
        work = self._pool.submit(_decode, self._dtype, str(self._device), latents, pixels)
        work.add_done_callback(lambda done: then(done.result()))
        return work


@contextmanager
def coder_process(dtype: torch.dtype, device: torch.device, pixels: int) -> Iterator[CoderProcess]:
    """A process with one thread, warmed up with a picture of `pixels` a side, for as long as the context lasts."""
    with ProcessPoolExecutor(1, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        empty = np.zeros((3, pixels, pixels), np.float32)
        latents = pool.submit(_encode, dtype, str(device), empty).result()
        pool.submit(_decode, dtype, str(device), latents, pixels).result()
        yield CoderProcess(pool, dtype, device)


@lru_cache(maxsize=1)
def _coder(dtype: torch.dtype, device: str) -> Coder:
    return Coder(dtype, torch.device(device))


def _encode(dtype: torch.dtype, device: str, pixels: Array) -> Array:
    return _coder(dtype, device).encode(pixels)


def _decode(dtype: torch.dtype, device: str, latents: Array, pixels: int) -> npt.NDArray[np.uint8]:
    return _coder(dtype, device).decode(latents, pixels)
