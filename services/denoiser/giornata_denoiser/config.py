"""The settings of a denoiser."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final, Self

from pydantic import Field, field_validator, model_validator

from giornata.checkpoints import ModelConfig
from giornata.runtime import HOST_SHARE, memory_bytes
from giornata.scheduling.batch import BatchingMode
from giornata.wire.loras import LORA_FILE_BYTES
from giornata_denoiser.choices import (
    VARIABLE,
    CacheForm,
    ControlNetExecutor,
    WeightQuantization,
    claimed_of,
    parse_devices,
)

if TYPE_CHECKING:
    import torch

CACHE_PARTS: Final = 7
"""The memory for caches has so many parts: four for templates, two for LoRAs, and one for what edits leave of pictures
without a template."""
LORA_DEVICE_MB: Final = 2048
"""Of LoRAs that no row uses now, on the device, by default."""


class TemplatePolicy(StrEnum):
    """The reaction to a template that is missing."""

    BACKGROUND = "background"
    """The edit goes on without it, and the template is recorded beside later ones: :attr:`template_first_mb`."""
    INLINE = "inline"
    """The template is recorded first."""
    OFF = "off"
    """The edit computes everything; what there is serves, and what is registered is recorded."""


class TextReusePolicy(StrEnum):
    """The reuse of prompts' tokens by edits that take from a template."""

    OFF = "off"
    """Nothing: every step computes all of them."""
    PADDING = "padding"
    """Padding is computed with the first step and each step in full; the others take what these made of it."""


class DenoiserConfig(ModelConfig):
    """Configuration of a denoiser."""

    template_policy: TemplatePolicy = Field(
        TemplatePolicy.BACKGROUND,
        description="What happens where an edit's template has not been recorded: `background`, it goes on, "
        "and later ones have it; `inline`, where every picture comes often; `off`, where none comes back.",
    )
    template_form: CacheForm = Field(
        CacheForm.KV,
        description="What is recorded: `kv`, keys and values, or `hidden`, half the bytes and slower, where "
        "memory is short.",
    )
    template_bits: ClassVar[int] = 4
    """Bits of recorded values: 8, 4, or 0 for those of the model's own dtype."""
    cache_memory_mb: int = Field(
        default_factory=lambda: CACHE_PARTS * memory_bytes() // (4 * HOST_SHARE) >> 20,
        ge=0,
        description="Memory for caches, in MiB, the least recently used out first: four sevenths for recorded "
        "templates, two for LoRAs, one for what edits leave of pictures without a template; default seven "
        "sixteenths of the machine's memory. Less where denoisers share a machine.",
    )
    cache_device_mb: int | None = Field(
        None,
        ge=0,
        description="Memory for caches on the device, in MiB, half for templates and half for LoRAs that no "
        "row uses now, beside what running rows take; default a quarter of what the model leaves free on a GPU, "
        "and 2048. More where LoRAs are loaded all the time.",
    )
    cache_folder: Path | None = Field(
        None,
        description="Where recorded templates, and LoRAs that were used, outlive the process, where a restart "
        "should find them; default nowhere, LoRAs in a temporary folder.",
    )
    cache_disk_mb: int = Field(
        16_384,
        ge=0,
        description="Of each cache on disk, in MiB, the least recently used out first: of templates and of "
        "LoRAs in a denoiser's `cache_folder`, of LoRAs in `lora_host_folder`. By the size of that disk.",
    )
    template_levels: ClassVar[int | None] = None
    """Noise levels that are recorded; edits take the nearest one. Default 6, of UNets 12."""
    template_correction: ClassVar[bool] = True
    """An edit's first step computes everything and corrects what the later ones take from the template, unless an
    edit with the same mask has done so before."""
    template_corrections_mb: ClassVar[int] = 512
    """Memory for corrections that later edits with the same mask use, in MiB; with 0 each computes its own."""

    lora_folder: Path | None = Field(
        None,
        description="Folder of the LoRA stores' files, made if need be; all stores of a deployment need it, and have "
        "the same one. A denoiser that names it copies files from there, instead of asking for them.",
    )
    lora_host_folder: Path | None = Field(
        None,
        description="Folder on the fast disk, or in the memory, of this machine, which one LoRA store fills with what "
        "the denoisers of this machine need; both are given it. Default none.",
    )
    lora_file_bytes: ClassVar[int] = LORA_FILE_BYTES
    """Largest file of a LoRA."""
    lora_loads: ClassVar[int] = 2
    """LoRAs that are loaded at a time."""

    renew_steps: ClassVar[int] = 7
    """An edit without a template computes one step in so many in full, or three where that is more, and the others
    only where its mask is; 0 computes all in full."""
    reuse_text: TextReusePolicy = Field(
        TextReusePolicy.OFF,
        description="`padding`, where speed counts more than the last hundredth of likeness: most steps of "
        "edits that reuse take the keys and values that an earlier step made of their prompts' padding; `off`: "
        "every step computes all text tokens.",
    )

    quantize: WeightQuantization = Field(
        WeightQuantization.OFF,
        description="Numbers of the weights of a transformer's blocks on a GPU, where they do not fit: `int8` "
        "or `float8` halve their bytes; `off`: the model's dtype. Needs torchao.",
    )
    devices: str = Field(
        "",
        description="Devices that compute steps together, as a pool: cuda:0,cuda:1, or cpu,cpu; a process for each. "
        "cuda,cuda: any two GPUs that are free (`device_claims`). "
        "Default: the one `device`, in this process.",
    )
    trace_folder: Path | None = Field(
        None,
        description="Folder for what explains a denoiser, where that is asked: `trace.json`, its latest steps, "
        "blocks and loads, written at the end, for Perfetto. Default nowhere.",
    )
    capacity_rows: int = Field(
        8,
        ge=1,
        le=1024,
        description="Most rows of one step, and of what is accepted; fewer where memory is short.",
    )
    profile: Path | None = Field(
        None,
        description="What steps cost here, as `giornata profile` has measured it, which a deployment does "
        "once; default a few steps at the start.",
    )
    batching: ClassVar[BatchingMode] = BatchingMode.STEP
    """When waiting rows join: at a `step`, or per `request`, when all others have left."""
    memory_mb: int | None = Field(
        None,
        ge=1,
        description="For rows and activations, in MiB, less where others need the device; default most of what "
        "is free on a GPU, no limit on a CPU.",
    )
    controlnets: str = Field(
        "",
        description="ControlNets that this process computes: NAME=CHECKPOINT, separated by commas; a checkpoint is a "
        "local diffusers folder or a hub id. A ControlNet service needs some.",
    )
    control_held_steps: ClassVar[int] = 2
    """Where an edit takes what lies outside its mask from elsewhere, what its ControlNets add serves so many steps;
    1 computes them in each. Edits with `reuse=off` always do."""
    control_executor: ClassVar[ControlNetExecutor] = ControlNetExecutor.AUTO
    """Who computes ControlNets that both this process and an instance of the ControlNet service have: `local`,
    `service`, or `auto`, whoever is predicted to hold up the steps less."""
    control_late_s: ClassVar[float] = 10.0
    """An instance whose sample takes longer is given up for the row."""
    control_open_s: ClassVar[float] = 20.0
    """How long a row waits for an instance that takes it."""
    control_slab_mb: ClassVar[int | None] = None
    """Memory of the data path to each instance, in MiB; default 1024, or a sixteenth of the machine's."""
    capacity_tokens: ClassVar[int] = 65_536
    """Most text and image tokens of one step; a larger row runs alone."""

    @property
    def template_memory_mb(self) -> int:
        """Recorded templates in memory, in MiB."""
        return 4 * self.cache_memory_mb // CACHE_PARTS

    @property
    def lora_memory_mb(self) -> int:
        """LoRAs in memory, in MiB."""
        return 2 * self.cache_memory_mb // CACHE_PARTS

    @property
    def template_first_mb(self) -> int:
        """What edits leave of pictures without a template, which serves the next edits instead of one, in MiB."""
        return self.cache_memory_mb // CACHE_PARTS

    @property
    def template_folder(self) -> Path | None:
        """Where recorded templates outlive the process."""
        return self.cache_folder and self.cache_folder / "templates"

    @property
    def lora_cache_folder(self) -> Path | None:
        """Where LoRAs that were used outlive the process; None for a temporary folder."""
        return self.cache_folder and self.cache_folder / "loras"

    @property
    def template_device_mb(self) -> int | None:
        """Recorded templates on a GPU, in MiB; None for a quarter of what the model leaves free."""
        return None if self.cache_device_mb is None else self.cache_device_mb // 2

    @property
    def lora_device_mb(self) -> int:
        """Sets of LoRAs on the device that no row uses now, in MiB."""
        return LORA_DEVICE_MB if self.cache_device_mb is None else self.cache_device_mb // 2

    @property
    def correction_bits(self) -> int | None:
        """Bits in which steps keep what they learn; None where they learn nothing."""
        return self.template_bits if self.template_correction else None

    @property
    def device_names(self) -> tuple[str, ...]:
        """The devices of a pool, in order; none where this process computes."""
        return parse_devices(self.devices)

    @property
    def gpus_wanted(self) -> int:
        """See :class:`~giornata.checkpoints.DeviceConfig`; of a pool those without a number."""
        return claimed_of(self.devices) if self.devices else super().gpus_wanted

    def own_devices(self) -> tuple[torch.device, ...]:
        """See :class:`~giornata.checkpoints.DeviceConfig`; a pool's leader computes nowhere."""
        return () if self.devices else super().own_devices()

    def seeing_alone(self) -> Self:
        """See :class:`~giornata.checkpoints.DeviceConfig`; a pool's leader shows each rank its own."""
        return self if self.devices else super().seeing_alone()

    @field_validator("devices")
    @classmethod
    def _devices_are_known(cls, value: str) -> str:
        parse_devices(value)
        return value

    @model_validator(mode="after")
    def _free_gpus_are_claimed(self) -> Self:
        if claimed_of(self.devices) and self.device_claims is None:
            raise ValueError(
                f"{VARIABLE} asks for any free GPU, which takes GIORNATA_DEVICE_CLAIMS, a folder that the replicas of "
                "this host share; name it, or number the GPUs"
            )
        return self
