"""The memory plan of one device: what a checkpoint's parts take there, and which of them fit together. Pure.

Where denoiser and prepost share a device, the network and one row come first, then a picture that is decoded as a
whole, then text encoders. Rows share what is left.
"""

from __future__ import annotations

from typing import Final, NamedTuple

USABLE: Final = 0.95
"""Share of a device that is planned with: allocators leave gaps."""
CONTEXT_BYTES: Final = 600 << 20
"""What CUDA and its libraries take of a device for each process."""
TILE: Final = 512
"""Pixels a side of the tiles in which pictures pass an autoencoder that has no room for the whole."""
QUANTIZED: Final = 0.55
"""A network whose blocks have 8 bits, against 16: embedders and modulation keep theirs."""


class ModelMemory(NamedTuple):
    """The memory that a checkpoint takes of a device, in bytes of the dtype in which it is served there."""

    network: int
    encoders: int
    autoencoder: int
    """Weights, of all text encoders together."""
    pixel: float
    """Most that a pixel of a picture takes while it is decoded."""
    token: float
    """Most that a row takes for each token: activations of a step, and what it takes from a template and learns."""
    pixels_a_token: float
    text_tokens: int

    def row(self, pixels: int) -> int:
        """A row of a picture of so many pixels."""
        return round(self.token * (pixels / self.pixels_a_token + self.text_tokens))

    def denoiser(self, pixels: int, rows: int = 1) -> int:
        """A denoiser with so many rows in a step."""
        return CONTEXT_BYTES + self.network + rows * self.row(pixels)

    def prepost(self, whole_pixels: int, *, encoders: bool) -> int:
        """A prepost that decodes pictures of so many pixels as a whole, with or without its text encoders."""
        return CONTEXT_BYTES + self.autoencoder + encoders * self.encoders + round(self.pixel * whole_pixels)


class PrepostPlan(NamedTuple):
    """The memory and the placement of prepost's models on a device."""

    encoders: bool
    """Whether the text encoders are there; else they are on the CPU."""
    whole_pixels: int
    """Pictures of up to so many pixels pass the autoencoder as a whole, larger ones in tiles."""
    size_bytes: int


def plan_prepost(room: float, model: ModelMemory, pixels: int, encoders: bool | None = None) -> PrepostPlan:  # noqa: FBT001 - None decides
    """Plan a prepost in `room` bytes for pictures of up to so many pixels; `encoders` None: they are there if they fit.

    It has one tile at least, even if that does not fit.
    """
    if encoders is None:
        encoders = model.prepost(pixels, encoders=True) <= room
    left = room - model.prepost(0, encoders=encoders)
    whole = max(TILE**2, min(pixels, int(left // model.pixel)))
    return PrepostPlan(encoders, whole, model.prepost(whole, encoders=encoders))


def plan_device(device_bytes: int, model: ModelMemory, pixels: int) -> tuple[PrepostPlan, int]:
    """A prepost, and the rows of so many pixels that a step of a denoiser beside it has; below 1, they do not fit."""
    room = USABLE * device_bytes
    prepost = plan_prepost(room - model.denoiser(pixels), model, pixels)
    return prepost, int((room - prepost.size_bytes - model.denoiser(pixels, 0)) // model.row(pixels))
