"""The LoRA store's configuration."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from giornata.config import ServiceConfig


class LoraStoreConfig(ServiceConfig):
    """Configuration of the LoRA store."""

    lora_folder: Path = Field(
        description="Folder of the LoRAs' files, made if need be. All LoRA stores of a deployment have the same one."
    )
    lora_shared_folder: Path | None = Field(
        None,
        description="Folder with LoRAs for all tenants, as MODEL/NAME.safetensors; it is only read. Default none.",
    )
    lora_host_folder: Path | None = Field(
        None,
        description="Folder on the fast disk, or in the memory, of this machine, which this store alone fills with the "
        "LoRAs that its denoisers need; they are given the same one. Default none.",
    )
    lora_host_mb: int = Field(16_384, ge=1, description="LoRAs in that folder, in MiB.")
    lora_host_name: str = Field(
        default_factory=lambda: re.sub(r"[^A-Za-z0-9_-]", "_", socket.gethostname()),
        pattern=r"^[A-Za-z0-9_-]{1,96}$",
        description="What plans call this host: the same after a restart, and another one for each such folder; "
        "default the machine's name.",
    )
    lora_plan_mb_s: ClassVar[float] = 100.0
    """Bandwidth into that folder, in MiB a second, beyond which loads by plan wait; loads on demand take from it
    first, and never wait."""
    lora_scan_s: ClassVar[float] = 30.0
    """Pause between two looks into that folder, and at what is left undone."""
    lora_file_bytes: int = Field(2 << 30, ge=1 << 10, description="Largest file of a LoRA.")
    lora_folder_bytes: int = Field(
        100 << 30, ge=1 << 20, description="Most bytes of all files, which tenants share."
    )
    lora_header_bytes: ClassVar[int] = 4 << 20
    """Largest header of a LoRA; its tensors' names and its trainer's notes."""
    lora_tensors: ClassVar[int] = 20_000
    """Most tensors of a LoRA."""
    lora_rank: ClassVar[int] = 512
    """Largest rank of a LoRA."""
    lora_kept_s: ClassVar[float] = 3600.0
    """How long the files of a deleted LoRA stay after their last use: edits that have begun need them."""
    lora_upload_s: ClassVar[float] = 3600.0
    """After so long without a piece an upload is given up."""
    lora_validation_s: ClassVar[float] = 300.0
    """Time that prepost may take to make the canonical file of a LoRA."""
