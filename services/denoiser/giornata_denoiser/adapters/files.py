"""Canonical files of LoRAs on this machine's disk: mapped, and compared with the network's modules.

What prepost writes is described in :mod:`giornata_prepost.loras.canonical`. Its bytes have the digest that the job
names, but the network may be another version's, and the disk may have failed since.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from giornata.packed.low_rank import DOWN, TEXT_ENCODER, UP
from giornata.wire.errors import LoraMismatch, LoraUnreadable

DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)
READ_BYTES: Final = 1 << 22


@dataclass(frozen=True, eq=False)
class LoraFile:
    """The tensors of one file that change the denoising network."""

    tensors: Mapping[str, Tensor]
    """``<path>.down`` (rank, in) and ``<path>.up`` (out, rank) of each module, of one dtype: mapped pages."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all of them."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def open_lora(path: Path, digest: str | None, layers: Mapping[str, nn.Module]) -> LoraFile:
    """The file of this sha-256, if its modules are among the `layers` of the network, by path.

    Every byte is read once. With None for the digest none is: it was compared while the file was received.

    Raises:
        LoraUnreadable: the file is not whole, or not the one of this digest.
        LoraMismatch: a module, a shape or a dtype does not fit the network.
        OSError: it cannot be read.
    """
    if digest is not None and (found := sha256(path)) != digest:
        raise LoraUnreadable("The file of a LoRA is damaged.", received=found, accepted=digest)
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            names = [name for name in file.keys() if not name.startswith(TEXT_ENCODER)]  # noqa: SIM118 - not a mapping
            tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in names}
    except SafetensorError as error:
        raise LoraUnreadable(received=str(error), accepted="a whole file of safetensors") from error
    _check(tensors, layers)
    return LoraFile(tensors)


def sha256(path: Path) -> str:
    """The digest of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def copied(source: Path, target: Path, digest: str) -> bool:
    """Copy a file; whether there was one with this sha-256, which is compared on the way.

    Raises:
        OSError: `target` cannot be written.
    """
    total = hashlib.sha256()
    try:
        reading = source.open("rb")
    except OSError:  # none of this name, or none that this process may read
        return False
    with reading, target.open("wb") as writing:
        while piece := reading.read(READ_BYTES):
            total.update(piece)
            writing.write(piece)
    return total.hexdigest() == digest


def _check(tensors: Mapping[str, Tensor], layers: Mapping[str, nn.Module]) -> None:
    if len({tensor.dtype for tensor in tensors.values()}) > 1:
        raise LoraMismatch("The LoRA's factors have several dtypes.", accepted="one of them")
    for name, tensor in tensors.items():
        path, _, end = name.rpartition(".")
        if f".{end}" not in {DOWN, UP} or tensor.dtype not in DTYPES:
            raise LoraMismatch(received=f"{name} {tensor.dtype}", accepted=f"*{DOWN}, *{UP} of {DTYPES}")
        down, up = tensors.get(path + DOWN), tensors.get(path + UP)
        if down is None or up is None:
            raise LoraMismatch("The LoRA has one factor of a module without the other.", received=name)
        received = tuple(down.shape), tuple(up.shape)
        wanted = _shapes(layers.get(path), len(down) if down.ndim else 0)
        if received != wanted:
            raise LoraMismatch(
                received=f"{path}: {received}", accepted="no such module" if wanted is None else str(wanted)
            )


def _shapes(module: nn.Module | None, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Shapes of a module's factors of this rank; None where it takes none."""
    if isinstance(module, nn.Linear):
        return (rank, module.in_features), (module.out_features, rank)
    if isinstance(module, nn.Conv2d) and module.groups == 1:
        sides = tuple(module.kernel_size)
        return (rank, module.in_channels, *sides), (module.out_channels, rank, 1, 1)
    return None
