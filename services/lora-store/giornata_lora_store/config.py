"""The LoRA store's configuration."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from giornata.config import ServiceConfig
from giornata.wire.loras import LORA_FILE_BYTES


class LoraStoreConfig(ServiceConfig):
    """Configuration of the LoRA store."""

    lora_folder: Path = Field(
        description="Folder of the LoRA stores' files, made if need be; all stores of a deployment need it, and have "
        "the same one. A denoiser that names it copies files from there, instead of asking for them."
    )
    lora_shared_folder: Path | None = Field(
        None,
        description="Folder with LoRAs for all tenants, where there are some, as MODEL/NAME.safetensors; it is "
        "only read. Default none.",
    )
    lora_host_folder: Path | None = Field(
        None,
        description="Folder on the fast disk, or in the memory, of this machine, which one LoRA store fills with what "
        "the denoisers of this machine need; both are given it. Default none.",
    )
    cache_disk_mb: int = Field(
        16_384,
        ge=1,
        description="Of each cache on disk, in MiB, the least recently used out first: of templates and of "
        "LoRAs in a denoiser's `cache_folder`, of LoRAs in `lora_host_folder`. By the size of that disk.",
    )
    lora_plan_mb_s: ClassVar[float] = 100.0
    """Bandwidth into that folder, in MiB a second, beyond which loads by plan wait; loads on demand take from it
    first, and never wait."""
    lora_scan_s: ClassVar[float] = 30.0
    """Pause between two looks into that folder, and at what is left undone."""
    lora_file_bytes: ClassVar[int] = LORA_FILE_BYTES
    """Largest file of a LoRA."""
    lora_folder_bytes: int = Field(
        100 << 30,
        ge=1 << 20,
        description="Most bytes of all files, which tenants share; by the size of that disk.",
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

    @property
    def lora_host_name(self) -> str:
        """What plans call this host; the machine's name."""
        return re.sub(r"[^A-Za-z0-9_-]", "_", socket.gethostname())
